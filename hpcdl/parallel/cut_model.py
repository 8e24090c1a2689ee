"""A model that is cut: of each rank a part, trained together, scored as it is cut and saved as one vector.

    step     zero_gradient    forward_backward, or a pipeline's schedule    update: reduce_scatter, step, all_gather

What this rank holds is in its shards (zero.py); what computes with it is `AllLayers`, or a stage of a pipeline
(stage.py). This is the run's view of both, and the sums beyond those of the shards: of tensors that ranks with other
parts hold, too, and of the squares of the whole gradient.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hpcdl.checkpoint.buffers import average, broadcast, extra_of
from hpcdl.checkpoint.sharded_vector import CutVector
from hpcdl.checkpoint.state import Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.comm.trace import Traffic
from hpcdl.data import Batch
from hpcdl.errors import UsageError
from hpcdl.faults.straggler import stretched
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.memory import Memory
from hpcdl.models.layered import Weights
from hpcdl.models.layout import Hyperslab
from hpcdl.models.model_wrapper import unwrapped
from hpcdl.models.part import ModelPart
from hpcdl.optim.optimizer import AVERAGE
from hpcdl.parallel.sharded_weights import weights_of
from hpcdl.parallel.zero import Shards
from hpcdl.runs.accumulated import accumulation
from hpcdl.runs.averaging import exchange
from hpcdl.runs.evaluation import summed_scores
from hpcdl.runs.options import Options
from hpcdl.runs.ownership import Ownership, fingerprint


def broadcast_initial_values(comm: Communicator, model: Any) -> None:
    """A model whose initial values are its process's own, and not the seed's, begins with rank 0's; collective."""
    for array in getattr(unwrapped(model), "starting", list)():
        broadcast(comm, array)


def check_same_rows(options: Options, sharing: int) -> None:
    """Raise UsageError where `sharing` ranks, which share a model, cannot all read the same examples."""
    if sharing > 1 and options.placement == "partitioned":
        raise UsageError(
            "--placement partitioned: ranks that share a model read the same rows; take shared or streamed"
        )
    if sharing > 1 and options.data_servers:
        raise UsageError("--data-servers: ranks that share a model read the same rows; leave it out")


class PartComputation(Protocol):
    """What computes with the weights that a rank holds; all ranks that share a model take the same batches."""

    weights: Weights

    def forward_backward(self, batch: Batch) -> float:
        """Add the gradient of a batch; its sum of losses, where that is known."""

    def score(self, batch: Batch) -> tuple[float, float]:
        """(sum of losses, score) of a batch, where they are known."""

    def warm_up(self, batch: Batch) -> None:
        """Forward and backward that are no part of the training."""


class AllLayers:
    """Forward and backward of a part that has all layers of `model`, each whole or in part.

    model: slowed or not (hpcdl/faults/straggler.py). traffic: of the communicator, for time spent in messages is no
    computing.
    """

    def __init__(self, model: Any, part: ModelPart, weights: Weights, traffic: Traffic):
        self.model, self.part, self.weights, self.traffic = model, part, weights, traffic

    def forward_backward(self, batch: Batch) -> float:
        with stretched(self.model, 1.0, self.traffic):
            return self.part.forward_backward(self.weights, batch)

    def score(self, batch: Batch) -> tuple[float, float]:
        return self.part.score(self.weights, batch)

    def warm_up(self, batch: Batch) -> None:
        self.part.forward_backward(self.weights, batch)


