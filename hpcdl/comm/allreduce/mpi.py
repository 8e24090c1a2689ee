"""The MPI library's own all-reduce, the one to compare with.

Which algorithm it takes depends on the library, the length of the vector and the network: often recursive doubling
for short vectors, a reduce-scatter with an all-gather for long ones, and shared memory within a node. What it
really sends cannot be seen from outside, so a trace counts the payload of the call, K values, and no messages.
"""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.call_matching import SameCall, turn
from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.operations import SUM, Reduction


def mpi_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> None:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place, by MPI_Allreduce."""
    comm.Allreduce(MPI.IN_PLACE, vector, op.mpi)


def steps(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """The asynchronous form: MPI_Iallreduce."""
    with turn(comm) as mine:
        yield mine
        same = SameCall(comm, vector, op)
        yield [same.start()]
        same.check()  # first, for MPICH ends the job where vectors differ
        sent = comm.Iallreduce(MPI.IN_PLACE, vector, op.mpi)
    yield [sent]


# MPI_Allreduce on one rank does not match MPI_Iallreduce on another, and that one on all ranks may be much slower (ten
# times for 4 MiB within a node, seen with Open MPI 5): so a blocking call is MPI_Allreduce whatever a rank has in
# flight, once all ranks have come. The vector is only handed on, and may lie on a GPU where the library takes that.
ALGORITHM = Algorithm("mpi", steps, mpi_all_reduce, direct=True, meets=True)
