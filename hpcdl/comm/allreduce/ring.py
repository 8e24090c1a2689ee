"""Ring all-reduce: reduce-scatter, then all-gather, each in N - 1 steps around a ring.

The vector of K values is cut into N chunks. In every step each rank sends one chunk to its right neighbour and receives
one from its left. With 3 ranks (a, b, c hold vectors a0 a1 a2, b0 b1 b2, c0 c1 c2):

    reduce-scatter   rank 0               rank 1               rank 2
    start            a0 a1 a2             b0 b1 b2             c0 c1 c2
    step 1: sends    a0 ->                b1 ->                c2 ->
    then holds       a0 a1 a2+c2          a0+b0 b1 b2          c0 b1+c1 c2
    step 2: sends    a2+c2 ->             a0+b0 ->             b1+c1 ->
    then holds       .. S1 ..             .. .. S2             S0 .. ..        (S = complete sum)

    all-gather       each rank sends its complete chunk, then forwards what it receives, until each has all chunks

    cost, N ranks        messages            values sent                                  steps
    every rank           2 (N - 1) s         2 K - k(r+1) - k(r+2)  (2 (N-1) K / N)       2 (N - 1)

where k(c) is the length of chunk c mod N. The values sent do not grow with N: the ring is optimal in bandwidth
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009), and pays 2 (N - 1)
latencies for it. Each chunk is summed once, along the ring from a fixed rank, so that all ranks get the same bits.

Chunks of more than 1 MiB are sent as s segments, 16 at most, each a message: while one is added, the next arrives, and
a segment is forwarded as soon as it is added, so that additions overlap with messages."""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.collective_schedule import Step, collective
from hpcdl.comm.operations import SUM, Reduction

SEGMENT = 1 << 20  # bytes up to which a chunk is one message
SEGMENTS = 16  # of a chunk, at most: more hide no more, and MPI would search longer message queues


@collective
def ring_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place, around a ring."""
    rank = comm.Get_rank()
    yield from ring_reduce_scatter.steps(comm, vector, op, first=rank)
    yield from ring_all_gather.steps(comm, vector, first=rank + 1)


@collective
def ring_reduce_scatter(
    comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM, first: int | None = None
) -> Iterator[Step]:
    """Leave chunk first + 1 of the reduced vector on this rank; its other chunks get partial sums. first: number of the
    chunk that the rank sends first; None: rank - 1. It sends K - k(first + 1) values, in (N - 1) s messages."""
    rank, size = comm.Get_rank(), comm.Get_size()
    left, right, cut = (rank - 1) % size, (rank + 1) % size, chunks(vector.size, size)
    first = rank - 1 if first is None else first
    inbox = np.empty(cut[0].stop, vector.dtype)  # chunk 0 is the longest
    if inbox.nbytes > SEGMENT and size > 1:
        yield from in_segments(comm, vector, first, inbox, op)
        return
    for step in range(size - 1):
        outgoing = vector[cut[(first - step) % size]]
        incoming = vector[cut[(first - step - 1) % size]]
        arrived = inbox[: incoming.size]
        yield comm.Irecv(arrived, left), comm.Isend(outgoing, right)
        op(incoming, arrived)


@collective
def ring_all_gather(comm: MPI.Intracomm, vector: np.ndarray, first: int | None = None) -> Iterator[Step]:
    """Fill in the chunks of `vector` that other ranks hold. first: number of the chunk that this rank holds; None: its
    rank. The right neighbour holds chunk first + 1, so a rank sends K - k(first + 1) values, in (N - 1) s messages."""
    rank, size = comm.Get_rank(), comm.Get_size()
    left, right, cut = (rank - 1) % size, (rank + 1) % size, chunks(vector.size, size)
    first = rank if first is None else first
    if cut[0].stop * vector.itemsize > SEGMENT and size > 1:
        yield from in_segments(comm, vector, first)
        return
    for step in range(size - 1):
        outgoing = vector[cut[(first - step) % size]]
        incoming = vector[cut[(first - step - 1) % size]]
        yield comm.Irecv(incoming, left), comm.Isend(outgoing, right)


def in_segments(
    comm: MPI.Intracomm, vector: np.ndarray, first: int, inbox: np.ndarray | None = None, op: Reduction | None = None
) -> Iterator[Step]:
    """Yield the N - 1 steps of a reduce-scatter or all-gather in segments of chunks. In step t a rank sends chunk first
    - t and receives chunk first - t - 1: into `inbox`, for `op` to add, or, without inbox, into `vector`."""
    rank, size = comm.Get_rank(), comm.Get_size()
    left, right, cut = (rank - 1) % size, (rank + 1) % size, chunks(vector.size, size)
    count = min(SEGMENTS, -(-cut[0].stop * vector.itemsize // SEGMENT))  # for all chunks, though one may be shorter

    def segments(index: int) -> "list[np.ndarray]":
        part = vector[cut[index % size]]
        return [part[place] for place in chunks(part.size, count)]

    def arrival(segment: "np.ndarray", number: int) -> "np.ndarray":
        return segment if inbox is None else inbox[places[number]][: segment.size]

    places = chunks(cut[0].stop, count)  # of each segment number, for a chunk of any length
    coming = segments(first - 1)
    receiving = [comm.Irecv(arrival(segment, number), left) for number, segment in enumerate(coming)]
    sending = [comm.Isend(segment, right) for segment in segments(first)]
    for step in range(1, size):
        now, coming, sent, sending = coming, segments(first - step - 1), sending, []
        for number, segment in enumerate(now):
            yield [receiving[number]]
            if op is not None:
                op(segment, arrival(segment, number))
            if step < size - 1:  # forward it, then reuse its place for the next chunk's segment
                sending.append(comm.Isend(segment, right))
                receiving[number] = comm.Irecv(arrival(coming[number], number), left)
        yield sent


ALGORITHM = Algorithm("ring", ring_all_reduce.steps, fixed=True)