class CutModel(Ownership):
    """What this rank holds of `model`, and what the ranks of `comm`, which train it, do with it.

    computing: what computes with the shards; all layers by themselves, if nothing else. summed: (group, slices of the
    part's vector), tensors that each rank of the group holds, with a summand of their gradient; group None: not this
    rank. reports_loss: whether this rank's losses and scores count, for of ranks that share a model several know them.
    ahead: how many steps are under way when one is done.
    """

    def __init__(
        self,
        comm: Communicator,
        model: Any,
        shards: Shards,
        computing: PartComputation | None = None,
        summed: Sequence[tuple[Communicator | None, list[slice]]] = (),
        reports_loss: bool = True,
        ahead: int = 0,
    ):
        super().__init__(model, shards.parameters, shards.optimizer)
        self.comm, self.shards, self.part = comm, shards, shards.part
        self.computing = computing or AllLayers(model, self.part, weights_of(shards), comm.traffic)
        self.weights, self.reports_loss, self.ahead = self.computing.weights, reports_loss, ahead
        self.share, self.parts = (shards.group.rank, shards.group.size), accumulation(model)
        views = [
            (group, [view for part in slices for view in shards.gradients_of(part)])
            for group, slices in summed
            if group is not None
        ]
        self.summed = [(group, found) for group, found in views if found]
        self.spoken_for = shards.unique_gradients()
        if hasattr(unwrapped(model), "let_go"):  # it has been made whole
            unwrapped(model).let_go()

    # -- a step ------------------------------------------------------------------------------------------------------

    def zero_gradient(self) -> None:
        """The gradient of a step begins."""
        self.shards.gradient[:] = 0

    def forward_backward(self, batch: Batch) -> float:
        """Add the gradient of a batch in --accumulate parts; returns the sum of losses, 0 where it is not reported."""
        loss = sum(self.computing.forward_backward(part) for part in batch.split(self.parts))
        return loss if self.reports_loss else 0.0

    def update(self, total: int) -> None:
        """Sum the gradients, and take the optimizer's step by their mean over `total` examples; collective."""
        self.reduce_scatter()
        self.step(total)
        self.all_gather()

    def reduce_scatter(self) -> None:
        """What this rank owns of the gradient <- its sum over all ranks that have a summand of it; collective."""
        self.weights.finish()
        self.shards.reduce_scatter()
        for group, views in self.summed:
            self._all_reduce(group, views)

    def step(self, total: int) -> None:
        """Take the optimizer's step with what this rank owns, by the mean gradient over `total` examples."""
        self.shards.update(1 / total, self._norm() if self.optimizer.clip_norm > 0 else None)

    def all_gather(self) -> None:
        """The parameters <- what each rank has updated of them, where they are held whole; collective."""
        self.shards.all_gather()

    def _all_reduce(self, group: Communicator, views: list) -> None:
        """Sum these parts of the gradient over a group, in one message."""
        packed = self.device.xp.concatenate(views) if len(views) != 1 else views[0]
        group.all_reduce(packed)
        if len(views) != 1:
            start = 0
            for view in views:
                view[:] = packed[start : start + view.size]
                start += view.size

    def _norm(self) -> float:
        """The 2-norm of the whole model's gradient."""
        total = np.array([sum(sum_of_squares(view) for view in self.spoken_for)], np.float64)
        self.comm.all_reduce(total)
        return math.sqrt(total[0])

    # -- for the run -------------------------------------------------------------------------------------------------

    def weigh(self, memory: Memory) -> None:
        """Activations count from here on; shards are counted where they are made."""
        self.part.pool.memory = memory

    def tracked(self) -> dict[str, Tracked]:
        """Whole vectors, in the order of the layout; collective."""
        shards, size = self.shards, self.model.layout.size
        found: dict[str, Tracked] = {
            "parameters": CutVector(self.peers, shards.parameters, shards.parameter_pieces, size)
        }
        for name, vector in shards.optimizer.state.items():
            found[f"optimizer/{name}"] = CutVector(self.peers, vector, shards.pieces, size)
        return found

    def refresh(self) -> None:
        """What layers hold beside their tensors: the mean over the ranks that have them, known on all others, too."""
        arrays = extra_of(self.model)
        if not arrays:
            return
        average(self.model, self.shards.group)
        own = set(self.part.extra)
        with activity.inside("say who holds what beside", self.peers):
            holders = self.peers.mpi.allgather(own)
        for name, array in arrays.items():
            having = [rank for rank, names in enumerate(holders) if name in names]
            if 0 < len(having) < self.peers.size:
                values = array.copy()
                broadcast(self.peers, values, having[0])
                if name not in own:
                    array[...] = values

    def show_average(self) -> None:
        for w, at in zip(self.shards.owned_parameters, self.shards.units.in_shard, strict=True):
            exchange(w, self.optimizer.state[AVERAGE][at])
        with self.comm.traffic.uncounted():
            self.all_gather()

    def evaluate(self, split: Any, classes: int) -> np.ndarray:
        """[losses, right answers or squared errors, examples] of a split, summed over the peers; collective."""

        def score(batch: Batch) -> tuple[float, float]:
            result = self.computing.score(batch)
            self.weights.finish()
            return result

        sums = summed_scores(score, split, self.share, self.part.rows_at_once, self.device)
        if not self.reports_loss:
            sums[:] = 0
        self.peers.all_reduce(sums)
        return sums

    def agree(self, everyone: Communicator) -> bool | None:
        """Whether ranks that hold the same tensors, or parts of them, hold the same bits; None where none do.

        What is compared are fingerprints; collective.
        """
        mine = {}
        for piece, _ in self.shards.parameter_pieces:
            vector = self.parameters[piece.local : piece.local + piece.size]
            mine[piece._replace(local=0)] = fingerprint(self.device.host(vector))
        with activity.inside("compare the replicas", everyone):
            found = everyone.mpi.allgather(mine)
        seen: dict[Hyperslab, list[int]] = {}
        for each in found:
            for piece, value in each.items():
                seen.setdefault(piece, []).append(value)
        repeated = [values for values in seen.values() if len(values) > 1]
        return all(len(set(values)) == 1 for values in repeated) if repeated else None

    def warm_up(self, few: Batch) -> None:
        """A step's computing, so that everything is compiled; collective."""
        if hasattr(self.model, "extra"):  # which a step would change
            return
        self.computing.warm_up(few)
        self.weights.finish()
        self.zero_gradient()

    def horizon(self, step: int) -> int:
        """The last step that is under way after `step`."""
        return step + self.ahead
