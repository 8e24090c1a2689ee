"""Circulant all-reduce: the bytes of a ring in 2 ceil(log2 N) steps, for every number of ranks N.

    5 ranks, chunks 0 to 4       sends             to         receives, and adds     from       then rank 0 has
    reduce-scatter, distance 3   r+3 r+4           r + 3      r r+1                  r - 3      2 summands of 0, 1
    reduce-scatter, distance 2   r+2               r + 2      r                      r - 2      3 summands of 0
    reduce-scatter, distance 1   r+1               r + 1      r                      r - 1      the sum of chunk 0
    all-gather, distance 1       r                 r - 1      r+1                    r + 1      the sums of 0 1
    all-gather, distance 2       r                 r - 2      r+2                    r + 2      the sums of 0 1 2
    all-gather, distance 3       r r+1             r - 3      r+3 r+4                r + 3      all sums

The distances are N halved and rounded up, again and again: s' -> s = ceil(s' / 2), until 1. Before a step of the
reduce-scatter a rank has partial sums of chunks r to r+s'-1, and it sends those from r+s on, s' - s chunks, to the rank
that they are nearer to. The all-gather runs the steps backwards. (Traeff, "Optimal, non-pipelined reduce-scatter and
allreduce algorithms", 2024; the all-gather with distances 1, 2, 4, ...: Bruck et al., "Efficient algorithms for
all-to-all communications in multiport message-passing systems", 1997)

    cost of rank r       messages                  values sent                             steps
    reduce-scatter       ceil(log2 N) + wraps      K - k(r)                                ceil(log2 N)
    all-gather           ceil(log2 N) + wraps      N - 1 chunks  ((N-1) K / N)             ceil(log2 N)

where k(c) is the length of chunk c. Chunks are numbered modulo N. A message that goes past chunk N - 1 wraps: it is two
messages, so that nothing is copied. A rank receives at most one such pair in each half. Each chunk is summed on one
rank, in one order, so that all ranks get the same bits. The operation must be commutative.

A communicator's reduce-scatter and all-gather take these steps for vectors of at most 256 KiB on more than 3 ranks, and
those of the ring else: it sends as much in N - 1 steps, which cost less than they save where long chunks go in segments
that are added beside the next message."""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunk
from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.collective_schedule import Step, collective
from hpcdl.comm.operations import SUM, Reduction

SHORT = 256 << 10  # bytes of a vector; by a latency of 2 us and 12.5 GB/s a ring of 10 ranks waits as long as it sends


@collective
def circulant_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place, on a circulant graph."""
    yield from circulant_reduce_scatter.steps(comm, vector, op)
    yield from circulant_all_gather.steps(comm, vector)


@collective
def circulant_reduce_scatter(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Leave chunk r of the reduced vector on rank r; its other chunks get partial sums."""
    rank, size = comm.Get_rank(), comm.Get_size()
    inbox = np.empty(sum(part.size for part in parts(vector, size, rank, size // 2)), vector.dtype)
    for distance, count in rounds(size):
        mine = parts(vector, size, rank, count)
        length = mine[0].size
        arrived = [inbox[:length], *(inbox[length : length + part.size] for part in mine[1:])]
        receives = [comm.Irecv(part, (rank - distance) % size) for part in arrived]
        to = (rank + distance) % size
        yield receives + [comm.Isend(part, to) for part in parts(vector, size, to, count)]
        for part, values in zip(mine, arrived, strict=True):
            op(part, values)


@collective
def circulant_all_gather(comm: MPI.Intracomm, vector: np.ndarray) -> Iterator[Step]:
    """Fill in the chunks of `vector` that other ranks hold; rank r holds chunk r."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for distance, count in reversed(rounds(size)):
        source, to = (rank + distance) % size, (rank - distance) % size
        receives = [comm.Irecv(part, source) for part in parts(vector, size, source, count)]
        yield receives + [comm.Isend(part, to) for part in parts(vector, size, rank, count)]


def has_fewer_steps(vector: np.ndarray, size: int) -> bool:
    """True if `size` ranks scatter or gather this vector on a circulant graph, not on a ring. Equal on all ranks."""
    return size > 3 and vector.nbytes <= SHORT


def rounds(size: int) -> list[tuple[int, int]]:
    """Return the distance and the number of chunks of each step of the reduce-scatter.

    >>> rounds(5)
    [(3, 2), (2, 1), (1, 1)]"""
    found = []
    while size > 1:
        distance = -(-size // 2)
        found.append((distance, size - distance))
        size = distance
    return found


def parts(vector: np.ndarray, size: int, first: int, count: int) -> list[np.ndarray]:
    """Return chunks `first` to first + count - 1 modulo `size` of the vector: one slice, or two with a wrap."""
    start, last = chunk(vector.size, size, first).start, first + count - 1
    if last < size:
        return [vector[start : chunk(vector.size, size, last).stop]]
    return [vector[start:], vector[: chunk(vector.size, size, last - size).stop]]


ALGORITHM = Algorithm("circulant", circulant_all_reduce.steps, fixed=True)
