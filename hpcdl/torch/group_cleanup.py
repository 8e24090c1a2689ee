"""Cleanup of destroyed process groups: their communicators are freed, as MPI has only some two thousand.

PyTorch destroys a group on each rank separately: in any order, on some ranks only, or during an exception. So no rank
waits: each enters a nonblocking barrier of the group's ranks. At later group operations, each rank frees the groups
whose barrier is complete, as all ranks have destroyed them; a group that some rank does not destroy stays. Freeing a
communicator takes no communication in MPICH and Open MPI, as MPI 4.1 advises (7.4.3, advice to implementors)."""

from typing import Any, NoReturn

from mpi4py import MPI

from hpcdl.comm.communicator import Communicator
from hpcdl.errors import UsageError

destroyed: list[tuple[Communicator, MPI.Request]] = []  # with their barriers


class DestroyedCommunicator:
    """Placeholder for the communicator of the destroyed group `name`; any use raises UsageError."""

    def __init__(self, name: str):
        self.group = name

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(f"the process group {self.group!r} was destroyed and can send nothing any more")


def destroy(comm: Communicator, name: str) -> Any:
    """Release `comm` of the destroyed group `name` on this rank; return a placeholder for it."""
    destroyed.append((comm, comm.mpi.Ibarrier()))
    free_unused()
    return DestroyedCommunicator(name)


def free_unused() -> None:
    """Free the communicators that all ranks have released, without waiting."""
    for entry in list(destroyed):
        comm, barrier = entry
        if barrier.Test() and not comm.groups and not comm.in_flight:
            destroyed.remove(entry)
            comm.free()
