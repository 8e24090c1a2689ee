"""How a run shows how far it is: a line per evaluation, on a terminal above a bar; only rank 0 shows anything.

Under a launcher the standard output of rank 0 is no terminal (MPICH) or a terminal of its own (Open MPI), whatever
the user looks at; so the question is put to the launcher: the nearest ancestor process that is one, and where its
output goes.
"""

import os
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hpcdl.errors import printable

LAUNCHERS = ("mpiexec", "mpirun", "prterun", "orterun", "srun")


def terminal() -> str | None:
    """The terminal that the user looks at, as a device path; None when the output goes to a file or a pipe."""
    process = os.getpid()
    try:
        while process > 1:
            with open(f"/proc/{process}/stat") as file:
                text = file.read()
            name, parent = text[text.index("(") + 1 : text.rindex(")")], int(text[text.rindex(")") + 1 :].split()[1])
            if name.startswith(LAUNCHERS):
                target = os.readlink(f"/proc/{process}/fd/1")
                return target if target.startswith(("/dev/pts/", "/dev/tty")) else None
            process = parent
    except OSError:
        return None  # no /proc, or a launcher that is not ours to look at
    return os.ttyname(1) if sys.stdout.isatty() else None


def console() -> Console:
    """Where rank 0 prints: as wide as the user's terminal, or 100 columns without colour."""
    device = terminal()
    if device is None:
        return Console(width=100, force_terminal=False, color_system=None, markup=False)
    try:
        handle = os.open(device, os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return Console(width=80, force_terminal=True, markup=False)
    try:
        return Console(width=os.get_terminal_size(handle).columns or 80, force_terminal=True, markup=False)
    except OSError:
        return Console(width=80, force_terminal=True, markup=False)
    finally:
        os.close(handle)


class Display:
    """Shows steps, loss, score and examples/s; `mode` is auto, bar, lines or none."""

    def __init__(self, mode: str, rank: int):
        if rank != 0:
            mode = "none"
        self.console = console() if mode != "none" else Console(quiet=True, markup=False)
        self.mode = ("bar" if self.console.is_terminal else "lines") if mode == "auto" else mode
        self.bar: Progress | None = None

    def start(self, step: int, steps: int) -> None:
        if self.mode == "bar":
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=self.console, auto_refresh=False, expand=True)
            self.bar.start()
            self.task = self.bar.add_task("", total=steps, completed=step, text="")

    def update(self, step: int, steps: int, epoch: float, loss: float, score: str, rate: float) -> None:
        """After an agreement or an evaluation: shown by the bar only."""
        if self.bar is not None:
            text = f"loss {loss:.4f}  {score}  {rate:,.0f} ex/s"
            self.bar.update(self.task, completed=step, description=f"epoch {epoch:.1f}", text=text)
            self.bar.refresh()

    def line(self, text: str) -> None:
        """A line, or several, that stays: above the bar, or by itself; an empty text is none."""
        if text:
            self.console.print(printable(text), highlight=False, soft_wrap=True)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
