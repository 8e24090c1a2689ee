"""The MPI library's own all-reduce, the one to compare with.

Which algorithm it takes depends on the library, the length of the vector and the network: often recursive doubling
for short vectors, a reduce-scatter with an all-gather for long ones, and shared memory within a node. What it
really sends cannot be seen from outside, so a trace counts the payload of the call, K values, and no messages.
"""

from mpi4py import MPI

from hpcdl.comm.operations import SUM
from hpcdl.comm.steps import Until


def mpi(comm, vector, op=SUM):
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place, by MPI_Allreduce."""
    comm.Allreduce(MPI.IN_PLACE, vector, op.mpi)


def steps(comm, vector, op=SUM):
    """The asynchronous form: MPI_Iallreduce."""
    yield [comm.Iallreduce(MPI.IN_PLACE, vector, op.mpi)]


def at_once(comm, vector, op=SUM):
    """The steps of a blocking call: MPI_Allreduce, once all ranks have come, which takes nothing else forward.

    Every rank does so, whatever it has in flight: MPI_Allreduce on one rank does not match MPI_Iallreduce on another,
    and that one on all ranks may be much slower (ten times for 4 MiB within a node, seen with Open MPI 5).
    """
    yield [comm.Ibarrier()]
    yield Until(lambda: mpi(comm, vector, op) is None, lambda: mpi(comm, vector, op))


mpi.steps, mpi.at_once = steps, at_once
mpi.direct = True  # it only hands the vector on, which may lie on a GPU where the library takes that
