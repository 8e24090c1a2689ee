"""Status signal: on SIGUSR2 a job prints what its ranks are doing, even while it hangs in an MPI call.

A Python handler would run only when the main thread leaves MPI. So Python's C handler writes the signal to a pipe
(`signal.set_wakeup_fd`), which the watchdog's thread reads; it then queries all ranks (watchdog.py)."""

import os
import signal
import sys
import threading
from types import FrameType

from hpcdl.comm.diagnostics.call_site import innermost, location
from hpcdl.comm.progress import activity


def install() -> None:
    """Install the handler, unless the signal or the wakeup descriptor (as by asyncio) is already in use."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
        return
    activity.signal_pipe = list(os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
    before = signal.set_wakeup_fd(activity.signal_pipe[1], warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return
    signal.signal(signal.SIGUSR2, _report_without_watchdog)


def received() -> bool:
    """True if the signal has arrived since the last call."""
    try:
        return bool(activity.signal_pipe) and signal.SIGUSR2 in os.read(activity.signal_pipe[0], 4096)
    except OSError:  # the pipe is empty
        return False


def _report_without_watchdog(number: int, frame: FrameType | None) -> None:
    """Print this rank's location if there is no watchdog, as on a single rank."""
    if not activity.watchdogs and frame is not None:
        sys.stderr.write(f"hpcdl: this rank is at {location(innermost(frame))}\n")
