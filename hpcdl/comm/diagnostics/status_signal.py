"""SIGUSR2 asks a running job what its ranks are doing; it may hang, or be in a call of MPI's that takes long.

A handler in Python runs when the main thread comes back to the interpreter; one that waits for a message does not. So
the number of the signal goes into a pipe, which Python's part in C writes to at once, and the watchdog's thread looks
into the pipe. It asks the ranks and prints what they say, once, whichever rank has had the signal (watchdog.py).
"""

import os
import signal
import sys
import threading
from types import FrameType

from hpcdl.comm.diagnostics.call_site import innermost, place

ends: list[int] = []  # the pipe's: to read, and to write
threads: list[object] = []  # that look into it


def install() -> None:
    """Take the signal over, where nobody else has taken it, nor the place where its number goes, as asyncio does."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
        return
    ends.extend(os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
    before = signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return
    signal.signal(signal.SIGUSR2, _alone)


def come() -> bool:
    """Whether the signal has come since this was asked last."""
    try:
        return bool(ends) and signal.SIGUSR2 in os.read(ends[0], 4096)
    except OSError:  # nothing
        return False


def _alone(number: int, frame: FrameType | None) -> None:
    """Where no watchdog looks there is one rank, and it says where it is itself."""
    if not threads and frame is not None:
        sys.stderr.write(f"hpcdl: this rank is at {place(innermost(frame))}\n")
