"""Fully sharded data parallelism: data-parallel training in which no rank holds the whole model.

    for each batch, on each rank its share of it
        forward     for layer 1, 2, ..., L     all-gather its parameters; compute; free them
        backward    for layer L, ..., 2, 1     all-gather its parameters; compute; free them
                                               reduce-scatter its gradient; keep 1/N of the sum
        update      1/N of the parameters, by 1/N of the gradient and of the optimizer's state

The layers of a PyTorch module that is no chain are its children (hpcdl/torch/module_units.py).
This is stage 3 of ZeRO (hpcdl/parallel/zero.py). At stage 2 the parameters stay whole and are all-gathered after the
update; at stage 1 the gradient stays whole, too. Bytes per parameter, in float32 with Adam:

    stage     0     1             2              3
    bytes    16     8 + 8 / N     4 + 12 / N     16 / N

gather "broadcast": each layer has one owner, which broadcasts it and receives its reduced gradient. That is simpler,
but as uneven as the layers, and the owner sends while others wait. The steps are those of all-reduce SGD.

(Rajbhandari et al., "ZeRO", SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023)"""

from dataclasses import dataclass
from typing import Any, Literal

from hpcdl.kernels.device import Array
from hpcdl.runs.options import Options, option
from hpcdl.strategies.description import Communicator, Cut, Data, Optimizer, Run, Strategy


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    stage: int = 3,
    gather: str = "all-gather",
) -> Array:
    """Train on all ranks of `comm`; return the parameters that this rank holds."""
    from hpcdl.parallel.cut_model import CutModel, broadcast_initial_values, sharded_part
    from hpcdl.parallel.zero import Shards

    uncounted = run.bookkeeping
    broadcast_initial_values(uncounted, model)
    shards = Shards(run, sharded_part(uncounted, model), optimizer, comm, stage, owners=gather == "broadcast")
    held = CutModel(comm, model, shards)
    run.report(stage=stage, gather=gather)
    run.begin("fully_sharded", held, data)

    for batch in run.batches(data, held.share):
        held.zero_gradient()
        # Stage 3 all-gathers each layer before use; 2 and 3 reduce-scatter its gradient as soon as it is final.
        loss = held.forward_backward(batch)
        held.update(batch.total)  # reduce-scatter at stage 1; the optimizer's step; all-gather at stages 1 and 2
        run.record(loss, batch.total)
        run.boundary()
    return held.parameters


@dataclass(frozen=True)
class ShardedOptions(Options):
    stage: Literal[1, 2, 3] = option(3, "what is sharded; 1: optimizer state, 2: gradients, too, 3: parameters, too")
    gather: Literal["all-gather", "broadcast"] = option(
        "all-gather", "each layer in equal chunks on all ranks, or whole on one of them, which broadcasts it"
    )


def fits(options: ShardedOptions, ranks: int, model: Any) -> None:
    from hpcdl.models.part import whole_part

    whole_part(model)


def cut(options: ShardedOptions, ranks: int) -> Cut:
    return Cut((ranks, 1, 1), options.stage, options.gather == "broadcast")


STRATEGY = Strategy("train-fully-sharded", ShardedOptions, train, cut=cut, check=fits)
