"""The clock of a run: the system's monotonic clock plus injected jumps (inject.py).

time limit, seconds of steps, agreements of ranks          this clock
spans of a trace, the watchdog                             the system's
"""

import time

LONGEST = 1e9  # seconds or milliseconds: longest wait that all system calls accept
jumped = 0  # nanoseconds ahead of the system's clock, on this rank


def nanoseconds() -> int:
    """Return nanoseconds since an arbitrary start, as time.perf_counter_ns."""
    return time.perf_counter_ns() + jumped


def seconds() -> float:
    """Return seconds since an arbitrary start."""
    return nanoseconds() / 1e9


def jump(ahead: float) -> None:
    """Advance the clock of this rank by so many seconds; negative: set it back."""
    global jumped
    jumped += round(ahead * 1e9)
