"""SIGTERM, SIGINT and SIGUSR1 end a run in good order: the step is finished, the state saved, the status 85.

Who brings the word of other ranks, where several trainings run in one job, is asked at those boundaries (`watchers`).

A handler only notes the signal; the ranks agree to stop at the next boundary of the run. A second SIGINT or SIGTERM
ends the process at once. Schedulers send such a signal before a time limit (`sbatch --signal=USR1@60`), and read
the status to requeue.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType

STATUS = 85
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

received: list[str] = []
own: list[str] = []  # of these, those that this process has had itself
watchers: list[Callable[[], object]] = []  # they add to `received`


def install() -> None:
    """Take over the three signals; to be called before MPI starts, which an early signal would otherwise kill."""
    for number in HANDLED:
        signal.signal(number, _note)


def told() -> int:
    """How many signals this rank knows of, its watchers' included."""
    for watch in watchers:
        watch()
    return len(received)


def _note(number: int, frame: FrameType | None) -> None:
    if own and number != signal.SIGUSR1:
        os._exit(128 + number)
    own.append(signal.Signals(number).name)
    received.append(signal.Signals(number).name)
