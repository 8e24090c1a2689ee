"""Cleanup of destroyed process groups: their communicators are freed, since MPI has some two thousand in all.

    a rank destroys a group     it enters a nonblocking barrier of the group's ranks, and continues
    later group operations      once that barrier is complete, all have destroyed the group: each rank frees its part

PyTorch destroys a group on each rank separately: in any order, on some ranks only, or during an exception. So no rank
waits here; a group that some rank does not destroy stays. Freeing a communicator is a collective call in MPI's
standard, which expects libraries to do it without communication (MPI 4.1, 7.4.3, advice to implementors); MPICH and
Open MPI do.
"""

from typing import Any, NoReturn

from mpi4py import MPI

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError

destroyed: list[tuple[Communicator, MPI.Request]] = []  # with their barriers


class DestroyedCommunicator:
    """Takes the place of a destroyed group's communicator. name: the group's."""

    def __init__(self, name: str):
        self.group = name

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(f"the process group {self.group!r} was destroyed and can send nothing any more")


def destroy(comm: Communicator, name: str) -> Any:
    """Release the group's communicator on this rank; return its placeholder."""
    destroyed.append((comm, comm.mpi.Ibarrier()))
    free_unused()
    return DestroyedCommunicator(name)


def free_unused() -> None:
    """Free the communicators that all ranks have released; does not wait."""
    for entry in list(destroyed):
        comm, barrier = entry
        if barrier.Test() and not comm.groups and not any(other.communicator is comm for other in activity.in_flight):
            destroyed.remove(entry)
            comm.free()
