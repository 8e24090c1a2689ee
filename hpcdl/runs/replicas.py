"""Replicas that need not agree: their average is scored, saved and reported.

    average               w = 1/N (w_1 + ... + w_N), the model that a run of gossip or local SGD gives
    consensus distance    1/N sum over r of |w_r - w|^2, how far the replicas have drifted apart

Both take messages of the run's own, which are counted apart: the training itself never averages over all ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdl.checkpoint.buffers import average
from hpcdl.checkpoint.state import PerRank, Same, Tracked
from hpcdl.comm import Communicator
from hpcdl.kernels.device import Array, device_of
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.memory import Memory
from hpcdl.optim import Optimizer
from hpcdl.runs.evaluation import evaluate, scores
from hpcdl.runs.ownership import Ownership, Weigh


class Replicas(Ownership):
    """Each rank has a replica and an optimizer of its own; `parameters` is the average as of the last refresh.
    synchronized: True for a step at whose end the strategy lets all ranks meet; None: it never does."""

    own = True

    def __init__(
        self,
        model: Any,
        replica: Array,
        optimizer: Optimizer,
        synchronized: Callable[[int], bool] | None = None,
        weigh_gradients: Weigh | None = None,
    ):
        average = device_of(replica).empty(replica.size, replica.dtype)
        average[:] = replica
        super().__init__(model, average, optimizer, weigh_gradients)
        self.replica, self.synchronized = replica, synchronized

    def weigh(self, memory: Memory) -> None:
        super().weigh(memory)
        memory.hold("parameters", self.replica)

    def tracked(self) -> dict[str, Tracked]:
        state: dict[str, Tracked] = {"replica": PerRank(self.replica), "parameters": Same(self.parameters)}
        return state | {f"optimizer/{name}": PerRank(vector) for name, vector in self.optimizer.state.items()}

    def refresh(self) -> None:
        """Set `parameters` to the mean of the replicas, with the same bits on all ranks; collective."""
        self.parameters[:] = self.replica
        self.peers.all_reduce(self.parameters, op="mean")
        average(self.model, self.peers)

    @property
    def iterate(self) -> Array:
        return self.replica

    def scores(self, data: Any) -> dict:
        return super().scores(data) | {"consensus_distance": self.distance()}

    def last_scores(self, data: Any) -> dict:
        return {"replica_test_accuracy": self.accuracies(data)}

    def distance(self) -> float:
        """Return the consensus distance to the average as of the last refresh; collective."""
        total = np.array([sum_of_squares(self.replica - self.parameters)])
        self.peers.all_reduce(total, op="mean")
        return float(total[0])

    def accuracies(self, data: Any) -> list[float] | None:
        """Return the test accuracy of each replica; None without test rows or classes. Collective."""
        if data.test is None or not data.classes:
            return None
        sums = evaluate(self.model, self.replica, data.test, data.classes)
        with self.peers.inside("gather the accuracies"):
            return self.peers.mpi.allgather(scores(sums, data.classes).accuracy)

    def agree(self, everyone: Communicator) -> bool | None:
        return None
