"""End all ranks at once, without losing the last words of this one."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from mpi4py import MPI

from hpcdl.comm.diagnostics.flight_recorder import BROKE
from hpcdl.comm.progress import activity

OTHERS = 1.0  # seconds within which the others of a job that fails as a whole are gone
alone = False  # whether a rank that fails ends by itself, and others may go on (hpcdl/recovery/ulfm_recovery.py)
at_the_end: list[Callable[[], None]] = []  # what is left to do when this rank's program ends, and others go on


def end_job(status: int, why: str = "") -> None:
    """Flush what this rank has printed, and abort the whole job with this status; or, where it is `alone`, be gone.

    why: for who looks back (hpcdl/comm/diagnostics/flight_recorder.py).

    The launcher reads the ranks' output from pipes, and drops what it has not read yet when it ends the job (seen with
    MPICH): a tenth of a second lets it read.
    """
    if activity.flight is not None:
        activity.flight.ended(BROKE, why or f"ended the job with status {status}")
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.1)
    if alone and not is_the_last():  # by a signal, for an exit of one's own is not seen as a failure
        os.kill(os.getpid(), signal.SIGKILL)
    elif alone:
        os._exit(status)
    MPI.COMM_WORLD.Abort(status)
    os._exit(status)  # it comes back where the launcher cannot be reached (seen with MPICH, a host's link being cut)


def is_the_last() -> bool:
    """True if all other ranks are gone: then PRRTE 3, which outlives ranks, takes a signal for status 0 (seen).

    The lowest rank that is there waits for the others, which may be about to fail, too.
    """
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
            comm.Iprobe()  # for MPI learns of it only while somebody calls it
        time.sleep(1e-3)
