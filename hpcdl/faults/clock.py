"""The clock of a run: the system's monotonic one, and what a drill has let it jump (inject.py).

time limit, seconds of steps, meetings of the ranks        this clock
spans of a trace, the watchdog                             the system's
"""

import time

LONGEST = 1e9  # seconds, or milliseconds: no clock of the system waits for ever so long
jumped = 0  # nanoseconds that it is ahead of the system's, on this rank


def nanoseconds() -> int:
    """Of no fixed beginning, as time.perf_counter_ns."""
    return time.perf_counter_ns() + jumped


def seconds() -> float:
    """The same in seconds."""
    return nanoseconds() / 1e9


def jump(ahead: float) -> None:
    """Let the clock of this rank jump by so many seconds; below 0, back."""
    global jumped
    jumped += round(ahead * 1e9)
