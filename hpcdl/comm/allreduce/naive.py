"""Naive all-reduce through a driver: the simplest algorithm, whose driver is the bottleneck.

    reduce            broadcast           Every rank pushes its vector of K values to the driver, rank 0,
    1 ─┐              ┌─> 1               which adds them in the order of the ranks and pushes the sum
    2 ─┼─> 0 (adds)  0┼─> 2               to every rank.
    3 ─┘              └─> 3

    cost, N ranks        messages      values sent         steps
    driver               N - 1         (N - 1) K           2 (N - 1), one after the other on its link
    every other rank     1             K                   2

The driver's link carries 2 (N - 1) K values: time grows linearly with the number of ranks."""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.collective_schedule import Step, collective
from hpcdl.comm.operations import SUM, Reduction

DRIVER = 0


@collective
def naive_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place, through rank 0."""
    rank, size = comm.Get_rank(), comm.Get_size()
    others = [other for other in range(size) if other != DRIVER]
    if rank == DRIVER:
        inbox = np.empty_like(vector)
        for other in others:
            yield [comm.Irecv(inbox, other)]
            op(vector, inbox)
        yield [comm.Isend(vector, other) for other in others]
    else:
        yield [comm.Isend(vector, DRIVER)]
        yield [comm.Irecv(vector, DRIVER)]


ALGORITHM = Algorithm("naive", naive_all_reduce.steps)
