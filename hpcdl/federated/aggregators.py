"""Aggregators: they add up, modulo 2^64, the messages of a round's clients, which live on all ranks."""

import numpy as np

from hpcdl.checkpoint.state import Same
from hpcdl.comm import Communicator
from hpcdl.kernels.device import device_of
from hpcdl.kernels.reduce import add_into


class RoundPart:
    """A component of a run's rounds, possibly with state for checkpoints and entries of the summary."""

    def tracked(self) -> dict[str, Same]:
        """Return the state for a checkpoint, by name."""
        return {}

    def report(self) -> dict:
        """Return entries of the summary."""
        return {}


class SumAggregator(RoundPart):
    """The plain aggregator, for messages of `length` values: it adds up on each rank, then all-reduces."""

    def __init__(self, comm: Communicator, length: int):
        self.comm, self.total = comm, comm.empty(length, np.int64)
        self.begin([])
        add_into(self.total[:1], self.total[:1])  # compiles the kernel before any clock runs

    def begin(self, dealt: list[list[int]]) -> None:
        """Begin a round, with the clients dealt[r] on each rank r; collective."""
        self.total[:] = 0

    def add(self, client: int, message: np.ndarray) -> None:
        """Add the message of a client on this rank; the aggregator may overwrite the message."""
        add_into(self.total, message)

    def finish(self) -> np.ndarray:
        """Return the sum, the same bits on all ranks; collective."""
        self.comm.all_reduce(self.total)
        return self.total


class LateSum(SumAggregator):
    """Sums answers that arrive one round late. pending: the sum of the late answers of the previous round."""

    def __init__(self, comm: Communicator, length: int):
        super().__init__(comm, length)
        self.pending = device_of(self.total).zeros(length, np.int64)

    def tracked(self) -> dict[str, Same]:
        return {"pending": Same(self.pending)}

    def add_pending_to(self, total: np.ndarray) -> None:
        """Add the previous round's late answers to `total`; this round's late answers become pending. Collective."""
        add_into(total, self.pending)
        self.pending[:] = self.finish()
