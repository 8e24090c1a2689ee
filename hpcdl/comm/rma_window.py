"""One-sided communication (RMA): an array that other ranks read and write while its owner computes.

`comm.expose(array)` copies each rank's array into an MPI window that stays open (one `Lock_all` for its whole
life), so that a pull is one MPI_Get and completes although the target rank never enters MPI. Within a node this is
guaranteed; between hosts over TCP the message waits until the owner next enters MPI, unless the library runs a
progress thread (MPICH: MPIR_CVAR_ASYNC_PROGRESS=1).
"""

from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.errors import UsageError


class ExposedArray:
    """This rank's `array` in an MPI window of all ranks of the communicator; lengths may differ between ranks."""

    def __init__(self, comm: MPI.Intracomm, array: np.ndarray):
        kinds = set(comm.allgather(array.dtype.str))
        if len(kinds) > 1:
            raise UsageError(f"expose: all ranks must expose arrays of one type, not {', '.join(sorted(kinds))}")
        self.lengths = comm.allgather(array.size)
        self.window = MPI.Win.Allocate(array.nbytes, array.itemsize, comm=comm)
        memory: Any = self.window.tomemory()
        self.array: Any = np.ndarray(array.shape, array.dtype, buffer=memory)
        self.array[...] = array
        self.window.Lock_all(MPI.MODE_NOCHECK)
        self.window.Sync()
        comm.Barrier()  # no rank pulls before all values are in place

    def check_transfer(self, array: np.ndarray, rank: int, at: int) -> None:
        """Raise UsageError if a transfer exceeds the exposed array of `rank`."""
        if array.dtype != self.array.dtype:
            raise UsageError(f"the exposed array holds {self.array.dtype}, not {array.dtype}")
        if at < 0 or at + array.size > self.lengths[rank]:
            raise UsageError(
                f"elements {at} to {at + array.size} are outside the {self.lengths[rank]} that rank {rank} exposes"
            )

    def free(self) -> None:
        """Close the window if it is open; a collective call."""
        if self.array is None:
            return
        self.array = None
        self.window.Unlock_all()
        self.window.Free()
