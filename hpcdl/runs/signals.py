"""SIGTERM, SIGINT and SIGUSR1 end a run in good order: the step is finished, the state saved, the status 85.

A handler only notes the signal; the ranks agree to stop at the next boundary, where `watchers` add the signals of other
ranks of a job of several runs. A second SIGINT or SIGTERM ends the process at once. Schedulers send such a signal
before a time limit (`sbatch --signal=USR1@60`), and read the status to requeue."""

import os
import signal
from collections.abc import Callable
from types import FrameType

STATUS = 85
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

received: list[str] = []
own: list[str] = []  # signals that this process itself has received
watchers: list[Callable[[], object]] = []  # functions that add other ranks' signals to `received`


def install() -> None:
    """Handle the three signals from now on; called before MPI starts, which an early signal would otherwise kill."""
    for number in HANDLED:
        signal.signal(number, _note)


def told() -> int:
    """Return how many signals this rank knows of, also through its watchers."""
    for watch in watchers:
        watch()
    return len(received)


def _note(number: int, frame: FrameType | None) -> None:
    if own and number != signal.SIGUSR1:
        os._exit(128 + number)
    own.append(signal.Signals(number).name)
    received.append(signal.Signals(number).name)
