"""One-sided communication (RMA): an array that other ranks read and write while its owner computes.

The MPI window stays open for its whole life (one `Lock_all`), so a pull is one MPI_Get. Within a node it completes
although the owner never enters MPI. Between hosts over TCP it waits until the owner next enters MPI, unless the library
runs a progress thread (MPICH: MPIR_CVAR_ASYNC_PROGRESS=1)."""

from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.errors import UsageError


class ExposedArray:
    """A copy, `array`, of this rank's array in a window of all ranks. Lengths may differ; UsageError if types do."""

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
        """Raise UsageError if the type differs, or the transfer exceeds the exposed array of `rank`."""
        if array.dtype != self.array.dtype:
            raise UsageError(f"the exposed array holds {self.array.dtype}, and the passed array {array.dtype}")
        if at < 0 or at + array.size > self.lengths[rank]:
            there = f"the exposed array of rank {rank}, which has {self.lengths[rank]}"
            raise UsageError(f"elements {at} to {at + array.size} are outside {there}")

    def free(self) -> None:
        """Close the window if it is open; a collective call."""
        if self.array is None:
            return
        self.array = None
        self.window.Unlock_all()
        self.window.Free()
