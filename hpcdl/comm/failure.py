"""One rank's failure ends all ranks at once, with its reason. Plain mpi4py hangs: the rank that raised waits in
MPI_Finalize for the others, which wait for its messages."""

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
from typing import Any

from mpi4py import MPI

from hpcdl.comm.diagnostics import status_signal
from hpcdl.comm.diagnostics.flight_recorder import LEFT
from hpcdl.comm.diagnostics.watchdog import leave_once
from hpcdl.comm.job_abort import end_job, print_error
from hpcdl.comm.progress import activity
from hpcdl.errors import AgreedError, AgreedExit, LoneError, TrainingError, UsageError, line, reason


@contextlib.contextmanager
def job() -> Iterator[None]:
    """Context of a program of several ranks: an error, or an exit with a status, of one rank ends all ranks.
    The hooks of `install` print the error. A status other than 0 becomes the job's status, except for an AgreedExit. If
    other ranks wait for a rank that has left in good order, the watchdog ends the job."""
    install()
    try:
        yield
    except SystemExit as left:
        if left.code not in (None, 0) and not isinstance(left, AgreedExit) and MPI.COMM_WORLD.size > 1:
            if not isinstance(left.code, int):  # a message
                print_error(f"{left.code}\n")
            status = left.code if isinstance(left.code, int) else 1
            end_job(status, f"left by sys.exit({status})")
        raise


@functools.cache  # once
def install() -> None:
    """Make an uncaught exception, in any thread, print its traceback once and abort the job, until the process ends.
    `job` calls this; otherwise the first `Communicator` over several ranks does, unless made with `ends_job=False`. It
    replaces sys.excepthook and threading.excepthook, and takes over SIGUSR2 (diagnostics/status_signal.py)."""
    sys.excepthook = abort
    threading.excepthook = in_thread
    atexit.register(leave_program)
    status_signal.install()


def in_thread(event: Any) -> None:
    """Run `abort` for an exception in a thread; SystemExit ends only the thread, as Python defines it."""
    if not issubclass(event.exc_type, SystemExit):
        abort(event.exc_type, event.exc_value, event.exc_traceback)


def leave_program() -> None:
    """Record the exit of the interpreter, and let the watchdogs tell the other ranks that this one has left."""
    if activity.flight is not None:
        activity.flight.ended(LEFT, "left its program")
    if not MPI.Is_finalized():
        leave_once()


def abort(kind: type[BaseException], value: Any, trace: TracebackType | None) -> None:
    """Print what happened on this rank, then end the job with status 2 for bad input, else 1, unless interactive."""
    if hasattr(sys, "ps1"):  # an interactive session: an error must not end it
        return sys.__excepthook__(kind, value, trace)
    comm = MPI.COMM_WORLD
    sys.stdout.flush()
    time.sleep(0.2 * (comm.rank > 0))  # an error of all ranks is printed once: let rank 0 be first
    if issubclass(kind, LoneError) and comm.size > 1 and not activity.survives and not claim_report():
        time.sleep(1.0)  # until the rank that reports ends the job
    elif issubclass(kind, UsageError | TrainingError | LoneError):
        print_error(f"error: {line(value)}\n")
    elif issubclass(kind, KeyboardInterrupt):
        print_error(f"rank {comm.rank}: interrupted\n")
    else:
        text = "".join(traceback.format_exception(kind, value, trace))
        ends = "" if activity.survives else "; all ranks are ended"
        print_error(f"rank {comm.rank} of {comm.size} failed{ends}\n{text}")
    end_job(2 if issubclass(kind, UsageError) else 1, f"failed with {kind.__name__}: {reason(value)}")


def claim_report() -> bool:
    """Claim to be the rank that reports why the job ends; False if another rank of this launcher on this host has. A
    claim is an abstract socket address, which one process holds until it exits. Claims of other users are ignored."""
    address = f"\0hpcdl-ends-{os.getuid()}-{os.getppid()}"
    mine = socket.socket(socket.AF_UNIX)
    try:
        mine.bind(address)
        mine.listen(128)
        activity.claims.append(mine)
    except OSError:
        mine.settimeout(1.0)
        with contextlib.suppress(OSError), mine:
            mine.connect(address)
            owner = mine.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return struct.unpack("3i", owner)[1] != os.getuid()
    return True


@contextlib.contextmanager
def refuse_together(comm: MPI.Intracomm) -> Iterator[None]:
    """Context in which a UsageError on some ranks becomes an AgreedError on all, with the message of the lowest such
    rank. Collective; the body must not communicate."""
    refusal = None
    try:
        with activity.exempt():
            yield
    except UsageError as error:
        refusal = str(error)
    with activity.inside("agree whether to refuse"):
        refusals = [text for text in comm.allgather(refusal) if text is not None]
    if refusals:
        raise AgreedError(refusals[0])
