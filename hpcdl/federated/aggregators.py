"""Aggregators: they add up, modulo 2^64, the messages of a round's clients, which live on all ranks.

begin(dealt)            all ranks: a round begins, with the clients dealt[r] on rank r
add(client, message)    the client's rank, when its answer arrives; the message may be overwritten
finish()                all ranks: the sum, the same bits on each
tracked(), report()     state for checkpoints, by name; entries of the summary

SumAggregator           adds up on each rank, then all-reduces                                here
SecureAggregator        the same sum, without revealing any summand (secure_aggregation.py)
LateSum                 messages of one round arrive in the next                              here
"""

from typing import Protocol

import numpy as np

from hpcdl.checkpoint.state import Same
from hpcdl.comm import Communicator
from hpcdl.kernels.device import device_of
from hpcdl.kernels.reduce import add_into


class Aggregator(Protocol):
    """The protocol above."""

    def begin(self, dealt: list[list[int]]) -> None:
        """Begin a round."""

    def add(self, client: int, message: np.ndarray) -> None:
        """Add the answer of a client on this rank."""

    def finish(self) -> np.ndarray:
        """Return the sum over all ranks; collective."""

    def tracked(self) -> dict[str, Same]:
        """Return the state for a checkpoint."""

    def report(self) -> dict:
        """Return entries of the summary."""


class SumAggregator:
    """The plain aggregator, for messages of `length` values."""

    def __init__(self, comm: Communicator, length: int):
        self.comm, self.total = comm, comm.empty(length, np.int64)
        self.begin([])
        add_into(self.total[:1], self.total[:1])  # compiles the kernel before any clock runs

    def begin(self, dealt: list[list[int]]) -> None:
        self.total[:] = 0

    def add(self, client: int, message: np.ndarray) -> None:
        add_into(self.total, message)

    def finish(self) -> np.ndarray:
        self.comm.all_reduce(self.total)
        return self.total

    def tracked(self) -> dict[str, Same]:
        return {}

    def report(self) -> dict:
        return {}


class LateSum(SumAggregator):
    """Answers that arrive one round late. pending: the sum of those sent in the previous round."""

    def __init__(self, comm: Communicator, length: int):
        super().__init__(comm, length)
        self.pending = device_of(self.total).zeros(length, np.int64)

    def tracked(self) -> dict[str, Same]:
        return {"pending": Same(self.pending)}

    def add_pending_to(self, total: np.ndarray) -> None:
        """Add the answers of the previous round to total; those of this round become pending. Collective."""
        add_into(total, self.pending)
        self.pending[:] = self.finish()
