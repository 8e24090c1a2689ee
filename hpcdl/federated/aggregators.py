"""Aggregators: they add up, modulo 2^64, the messages of the clients of a round that live on all ranks.

begin(dealt)            all ranks: a round begins, with the clients dealt[r] on rank r
add(client, message)    the client's rank, where its answer comes; the message may be overwritten
finish()                all ranks: the sum, the same bits on each
tracked(), report()     what a checkpoint holds of it, by name; entries of the summary

Sum                     adds up on each rank, then all-reduces                                here
SecureAggregator        the same sum, of whose summands nobody learns (secure_aggregation.py)
LateSum                 what is sent in one round comes in the next                           here
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
        """A round begins."""

    def add(self, client: int, message: np.ndarray) -> None:
        """A client of this rank has answered."""

    def finish(self) -> np.ndarray:
        """The sum over all ranks; collective."""

    def tracked(self) -> dict[str, Same]:
        """What a checkpoint holds of it."""

    def report(self) -> dict:
        """Entries of the summary."""


class Sum:
    """The plain aggregator of messages of so many values."""

    def __init__(self, comm: Communicator, length: int):
        self.comm, self.total = comm, comm.empty(length, np.int64)
        self.begin([])
        add_into(self.total[:1], self.total[:1])  # changes nothing, but compiles before any clock runs

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


class LateSum(Sum):
    """Answers that come one round late. pending: the sum of those that were sent in the round before."""

    def __init__(self, comm: Communicator, length: int):
        super().__init__(comm, length)
        self.pending = device_of(self.total).zeros(length, np.int64)

    def tracked(self) -> dict[str, Same]:
        return {"pending": Same(self.pending)}

    def add_pending_to(self, total: np.ndarray) -> None:
        """total <- total + what was sent in the round before; then what was sent in this one is pending. Collective."""
        add_into(total, self.pending)
        self.pending[:] = self.finish()
