"""A barrier that tells who has not come: torch.distributed.monitored_barrier.

    ranks 1, 2, ...    give rank 0 a sign and wait for its answer
    rank 0             waits for all signs for so long, then tells all what it has found, and names who is missing

Each sign and each answer bears the number of the barrier, which each rank counts for itself. So a rank that comes late
to one that has failed finds the answer there, and what one barrier leaves behind is nothing to the next.

PyTorch has it for gloo alone, and asks for the backend's name itself: registration.py stands before its function.
"""

import time

import numpy as np
from mpi4py import MPI

TAG = 40_000  # beyond those of messages that users send (comm/call_path.py)
CAME, MISSING = 1, 2
GRACE = 5.0  # seconds that rank 0 may take to answer beyond the time for all to come
leaving: list[MPI.Request] = []  # messages that may not have left; each keeps its buffer


def monitored_barrier(comm: MPI.Intracomm, number: int, seconds: float, wait_all: bool) -> None:
    """Until all have come. Raises RuntimeError on all that have come where some have not within the seconds.

    number: of this barrier on this communicator, which is to be larger than that of the last one.
    """
    rank, size = comm.rank, comm.size
    milliseconds = round(1000 * seconds)
    if rank:
        tell(comm, 0, number, CAME)
        answer = hear(comm, 0, number, time.monotonic() + seconds + GRACE)
        if answer is None:
            raise RuntimeError(f"[Rank {rank}]: rank 0 has not answered in the monitoredBarrier in {milliseconds} ms")
        if answer == MISSING:
            raise RuntimeError(f"[Rank {rank}]: rank 0 has found ranks missing in the monitoredBarrier")
        return
    deadline = time.monotonic() + seconds
    missing = []
    for other in range(1, size):
        if hear(comm, other, number, deadline) is None:
            missing.append(other)
            if not wait_all:
                break
    for other in range(1, size):  # those that are missing, too: who comes late need not wait
        tell(comm, other, number, MISSING if missing else CAME)
    if missing:
        who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        raise RuntimeError(f"[Rank 0]: {who} failed to pass monitoredBarrier in {milliseconds} ms")


def tell(comm: MPI.Intracomm, to: int, number: int, word: int) -> None:
    """Send a sign, or an answer; nobody waits until it has left, for the other may be hung."""
    leaving[:] = [each for each in leaving if not each.Test()]
    leaving.append(comm.Isend(np.array([number, word]), to, TAG))


def hear(comm: MPI.Intracomm, source: int, number: int, deadline: float) -> int | None:
    """What that rank says of this barrier, or None where it says nothing in time; what it said of others is dropped."""
    said, status = np.zeros(2, np.int64), MPI.Status()
    while said[0] < number:
        request = comm.Irecv(said, source, TAG)
        while not request.Test():
            if time.monotonic() > deadline:
                request.Cancel()
                request.Wait(status)
                if status.Is_cancelled():
                    return None
                break  # it has come after all
            time.sleep(1e-4)
    return int(said[1])
