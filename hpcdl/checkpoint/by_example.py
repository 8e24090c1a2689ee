"""Numbers that belong to single examples: each rank holds those of its own, a checkpoint those of all in their order.

    rank 0    has examples 0, 3, 4        a0 a3 a4
    rank 1    has examples 1, 2           a1 a2              the checkpoint: a0 a1 a2 a3 a4

So any other number of ranks, with the examples divided otherwise, can go on from it.
"""

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity


class ByExample:
    """`array` (own examples, ...) of the examples with these numbers, of `examples` in all; of each, one rank speaks.

    Making one is a collective call. An array is contiguous.
    """

    def __init__(self, comm: Communicator, array: np.ndarray, numbers: np.ndarray, examples: int):
        self.array, self.examples = array, examples
        with activity.inside("gather the numbers of examples", comm):
            counts = comm.mpi.gather(len(numbers))
        mine = np.ascontiguousarray(numbers, np.int64)
        if comm.rank > 0:
            comm.push(mine, 0)
            return
        assert counts is not None
        self.everyone = [mine, *(np.empty(count, np.int64) for count in counts[1:])]
        for rank in range(1, comm.size):
            comm.wait(self.everyone[rank], rank)

    def stored(self, name: str) -> str:
        """The whole is stored under its own name."""
        return name

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        """That of all examples, on any number of ranks."""
        return (self.examples, *self.array.shape[1:]), self.array.dtype

    def gather(self, comm: Communicator) -> np.ndarray | None:
        """The numbers of all examples on rank 0, None elsewhere; collective."""
        if comm.rank > 0:
            comm.push(self.array.reshape(-1), 0)
            return None
        shape, dtype = self.form(comm.size)
        whole = np.zeros(shape, dtype)
        whole[self.everyone[0]] = self.array
        for rank in range(1, comm.size):
            theirs = np.empty((len(self.everyone[rank]), *shape[1:]), dtype)
            comm.wait(theirs.reshape(-1), rank)
            whole[self.everyone[rank]] = theirs
        return whole

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        """Give all ranks those of their examples; collective."""
        if comm.rank > 0:
            comm.wait(self.array.reshape(-1), 0)
            return
        assert whole is not None
        self.array[:] = whole[self.everyone[0]]
        for rank in range(1, comm.size):
            comm.push(whole[self.everyone[rank]].reshape(-1), rank)
