"""The MPI library's all-reduce, as the reference.

Its algorithm depends on the library, the vector's length and the network: often recursive doubling for short vectors, a
reduce-scatter with an all-gather for long ones. A trace counts the K values of the call, and no messages."""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.call_matching import CallComparison, turn
from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.operations import SUM, Reduction


def mpi_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> None:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place, by MPI_Allreduce."""
    comm.Allreduce(MPI.IN_PLACE, vector, op.mpi)


def steps(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Yield the steps of MPI_Iallreduce, after the ranks' calls are compared."""
    with turn(comm) as mine:
        yield mine
        same = CallComparison(comm, vector, op)
        yield [same.start()]
        same.check()  # first: MPICH ends the job if vectors differ
        sent = comm.Iallreduce(MPI.IN_PLACE, vector, op.mpi)
    yield [sent]


# MPI_Allreduce does not match MPI_Iallreduce of another rank, and MPI_Iallreduce may be much slower (ten times for 4
# MiB within a node, seen with Open MPI 5). So a blocking call is always MPI_Allreduce, after all ranks have entered.
# The vector is passed to MPI unread, and may lie on a GPU if the library is CUDA-aware.
ALGORITHM = Algorithm("mpi", steps, mpi_all_reduce, direct=True, meets=True)
