"""A cut model: each rank holds a part; ranks train and score it together, and save it as one vector.

    step     zero_gradient    forward_backward, or a pipeline's schedule    update: reduce_scatter, step, all_gather

The shards (zero.py) hold this rank's part; `AllLayers` or a pipeline stage (stage.py) computes with it. This module
adds sums over ranks that hold other parts: the gradients of tensors that are in several parts, and the squared norm."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdl.checkpoint.buffers import average, broadcast, extra_of
from hpcdl.checkpoint.sharded_vector import CutVector
from hpcdl.checkpoint.state import Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.trace import Traffic
from hpcdl.data import Batch
from hpcdl.errors import AgreedError, UsageError
from hpcdl.faults.straggler import stretched
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.memory import Memory
from hpcdl.models.group import IdentityGroup
from hpcdl.models.layered import Weights
from hpcdl.models.layout import Hyperslab
from hpcdl.models.losses import Loss
from hpcdl.models.model import abilities_of, unwrapped
from hpcdl.models.part import ModelPart, whole_part
from hpcdl.optim.optimizer import AVERAGE
from hpcdl.parallel.gathered_matrices import GatheredMatrices
from hpcdl.parallel.sharded_weights import weights_of
from hpcdl.parallel.stage import Stage
from hpcdl.parallel.zero import Shards
from hpcdl.runs.accumulated import accumulation
from hpcdl.runs.evaluation import Measures, summed_scores, watched
from hpcdl.runs.options import Options
from hpcdl.runs.ownership import Ownership, exchange, fingerprint

log = logging.getLogger("hpcdl")


def broadcast_initial_values(comm: Communicator, model: Any) -> None:
    """Broadcast rank 0's initial values of a model that does not draw them from the seed; collective."""
    for array in unwrapped(model).starting() if abilities_of(model).module else ():
        broadcast(comm, array)


def sharded_part(comm: Communicator, model: Any) -> ModelPart:
    """Return the whole model as a part to be sharded. AgreedError if ranks compute in different orders; collective."""
    part = whole_part(model)
    with comm.inside("compare the order of a module's children"):
        orders = comm.mpi.allgather(repr(part.order))
    if len(set(orders)) > 1:
        raise AgreedError(
            "on the same two rows some ranks run other children of the module, or in another order; full sharding "
            "needs the same order on all ranks: draw the module's values by torch's generator only, or take "
            "train-allreduce"
        )
    if part.order is not None and len(part.layers) == 1 and comm.rank == 0:
        log.warning("all parameters of the module are gathered at once (docs/torch.md, sharded by children, says why)")
    return part


def check_same_rows(options: Options, sharing: int) -> None:
    """Raise UsageError if the `sharing` ranks that share a model cannot all read the same examples."""
    if sharing > 1 and options.placement == "partitioned":
        raise UsageError(
            "--placement partitioned: ranks that share a model read the same rows; take shared or streamed"
        )
    if sharing > 1 and options.data_servers:
        raise UsageError("--data-servers: ranks that share a model read the same rows; leave it out")


def check_tensor(model: Any, ranks: int, sequence: bool) -> None:
    """Raise UsageError if `ranks` ranks cannot share the layers of the model; sequence: by tokens, too."""
    group = IdentityGroup()
    group.size, group.sequence = ranks, sequence
    ModelPart(model, share=(0, ranks), group=group)


