"""One rank's failure ends all ranks, at once and with a word of why.

Plain mpi4py hangs here: the rank that raised waits in MPI_Finalize for the others, which wait for its messages.
"""

import atexit
import contextlib
import functools
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from hpcdl.comm import job_abort
from hpcdl.comm.diagnostics import status_signal
from hpcdl.comm.diagnostics.flight_recorder import LEFT
from hpcdl.comm.job_abort import at_the_end, end_job
from hpcdl.comm.progress import activity
from hpcdl.errors import AgreedError, LoneError, TrainingError, UsageError, line, reason

claims: list[socket.socket] = []  # of this process, to say why the job ends, as long as it lives


@functools.cache  # once
def install() -> None:
    """Make an exception that nobody catches, in any thread, print its traceback once and abort the job.

    `sys.exit` with a status other than 0 ends the job, too: the others would wait for this rank. Where all ranks know
    that they leave, `raise SystemExit(status)` leaves quietly. Where others wait for a rank that has left, in whatever
    way, the watchdog ends the job. In a thread, an exit ends that thread, as Python has it.

    Programs install it when they start (launch/program.py), and for a user's own program the first `Communicator` over
    several ranks does, unless it is made with `ends_job=False`. It replaces sys.excepthook, threading.excepthook and
    sys.exit, takes over SIGUSR2 (hpcdl/comm/diagnostics/status_signal.py), and stays until the process ends.
    """
    sys.excepthook = abort
    threading.excepthook = in_thread
    sys.exit = leave
    atexit.register(end_all)
    status_signal.install()


def in_thread(event: Any) -> None:
    """What `abort` is in a thread, where SystemExit ends that thread and nothing else."""
    if not issubclass(event.exc_type, SystemExit):
        abort(event.exc_type, event.exc_value, event.exc_traceback)


class TrackedExit(SystemExit):
    """What `sys.exit` raises here. It is destroyed with no Python frame below it only when nobody has caught it."""

    status: Any = None  # of the exit under way, as `sys.exit` takes it

    def __del__(self) -> None:
        if sys._getframe().f_back is None:
            TrackedExit.status = self.code


def leave(status: Any = None) -> NoReturn:
    """sys.exit, in a form that tells whether it is caught."""
    raise TrackedExit(status)


def end_all() -> None:
    """At the interpreter's end: when this rank leaves with a status of its own, the others must not wait for it.

    With any other they learn that it has left.
    """
    if TrackedExit.status not in (None, 0) and MPI.COMM_WORLD.size > 1 and not MPI.Is_finalized():
        if not isinstance(TrackedExit.status, int):  # a text, which the interpreter has printed
            TrackedExit.status = 1
        end_job(TrackedExit.status, f"left by sys.exit({TrackedExit.status})")
    if activity.flight is not None:
        activity.flight.ended(LEFT, "left its program")
    if not MPI.Is_finalized():
        for each in at_the_end:
            each()


def abort(kind: type[BaseException], value: Any, trace: TracebackType | None) -> None:
    """Print what happened on this rank and end the whole job: status 2 for bad input, 1 for everything else."""
    if hasattr(sys, "ps1"):  # someone types into an interpreter: a mistake must not end it
        return sys.__excepthook__(kind, value, trace)
    comm = MPI.COMM_WORLD
    sys.stdout.flush()
    time.sleep(0.2 * (comm.rank > 0))  # what fails on all ranks alike is said once: leave the word to rank 0
    if issubclass(kind, LoneError) and comm.size > 1 and not job_abort.alone and not first_to_say():
        time.sleep(1.0)  # until who has said it ends the job
    elif issubclass(kind, UsageError | TrainingError | LoneError):
        say(f"error: {line(value)}\n")
    elif issubclass(kind, KeyboardInterrupt):
        say(f"rank {comm.rank}: interrupted\n")
    else:
        text = "".join(traceback.format_exception(kind, value, trace))
        ends = "" if job_abort.alone else "; all ranks are ended"
        say(f"rank {comm.rank} of {comm.size} failed{ends}\n{text}")
    end_job(2 if issubclass(kind, UsageError) else 1, f"failed with {kind.__name__}: {reason(value)}")


def first_to_say() -> bool:
    """False where another rank that the same launcher has started on this host says already why the job ends.

    An abstract address of a socket is the claim: the kernel gives it to one process, and takes it back at its end. A
    claim of another user's counts for nothing.
    """
    address = f"\0hpcdl-ends-{os.getuid()}-{os.getppid()}"
    mine = socket.socket(socket.AF_UNIX)
    try:
        mine.bind(address)
        mine.listen(128)
        claims.append(mine)
    except OSError:
        mine.settimeout(1.0)
        with contextlib.suppress(OSError), mine:
            mine.connect(address)
            owner = mine.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return struct.unpack("3i", owner)[1] != os.getuid()
    return True


def say(text: str) -> None:
    """Write it where it is seen though the job ends here: a hook around ours may catch what goes to sys.stderr.

    torch.distributed's does, to write it when ours has returned.
    """
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        sys.stderr = sys.__stderr__
    if sys.stderr is not None:
        sys.stderr.write(text)


@contextlib.contextmanager
def refuse_together(comm: MPI.Intracomm) -> Iterator[None]:
    """Run a part of the set-up that may refuse bad input on some ranks only; then all ranks refuse together.

    The body must not communicate. Raises, on all ranks, an AgreedError with the words of the lowest rank that raised a
    UsageError.
    """
    refusal = None
    try:
        with activity.known():
            yield
    except UsageError as error:
        refusal = str(error)
    with activity.inside("agree whether to refuse"):
        refusals = [text for text in comm.allgather(refusal) if text is not None]
    if refusals:
        raise AgreedError(refusals[0])
