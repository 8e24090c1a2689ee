"""The communicators of groups that are destroyed go back to MPI, which has some two thousand of them for a program.

    a rank destroys a group     it enters a barrier of the group's ranks, and goes on
    groups come and go later    where that barrier is complete, all have destroyed it: each rank gives back its own part

PyTorch destroys a group on each rank for itself: in any order, on some ranks only, or while an exception is on its way.
So nobody waits here: a group that a rank does not destroy stays. To free a communicator is a call of all ranks by the
letter of MPI's standard, which expects libraries to do it without a message (MPI 4.1, 7.4.3, advice to implementors);
MPICH and Open MPI do.
"""

from typing import Any, NoReturn

from mpi4py import MPI

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError

destroyed: list[tuple[Communicator, MPI.Request]] = []  # and the barrier of each


class Gone:
    """What a group has for a communicator when it is destroyed. name: the group's."""

    def __init__(self, name: str):
        self.group = name

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(f"the process group {self.group!r} was destroyed and can send nothing any more")


def destroy(comm: Communicator, name: str) -> Any:
    """This rank needs the group's communicator no more; returns what stands in its place."""
    destroyed.append((comm, comm.mpi.Ibarrier()))
    give_back()
    return Gone(name)


def give_back() -> None:
    """Free those that no rank needs any more; waits for nobody."""
    for each in list(destroyed):
        comm, barrier = each
        if barrier.Test() and not comm.groups and not any(other.communicator is comm for other in activity.in_flight):
            destroyed.remove(each)
            comm.free()
