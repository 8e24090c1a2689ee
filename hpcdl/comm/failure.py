"""One rank's failure ends all ranks, at once and with a word of why.

Plain mpi4py hangs here: the rank that raised waits in MPI_Finalize for the others, which wait for its messages.
"""

import contextlib
import sys
import threading
import time
import traceback

from mpi4py import MPI

from hpcdl.errors import TrainingError, UsageError


def install() -> None:
    """Make an exception that nobody catches, in any thread, print its traceback once and abort the job."""
    sys.excepthook = abort
    threading.excepthook = lambda event: abort(event.exc_type, event.exc_value, event.exc_traceback)


def abort(kind, value, trace) -> None:
    """Print what happened on this rank and end the whole job: status 2 for bad input, 1 for everything else."""
    comm = MPI.COMM_WORLD
    sys.stdout.flush()
    time.sleep(0.2 * (comm.rank > 0))  # what fails on all ranks alike is said once: leave the word to rank 0
    if issubclass(kind, UsageError | TrainingError):
        sys.stderr.write(f"error: {value}\n")
    elif issubclass(kind, KeyboardInterrupt):
        sys.stderr.write(f"rank {comm.rank}: interrupted\n")
    else:
        text = "".join(traceback.format_exception(kind, value, trace))
        sys.stderr.write(f"rank {comm.rank} of {comm.size} failed; all ranks are ended\n{text}")
    sys.stderr.flush()
    comm.Abort(2 if issubclass(kind, UsageError) else 1)


@contextlib.contextmanager
def agreement(comm: MPI.Intracomm):
    """Run a part of the set-up that may refuse bad input on some ranks only; then all ranks refuse together.

    The body must not communicate. Raises, on all ranks, the UsageError of the lowest rank that raised one.
    """
    refusal = None
    try:
        yield
    except UsageError as error:
        refusal = str(error)
    refusals = [text for text in comm.allgather(refusal) if text is not None]
    if refusals:
        raise UsageError(refusals[0])
