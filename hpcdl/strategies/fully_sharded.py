"""Fully sharded data parallelism: data-parallel training in which no rank holds all of the model.

    for each batch, on each rank its share of it
        forward     for layer 1, 2, ..., L     all-gather its parameters; compute; free them
        backward    for layer L, ..., 2, 1     all-gather its parameters; compute; free them
                                               reduce-scatter its gradient; keep 1/N of the sum
        update      1/N of the parameters, by 1/N of the gradient and of the optimizer's state

That is stage 3. At stage 2 parameters stay whole, and are all-gathered after the update; at stage 1 the gradient does,
too. What is held and what is sent stands in hpcdl/parallel/zero.py, what happens layer by layer in sharded_weights.py
beside it. In bytes for each parameter, in float32 with Adam (parameter 4, gradient 4, moments 8):

    stage     0     1             2              3
    bytes    16     8 + 8 / N     4 + 12 / N     16 / N

gather: "all-gather" cuts every layer into N chunks. "broadcast" gives each layer to one rank, who sends it to the
others when its turn comes, and to whom the gradients are reduced, as a lecture may draw it: simpler, but as uneven as
the layers, and the owner sends while others wait.

The steps are those of all-reduce SGD. (Rajbhandari et al., "ZeRO", SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpcdl.kernels.device import Array
from hpcdl.runs.options import Options, option
from hpcdl.strategies.description import Cut, Strategy

if TYPE_CHECKING:
    from hpcdl.comm import Communicator
    from hpcdl.data import Data
    from hpcdl.optim import Optimizer
    from hpcdl.runs.run import Run


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    stage: int = 3,
    gather: str = "all-gather",
) -> Array:
    """Train on all ranks of `comm`; returns the parameters that this rank holds."""
    from hpcdl.models.model import unwrapped
    from hpcdl.models.part import ModelPart
    from hpcdl.parallel.cut_model import CutModel, broadcast_initial_values
    from hpcdl.parallel.zero import Shards

    broadcast_initial_values(run.bookkeeping, model)
    shards = Shards(run, ModelPart(unwrapped(model)), optimizer, comm, stage, owners=gather == "broadcast")
    held = CutModel(comm, model, shards)
    run.report(stage=stage, gather=gather)
    run.begin("fully_sharded", held, data)

    for batch in run.batches(data, held.share):
        held.zero_gradient()
        # Stage 3 all-gathers a layer when its turn comes; 2 and 3 reduce-scatter its gradient when that is final.
        loss = held.forward_backward(batch)
        held.reduce_scatter()
        held.step(batch.total)
        held.all_gather()
        run.record(loss, batch.total)
        run.boundary()
    return held.parameters


@dataclass(frozen=True)
class ShardedOptions(Options):
    stage: Literal[1, 2, 3] = option(3, "what is sharded: 1 the optimizer's state, 2 and gradients, 3 and parameters")
    gather: Literal["all-gather", "broadcast"] = option(
        "all-gather", "each layer in equal chunks on all ranks, or whole on one of them, which broadcasts it"
    )


def fits(options: ShardedOptions, ranks: int, model: Any) -> None:
    from hpcdl.models.part import require_layers

    require_layers(model)


def cut(options: ShardedOptions, ranks: int) -> Cut:
    return Cut((ranks, 1, 1), options.stage, options.gather == "broadcast")


STRATEGY = Strategy("train-fully-sharded", ShardedOptions, train, cut=cut, check=fits)
