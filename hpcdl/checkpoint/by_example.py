"""Values by example: a rank holds its own examples' values, a checkpoint all values, which any division can load.

rank 0    has examples 0, 3, 4        a0 a3 a4
rank 1    has examples 1, 2           a1 a2              the checkpoint: a0 a1 a2 a3 a4"""

import numpy as np

from hpcdl.checkpoint.state import Tracked
from hpcdl.comm import Communicator


class ByExample(Tracked):
    """The rows `array` (contiguous) of this rank's examples `numbers`, of `examples` in all. Collective constructor."""

    def __init__(self, comm: Communicator, array: np.ndarray, numbers: np.ndarray, examples: int):
        self.array, self.examples = array, examples
        with comm.inside("gather the numbers of examples"):
            counts = comm.mpi.gather(len(numbers))
        mine = np.ascontiguousarray(numbers, np.int64)
        if comm.rank > 0:
            comm.push(mine, 0)
            return
        assert counts is not None
        self.everyone = [mine, *(np.empty(count, np.int64) for count in counts[1:])]
        for rank in range(1, comm.size):
            comm.wait(self.everyone[rank], rank)

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        return (self.examples, *self.array.shape[1:]), self.array.dtype

    def gather(self, comm: Communicator) -> np.ndarray | None:
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
        if comm.rank > 0:
            comm.wait(self.array.reshape(-1), 0)
            return
        assert whole is not None
        self.array[:] = whole[self.everyone[0]]
        for rank in range(1, comm.size):
            comm.push(whole[self.everyone[rank]].reshape(-1), rank)
