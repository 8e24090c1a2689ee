"""All-to-all: row s of this rank's array goes to rank s, which puts it in the place of its row r.

    3 ranks            rank 0        rank 1        rank 2
    before             a0 a1 a2      b0 b1 b2      c0 c1 c2
    after              a0 b0 c0      a1 b1 c1      a2 b2 c2

    pairwise, step i = 1, ..., N-1     row r + i goes to rank r + i, and row r comes from rank r - i
    Bruck, step k = 0, 1, ...          row i, counted from the rank's own, has i ranks to go; those with bit k of i set
                                       go 2^k ranks further, in one message

    cost of a rank     messages         values sent, rows of m                       steps
    pairwise           N - 1            (N - 1) m                                    N - 1
    Bruck              ceil(log2 N)     the set bits of 0, ..., N-1, times m         ceil(log2 N)

Under Bruck's scheme a row passes several ranks: fewer messages and more bytes, about N/2 log2 N rows. It is taken if
the latencies saved outweigh the bytes, where a link carries `LATENCY_BYTES` in one latency. (Bruck, Ho, Kipnis, Upfal
and Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS
1997)"""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.comm.collective_schedule import Step, collective
from hpcdl.comm.primitives import LATENCY_BYTES


@collective
def all_to_all(comm: MPI.Intracomm, vector: np.ndarray) -> Iterator[Step]:
    """Exchange the rows of `vector` (flat, contiguous, its length a multiple of N) by the cheaper scheme."""
    size = comm.Get_size()
    chosen = bruck_all_to_all if saves_time(size, vector.nbytes // size) else pairwise_all_to_all
    yield from chosen.steps(comm, vector)


def saves_time(size: int, row: int) -> bool:
    """True if Bruck's scheme takes less time than the pairwise exchange of rows of `row` bytes, by the cost model."""
    more_rows = sum(i.bit_count() for i in range(size)) - (size - 1)
    return more_rows * row < (size - 1 - (size - 1).bit_length()) * LATENCY_BYTES


@collective
def pairwise_all_to_all(comm: MPI.Intracomm, vector: np.ndarray) -> Iterator[Step]:
    """Exchange the rows of `vector` with one rank after the other."""
    rank, size = comm.Get_rank(), comm.Get_size()
    rows = vector.reshape(size, -1)
    arrived = np.empty_like(rows)
    arrived[rank] = rows[rank]
    for i in range(1, size):
        source, to = (rank - i) % size, (rank + i) % size
        yield comm.Irecv(arrived[source], source), comm.Isend(rows[to], to)
    rows[:] = arrived


@collective
def bruck_all_to_all(comm: MPI.Intracomm, vector: np.ndarray) -> Iterator[Step]:
    """Exchange the rows of `vector` in ceil(log2 N) steps."""
    rank, size = comm.Get_rank(), comm.Get_size()
    numbers = np.arange(size)
    moving = vector.reshape(size, -1)[(rank + numbers) % size]
    distance = 1
    while distance < size:
        further = numbers[numbers & distance != 0]
        leaving, arrived = moving[further], np.empty((further.size, moving.shape[1]), vector.dtype)
        source, to = (rank - distance) % size, (rank + distance) % size
        yield comm.Irecv(arrived.reshape(-1), source), comm.Isend(leaving.reshape(-1), to)
        moving[further] = arrived
        distance *= 2
    vector.reshape(size, -1)[(rank - numbers) % size] = moving
