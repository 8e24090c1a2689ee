"""End all ranks at once, without losing the last words of this one."""

import os
import signal
import sys
import time
from collections.abc import Callable

from mpi4py import MPI

alone = False  # whether a rank that fails ends by itself, and others may go on (hpcdl/services/survival.py)
at_the_end: list[Callable[[], None]] = []  # what is left to do when this rank's program ends, and others go on


def end_job(status: int) -> None:
    """Flush what this rank has printed, and abort the whole job with this status; or, where it is `alone`, be gone.

    The launcher reads the ranks' output from pipes, and drops what it has not read yet when it ends the job (seen with
    MPICH): a tenth of a second lets it read.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.1)
    if alone:  # by a signal, for an exit of one's own is not seen as a failure
        os.kill(os.getpid(), signal.SIGKILL)
    MPI.COMM_WORLD.Abort(status)