class AllLayers:
    """Forward and backward of a part with all layers of `model`, each whole or cut. For fewer layers: `Stage`.
    model: may be a StragglerModel. traffic: of the communicator, whose time in messages does not count as computing."""

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
    """This rank's part of `model`, which the ranks of `comm` train together. ahead: steps in flight after each step.
    summed: (group, slices of the part's vector) of tensors whose gradient is summed over the group; group None on other
    ranks. reports_loss: True if this rank's losses and scores count. computing: runs the part; None: AllLayers. share:
    (number, of how many) of this rank's share of a batch; None: all ranks with this part have shares of their own."""

    def __init__(
        self,
        comm: Communicator,
        model: Any,
        shards: Shards,
        computing: AllLayers | Stage | None = None,
        summed: Sequence[tuple[Communicator | None, list[slice]]] = (),
        reports_loss: bool = True,
        ahead: int = 0,
        share: tuple[int, int] | None = None,
    ):
        super().__init__(model, shards.parameters, shards.optimizer)
        self.comm, self.shards, self.part = comm, shards, shards.part
        self.computing = computing or AllLayers(model, self.part, weights_of(shards), comm.traffic)
        self.weights, self.reports_loss, self.ahead = self.computing.weights, reports_loss, ahead
        self.share, self.parts = share or (shards.group.rank, shards.group.size), accumulation(model)
        views = ((group, [view for part in slices for view in shards.gradients_of(part)]) for group, slices in summed)
        self.summed = [(group, found) for group, found in views if group is not None and found]
        self.spoken_for = shards.unique_gradients()
        self.matrices = GatheredMatrices(shards, comm.rank, comm.size) if shards.optimizer.weights else None
        if abilities_of(model).module:  # the module was allocated whole
            unwrapped(model).let_go()

    def zero_gradient(self) -> None:
        """Set the gradient to zero at the start of a step."""
        self.shards.gradient[:] = 0

    def forward_backward(self, batch: Batch) -> float:
        """Add the gradient of a batch in --accumulate parts; return the sum of losses, 0 if not reported here."""
        loss = sum(self.computing.forward_backward(part) for part in batch.split(self.parts))
        return loss if self.reports_loss else 0.0

    def update(self, total: int) -> None:
        """Sum the gradients, do the optimizer's step with their mean over `total` examples, gather; collective."""
        self.reduce_scatter()
        norm = self._norm() if self.optimizer.clip_norm > 0 else None
        if self.matrices is not None:
            self.matrices.update(self.comm, 1 / total, norm)
        self.shards.update(1 / total, norm)
        self.shards.all_gather()

    def reduce_scatter(self) -> None:
        """Sum this rank's owned part of the gradient over all ranks with a summand; collective."""
        self.weights.finish()
        self.shards.reduce_scatter()
        for group, views in self.summed:
            packed = views[0] if len(views) == 1 else self.device.xp.concatenate(views)  # one message
            group.all_reduce(packed)
            if len(views) > 1:
                start = 0
                for view in views:
                    view[:] = packed[start : start + view.size]
                    start += view.size

    def _norm(self) -> float:
        total = np.array([sum(sum_of_squares(view) for view in self.spoken_for)], np.float64)
        self.comm.all_reduce(total)
        return math.sqrt(total[0])

    def weigh(self, memory: Memory) -> None:
        """Count activations from here on; shards are counted at allocation."""
        self.part.pool.memory = memory

    def tracked(self) -> dict[str, Tracked]:
        shards, size = self.shards, self.model.layout.size
        vectors = {"parameters": (shards.parameters, shards.parameter_pieces)}
        vectors |= {f"optimizer/{name}": (vector, shards.pieces) for name, vector in shards.optimizer.state.items()}
        return {name: CutVector(self.peers, vector, pieces, size) for name, (vector, pieces) in vectors.items()}

    def refresh(self) -> None:
        """Replace each buffer of a layer by its mean over the ranks with this layer; broadcast it to other ranks."""
        arrays = extra_of(self.model)
        if not arrays:
            return
        average(self.model, self.shards.group)
        own = set(self.part.extra)
        with self.peers.inside("gather the names of buffers"):
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
            self.shards.all_gather()

    def evaluate(self, split: Any, classes: int, measures: Measures | None = None) -> np.ndarray:
        """Return [losses, correct rows or squared errors, examples] of a split, summed over the peers; collective.
        measures: get the rows whose loss this rank reports."""

        def score(batch: Batch) -> tuple[float, float]:
            result = self.computing.score(batch)
            self.weights.finish()
            return result

        last = self.part.layers[-1] if self.part.layers else None
        with watched(last if isinstance(last, Loss) else None, measures, self.reports_loss):
            sums = summed_scores(score, split, self.share, self.part.rows_at_once, self.device)
        if not self.reports_loss:
            sums[:] = 0
        if self.part.context.rank > 0:  # the examples are those of the first rank, whose tokens are others
            sums[2:] = 0
        self.peers.all_reduce(sums)
        return sums

    def agree(self, everyone: Communicator) -> bool | None:
        """Return True if tensors on several ranks have equal bits there; None: no tensor is on several. Collective."""
        mine = {
            piece._replace(local=0): fingerprint(self.device.host(self.parameters[piece.local :][: piece.size]))
            for piece, _ in self.shards.parameter_pieces
        }
        with everyone.inside("compare the replicas"):
            found = everyone.mpi.allgather(mine)
        seen: dict[Hyperslab, list[int]] = {}
        for each in found:
            for piece, value in each.items():
                seen.setdefault(piece, []).append(value)
        repeated = [values for values in seen.values() if len(values) > 1]
        return all(len(set(values)) == 1 for values in repeated) if repeated else None

    def warm_up(self, few: Batch) -> None:
        if abilities_of(self.model).buffers:  # a step would change the buffers
            return
        self.computing.warm_up(few)
        self.weights.finish()
        self.zero_gradient()

    def horizon(self, step: int) -> int:
        return step + self.ahead
