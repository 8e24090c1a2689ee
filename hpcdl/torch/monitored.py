"""A barrier that tells who has not come: torch.distributed.monitored_barrier.

    ranks 1, 2, ...    give rank 0 a sign and wait for its answer
    rank 0             waits for all signs for so long, then tells all what it has found, and names who is missing

PyTorch has it for gloo alone, and asks for the backend's name itself: registration.py stands before its function.
"""

import time

import numpy as np
from mpi4py import MPI

TAG = 40_000  # beyond those of messages that users send (comm/door.py)
TURNS = 1000  # barriers with a tag of their own, so that one that has failed leaves nothing for the next
CAME, MISSING = 1, 2
GRACE = 5.0  # seconds that rank 0 may take to answer beyond the time for all to come


def monitored_barrier(comm: MPI.Intracomm, number: int, seconds: float, wait_all: bool) -> None:
    """Until all have come. Raises RuntimeError on all that have come where some have not within the seconds."""
    rank, size, tag = comm.rank, comm.size, TAG + number % TURNS
    word = np.array([CAME])
    milliseconds = round(1000 * seconds)
    if rank:
        comm.Isend(word, 0, tag).Free()
        answer = np.empty(1, np.int64)
        if not come(comm.Irecv(answer, 0, tag), time.monotonic() + seconds + GRACE):
            raise RuntimeError(f"[Rank {rank}]: rank 0 has not answered in the monitoredBarrier in {milliseconds} ms")
        if answer[0] == MISSING:
            raise RuntimeError(f"[Rank {rank}]: rank 0 has found ranks missing in the monitoredBarrier")
        return
    deadline = time.monotonic() + seconds
    missing = []
    for other in range(1, size):
        if not come(comm.Irecv(np.empty(1, np.int64), other, tag), deadline):
            missing.append(other)
            if not wait_all:
                break
    answer = np.array([MISSING if missing else CAME])
    for other in range(1, size):
        if other not in missing:
            comm.Isend(answer.copy(), other, tag).Wait()
    if missing:
        who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        raise RuntimeError(f"[Rank 0]: {who} failed to pass monitoredBarrier in {milliseconds} ms")


def come(request: MPI.Request, deadline: float) -> bool:
    """Whether the message comes in time; one that does not is not waited for any more."""
    while not request.Test():
        if time.monotonic() > deadline:
            request.Cancel()
            request.Wait()
            return False
        time.sleep(1e-4)
    return True
