"""Display of a run's progress on rank 0: a line for each evaluation, and on a terminal a bar below these lines.

Under a launcher the standard output of rank 0 is no terminal (MPICH) or a terminal of its own (Open MPI). So `terminal`
examines the output of the launcher, the nearest ancestor process with a launcher's name."""

import contextlib
import os
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hpcdl.errors import printable

LAUNCHERS = ("mpiexec", "mpirun", "prterun", "orterun", "srun")


def terminal() -> str | None:
    """Return the device path of the user's terminal; None if the output goes to a file or a pipe."""
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
        return None  # no /proc, or another user's launcher
    return os.ttyname(1) if sys.stdout.isatty() else None


def console() -> Console:
    """Return the console of rank 0: as wide as the user's terminal; without one, 100 columns and no colour."""
    device = terminal()
    if device is None:
        return Console(width=100, force_terminal=False, color_system=None, markup=False)
    width = 0
    with contextlib.suppress(OSError):
        handle = os.open(device, os.O_RDONLY | os.O_NOCTTY)
        try:
            width = os.get_terminal_size(handle).columns
        finally:
            os.close(handle)
    return Console(width=width or 80, force_terminal=True, markup=False)


class Display:
    """Shows steps, loss, score and examples/s. mode: bar, lines, none, or auto (bar on a terminal, else lines)."""

    def __init__(self, mode: str, rank: int):
        if rank != 0:
            mode = "none"
        self.console = console() if mode != "none" else Console(quiet=True, markup=False)
        self.mode = ("bar" if self.console.is_terminal else "lines") if mode == "auto" else mode
        self.bar: Progress | None = None

    def start(self, step: int, steps: int) -> None:
        if self.mode == "bar":
            texts = TextColumn("{task.description}"), TextColumn("{task.fields[text]}")
            columns = texts[0], BarColumn(bar_width=None), texts[1], TimeRemainingColumn()
            self.bar = Progress(*columns, console=self.console, auto_refresh=False, expand=True)
            self.bar.start()
            self.task = self.bar.add_task("", total=steps, completed=step, text="")

    def update(self, step: int, steps: int, epoch: float, loss: float, score: str, rate: float) -> None:
        """Refresh the bar, if any, after an agreement or an evaluation."""
        if self.bar is not None:
            text = f"loss {loss:.4f}  {score}  {rate:,.0f} ex/s"
            self.bar.update(self.task, completed=step, description=f"epoch {epoch:.1f}", text=text)
            self.bar.refresh()

    def line(self, text: str) -> None:
        """Print one or more lines, above the bar if there is one; print nothing for an empty text."""
        if text:
            self.console.print(printable(text), highlight=False, soft_wrap=True)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
