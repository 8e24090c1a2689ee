"""Show how a run is doing that goes on elsewhere: hpcdl watch runs/a

watch only reads the run's files, on any machine that sees them. On a terminal it shows curves, drawn anew every so many
seconds; through a pipe, a line whenever there is news. Of a FOLDER with several runs below it, as a comparison's, it
shows the run that changed last. It ends with the run, or with Ctrl-C. One process is enough, without MPI."""

import contextlib
import time
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from hpcdl.errors import UsageError
from hpcdl.launch.one_process import one_process
from hpcdl.launch.option_parser import parse
from hpcdl.reports.watch_view import NEWS, facts, news, outlook, view
from hpcdl.reports.watching import Watching
from hpcdl.runs.options import option

LEAST, MOST = 0.1, 86400.0  # seconds


@dataclass
class WatchOptions:
    """Options of watch: the folder, and how often it is read."""

    folder: list[str] = option(list, "folders of runs, or with runs below them")
    every: float = option(2.0, "seconds between two readings")
    once: bool = option(False, "print the state once, and exit")

    def __post_init__(self):
        if not LEAST <= self.every <= MOST:
            raise UsageError(f"--every is a number of seconds from {LEAST:g} to {MOST:,.0f}, not {self.every:g}")


def main(arguments=None):
    with one_process("watch"):
        options = parse(WatchOptions, "watch", __doc__, arguments)
        watching, console = Watching(options.folder), Console(markup=False, highlight=False, emoji=False)
        with contextlib.suppress(KeyboardInterrupt):
            watching.look()
            if not options.once:
                (on_terminal if console.is_terminal else in_lines)(watching, console, options.every)
            elif console.is_terminal:
                console.print(view(watching, watching.run, console))
            else:
                print("\n".join(facts(watching, watching.run)), flush=True)


def on_terminal(watching, console, every):
    """Redraw the state in place until the run ends."""
    with Live(view(watching, watching.run, console), console=console, auto_refresh=False) as live:
        while not over(watching):
            time.sleep(every)
            watching.look()
            live.update(view(watching, watching.run, console), refresh=True)


def in_lines(watching, console, every):
    """Print a line whenever there is news, until the run ends."""
    said = None
    while True:
        if watching.look() or said != state(watching):
            said = state(watching)
            print(news(watching, watching.run), flush=True)
        if over(watching):
            return
        time.sleep(every)


def state(watching):
    """Return values whose change counts as news, even if no file has changed."""
    watched = watching.run
    return watched.folder, watched.state(), bool(watched.quiet() >= NEWS) and outlook(watched)[0]


def over(watching):
    """True if nothing more will come: one run is watched, and has ended."""
    return watching.single and watching.run.state()[0] == "ended"


if __name__ == "__main__":
    main()
