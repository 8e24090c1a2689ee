"""Replicas that need not agree: what is scored, saved and reported of them is their average.

    average               w = 1/N (w_1 + ... + w_N), the model that a run of gossip or local SGD gives
    consensus distance    1/N sum over r of |w_r - w|^2, how far the replicas have drifted apart
    spread                what each replica by itself scores on the test part

All of it travels in messages of the run's own, which are counted apart: the training never averages over all ranks.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdl.checkpoint.buffers import average
from hpcdl.checkpoint.state import PerRank, Same, Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.kernels.device import Array, device_of
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.memory import Memory
from hpcdl.optim import Optimizer
from hpcdl.runs.evaluation import evaluate, scores
from hpcdl.runs.ownership import Ownership


class Replicas(Ownership):
    """Each rank holds a replica and an optimizer of its own; `parameters` is the average as it was refreshed last.

    synchronized: tells of a step whether the strategy lets all ranks meet at its end; None: it never does.
    """

    own = True

    def __init__(
        self,
        model: Any,
        replica: Array,
        optimizer: Optimizer,
        synchronized: Callable[[int], bool] | None = None,
    ):
        average = device_of(replica).empty(replica.size, replica.dtype)
        average[:] = replica
        super().__init__(model, average, optimizer)
        self.replica, self.synchronized = replica, synchronized

    def join(self, bookkeeping: Communicator, memory: Memory) -> None:
        self.everyone = bookkeeping
        super().join(bookkeeping, memory)

    def weigh(self, memory: Memory) -> None:
        """The replica, too, beside the average."""
        super().weigh(memory)
        memory.hold("parameters", self.replica)

    def tracked(self) -> dict[str, Tracked]:
        state: dict[str, Tracked] = {"replica": PerRank(self.replica), "parameters": Same(self.parameters)}
        return state | {f"optimizer/{name}": PerRank(vector) for name, vector in self.optimizer.state.items()}

    def refresh(self) -> None:
        """parameters <- the mean of the replicas, the same bits on all ranks; collective."""
        self.parameters[:] = self.replica
        self.everyone.all_reduce(self.parameters, op="mean")
        average(self.model, self.everyone)

    @property
    def iterate(self) -> Array:
        return self.replica

    def scores(self, data: Any) -> dict:
        return super().scores(data) | {"consensus_distance": self.distance()}

    def last_scores(self, data: Any) -> dict:
        return {"replica_test_accuracy": self.accuracies(data)}

    def distance(self) -> float:
        """The consensus distance to the average as it was refreshed last; collective."""
        total = np.array([sum_of_squares(self.replica - self.parameters)])
        self.everyone.all_reduce(total, op="mean")
        return float(total[0])

    def accuracies(self, data: Any) -> list[float] | None:
        """The test accuracy of each replica; None where there is none to tell. Collective."""
        if data.test is None or not data.classes:
            return None
        sums = evaluate(self.model, self.replica, data.test, data.classes)
        with activity.inside("gather the accuracies", self.everyone):
            return self.everyone.mpi.allgather(scores(sums, data.classes).accuracy)

    def agree(self, everyone: Communicator) -> bool | None:
        """They need not."""
        return None
