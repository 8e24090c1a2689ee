"""Tree all-reduce: a binomial tree reduces towards rank 0, and the same tree, reversed, broadcasts the sum.

    8 ranks          step 1             step 2             step 3
    reduce           1->0 3->2 5->4     2->0 6->4          4->0
                     7->6
    broadcast        0->4               0->2 4->6          0->1 2->3 4->5 6->7

In step s of the reduction the ranks that are odd multiples of 2^(s-1) send their partial sum to the rank 2^(s-1) below
and are done; the broadcast runs the steps backwards. For any number of ranks, a missing partner is left out.

    cost, N ranks        messages                          values sent          steps
    all ranks together   2 (N - 1)                         2 (N - 1) K          2 ceil(log2 N)
    rank 0               ceil(log2 N)                      ceil(log2 N) K

The latency is low, but whole vectors are sent, and half of the ranks idle in each step: better than the ring for short
vectors on many ranks, worse for long ones. All ranks get the same bits, the sum of rank 0. (Thakur, Rabenseifner and
Gropp, "Optimization of collective communication operations in MPICH", 2005)"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.collective_schedule import Step, collective
from hpcdl.comm.operations import SUM, Reduction


@collective
def tree_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place, up and down a binomial tree."""
    yield from tree_reduce.steps(comm, vector, op)
    yield from tree_broadcast.steps(comm, vector)


@collective
def tree_reduce(
    comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM, root: int = 0, met: bool = False
) -> Iterator[Step]:
    """Combine all vectors into that of rank `root`; other vectors get partial sums. met: sends are synchronous, so a
    rank completes only when its message is being received, and differing calls are detected (call_matching.py)."""
    rank, size = comm.Get_rank(), comm.Get_size()
    place, send = (rank - root) % size, comm.Issend if met else comm.Isend  # the tree is drawn with the root at 0
    inbox: Any = np.empty_like(vector) if place % 2 == 0 and place + 1 < size else None  # only leaves receive nothing
    distance = 1
    while distance < size:
        if place % (2 * distance) == distance:
            yield [send(vector, (rank - distance) % size)]
            return
        if place + distance < size:
            yield [comm.Irecv(inbox, (rank + distance) % size)]
            op(vector, inbox)
        distance *= 2


@collective
def tree_broadcast(comm: MPI.Intracomm, vector: np.ndarray, root: int = 0, met: bool = False) -> Iterator[Step]:
    """Copy the vector of `root` to all ranks; met: as in `tree_reduce`."""
    rank, size = comm.Get_rank(), comm.Get_size()
    place, send = (rank - root) % size, comm.Issend if met else comm.Isend
    distance = 1
    while distance < size:
        distance *= 2
    while distance > 1:
        distance //= 2
        if place % (2 * distance) == distance:
            yield [comm.Irecv(vector, (rank - distance) % size)]
        elif place % (2 * distance) == 0 and place + distance < size:
            yield [send(vector, (rank + distance) % size)]


ALGORITHM = Algorithm("tree", tree_all_reduce.steps, fixed=True)
