"""Dissemination barrier: no rank leaves before all ranks have entered.

In round k each rank notifies the rank 2^k to its right and waits for the one 2^k to its left: ceil(log2 N) rounds, N
ceil(log2 N) empty messages. (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988)"""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.comm.collective_schedule import Step, collective

EMPTY = np.empty(0, np.uint8)


@collective
def dissemination_barrier(comm: MPI.Intracomm) -> Iterator[Step]:
    """Wait until all ranks of `comm` have called this."""
    rank, size = comm.Get_rank(), comm.Get_size()
    distance = 1
    while distance < size:
        yield comm.Irecv(EMPTY, (rank - distance) % size), comm.Isend(EMPTY, (rank + distance) % size)
        distance *= 2
