"""Abort the job: end all ranks at once, without losing the output of this one."""

import contextlib
import os
import select
import signal
import sys
import time

from mpi4py import MPI

from hpcdl.comm.diagnostics.flight_recorder import BROKE
from hpcdl.comm.progress import LONGEST, activity

OTHERS = 1.0  # seconds within which all ranks of a failing job exit
RANK = "PMI_RANK", "PMIX_RANK"  # variables of which a launcher sets one


def end_job(status: int, reason: str = "") -> None:
    """Flush this rank's output, and abort the job with this status; if other ranks are to survive, end this rank only.
    reason: for the post-mortem (diagnostics/flight_recorder.py). The launcher reads the ranks' output from pipes, and
    drops unread output when it ends the job (seen with MPICH): a pause of a tenth of a second lets it read."""
    if activity.flight is not None:
        activity.flight.ended(BROKE, reason or f"ended the job with status {status}")
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.1)
    if activity.survives and not is_the_last():  # by a signal: an exit does not count as a failure
        os.kill(os.getpid(), signal.SIGKILL)
    elif activity.survives:
        os._exit(status)
    MPI.COMM_WORLD.Abort(status)
    os._exit(status)  # Abort returns if the launcher cannot be reached (seen with MPICH and a cut link)


def print_error(text: str) -> None:
    """Write the text to the real stderr: a hook around ours may capture sys.stderr (torch.distributed's does)."""
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        sys.stderr = sys.__stderr__
    if sys.stderr is not None:
        sys.stderr.write(text)


def is_the_last() -> bool:
    """True if all other ranks have exited; after a death by signal the job's status would be 0 then (PRRTE 3). The
    lowest live rank waits up to OTHERS seconds for the others, which may fail, too."""
    comm, until = MPI.COMM_WORLD, time.monotonic() + OTHERS
    while True:
        comm.Ack_failed()
        gone = comm.Get_failed()
        ranks = MPI.Group.Translate_ranks(gone, None, comm.group)
        gone.Free()
        if len(ranks) == comm.size - 1:
            return True
        if set(range(comm.rank)) - {*ranks} or time.monotonic() >= until:
            return False
        with contextlib.suppress(MPI.Exception):
            comm.Iprobe()  # MPI notices a death only inside its calls
        time.sleep(LONGEST)


def launcher() -> int:
    """Return the process id of the launcher's process that has started this rank; 0 without a launcher."""
    return os.getppid() if any(name in os.environ for name in RANK) else 0


def end_without(parent: int) -> None:
    """End this rank if `parent`, the launcher's process, is gone, and nobody reads the rank's output: nobody else will.
    (MPICH's launcher may leave ranks after an abort: seen on a machine with more processes than cores.)"""
    if parent and os.getppid() != parent and any(map(unread, (1, 2))):
        if activity.flight is not None:
            activity.flight.ended(BROKE, "the launcher has ended")
        os._exit(1)


def unread(file: int) -> bool:
    """True if this file descriptor is a pipe whose reader is gone."""
    poll = select.poll()
    poll.register(file, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
