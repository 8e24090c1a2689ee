"""torch.distributed.monitored_barrier: a barrier that names the missing ranks.

    ranks 1, 2, ...    send a sign to rank 0 and wait for its answer
    rank 0             waits for all signs until the timeout, then answers all, and names the missing ranks

Each sign and answer has the barrier's number, which each rank counts. So a late rank finds the answer of a barrier that
has failed, and messages left over by one barrier do not disturb the next. PyTorch has it for gloo alone."""

import time

import numpy as np
from mpi4py import MPI

from hpcdl.comm.progress import pause

TAG = 40_000  # above the tags of users' messages (comm/call_path.py)
CAME, MISSING = 1, 2
GRACE = 5.0  # seconds that rank 0's answer may take beyond the timeout
sending: list[MPI.Request] = []  # unfinished sends, with their buffers


def monitored_barrier(comm: MPI.Intracomm, number: int, seconds: float, wait_all: bool) -> None:
    """Wait for all ranks. Raises RuntimeError on all present ranks if some are missing after the timeout. number: of
    this barrier on this communicator; increasing. wait_all: True if rank 0 names all missing ranks, not one."""
    rank, size = comm.rank, comm.size
    milliseconds = round(1000 * seconds)
    if rank:
        send_sign(comm, 0, number, CAME)
        answer = receive_sign(comm, 0, number, time.monotonic() + seconds + GRACE)
        if answer is None:
            raise RuntimeError(f"[Rank {rank}]: rank 0 has not answered in the monitoredBarrier in {milliseconds} ms")
        if answer == MISSING:
            raise RuntimeError(f"[Rank {rank}]: rank 0 has found ranks missing in the monitoredBarrier")
        return
    deadline = time.monotonic() + seconds
    missing = []
    for other in range(1, size):
        if receive_sign(comm, other, number, deadline) is None:
            missing.append(other)
            if not wait_all:
                break
    for other in range(1, size):  # missing ones, too: a late rank need not wait
        send_sign(comm, other, number, MISSING if missing else CAME)
    if missing:
        who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        raise RuntimeError(f"[Rank 0]: {who} failed to pass monitoredBarrier in {milliseconds} ms")


def send_sign(comm: MPI.Intracomm, to: int, number: int, word: int) -> None:
    """Send a sign or an answer without waiting, as the receiver may hang."""
    sending[:] = [request for request in sending if not request.Test()]
    sending.append(comm.Isend(np.array([number, word]), to, TAG))


def receive_sign(comm: MPI.Intracomm, source: int, number: int, deadline: float) -> int | None:
    """Return the word of rank `source` for barrier `number`, or None after the deadline; drop older messages."""
    message, status = np.zeros(2, np.int64), MPI.Status()
    while message[0] < number:
        request, begun = comm.Irecv(message, source, TAG), time.monotonic()
        while not request.Test():
            if time.monotonic() > deadline:
                request.Cancel()
                request.Wait(status)
                if status.Is_cancelled():
                    return None
                break  # it has arrived after all
            pause(time.monotonic() - begun)
    return int(message[1])
