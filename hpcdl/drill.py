"""Fault drills: the points of a run at which a fault may strike, and the clock that a fault may set.

--inject replaces `Drill`, which does nothing, by `Faults` (hpcdl/faults/inject.py). The run's clock is for time limits,
agreements of ranks, and the seconds and trace spans of steps; other spans and the watchdog use the system's clock."""

import os
import time
from typing import Any


class Drill:
    """A drill without faults. ahead: nanoseconds by which the clock of a run is ahead of the system's."""

    ahead = 0

    def attach(self, run: Any) -> None:
        """Follow a run that begins, or continues after the loss of ranks."""

    def step_begins(self, name: str) -> None:
        """Act when a step of this rank begins or, if `name` is "serve", when its service of the whole run begins."""

    def message_taken(self) -> None:
        """Act on a message that this rank has taken from an inbox (hpcdl/comm/framing.py)."""

    def check_room(self, path: str | os.PathLike[str]) -> None:
        """Raise OSError if the disk of this file counts as full."""


current = Drill()


def begin(drill: Drill) -> None:
    """Make `drill` the current drill."""
    global current
    current = drill


def nanoseconds() -> int:
    """Return the time of the run's clock: nanoseconds since an arbitrary start, like time.perf_counter_ns."""
    return time.perf_counter_ns() + current.ahead


def seconds() -> float:
    """Return the time of `nanoseconds`, in seconds."""
    return nanoseconds() / 1e9
