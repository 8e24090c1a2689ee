"""Direct all-reduce: every rank sends its whole vector to every other rank.

    0 <──> 1       One step, and no rank waits for a chain of others, but each of the N (N - 1) messages
    ^ \\  / ^       carries the whole vector: very communication heavy. It pays for tiny vectors only,
    |  ><  |       where the latency of one message is all that counts.
    v /  \\ v
    2 <──> 3

    cost, N ranks        messages      values sent         steps
    every rank           N - 1         (N - 1) K           1

Each rank sends first to the rank after it, in a circle: if all began with rank 0, its link would be the bottleneck. A
rank holds N K values while it sums them in the order of the ranks, so that all get the same bits."""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.collective_schedule import Step, collective
from hpcdl.comm.operations import SUM, Reduction


@collective
def direct_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place; each rank combines all vectors itself."""
    rank, size = comm.Get_rank(), comm.Get_size()
    others = [(rank + i) % size for i in range(1, size)]
    inbox = np.empty((size, vector.size), vector.dtype)
    inbox[rank] = vector
    yield [comm.Irecv(inbox[other], other) for other in others] + [comm.Isend(vector, other) for other in others]
    vector[:] = inbox[0]
    for other in range(1, size):
        op(vector, inbox[other])


ALGORITHM = Algorithm("direct", direct_all_reduce.steps)
