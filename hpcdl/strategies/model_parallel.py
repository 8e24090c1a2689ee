"""Model parallelism by layers (vertical partition): consecutive layers on consecutive ranks.

    rank 0    x -> layers 1 2 3  --- activations --->                                  <- gradients -  layers 3 2 1
    rank 1                          layers 4 5 6  --- activations --->   <- gradients -  layers 6 5 4
    rank 2                                           layers 7 8, loss  layers 8 7

It lets a model fit that fits on no rank, and no more: one rank computes at a time, the others wait, (p-1)/p of the time
of p ranks. hpcdl/strategies/pipeline.py fills that time. Between neighbours travel rows * width values forward and as
many backward; nothing is reduced but the gradient of weights that the first and the last layer share (tied).

balance: the layers are cut so that the most expensive rank has as little as can be, by their parameters or by the time
that they were measured to take (hpcdl/models/balance.py).
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
    comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run, balance: str = "parameters"
) -> Array:
    """Train on all ranks of `comm`; returns the parameters of this rank's layers."""
    from hpcdl.parallel.pipelined import PipelineGroups, pipelined

    groups = run.until_end(PipelineGroups(comm))
    held, stage = pipelined(run, model, data, optimizer, groups, balance=balance)
    run.begin("model_parallel", held, data)

    for batch in run.batches(data, held.share):
        held.zero_gradient()
        loss = held.forward_backward(batch)
        held.update(batch.total)
        run.record(loss, batch.total)
        run.boundary()
    run.report(**stage.costs(held.peers))
    return held.parameters


@dataclass(frozen=True)
class ModelOptions(Options):
    balance: Literal["parameters", "measured"] = option(
        "parameters", "by what the layers are cut evenly: their parameters, or the time that they take"
    )


def fits(options: ModelOptions, ranks: int, model: Any) -> None:
    from hpcdl.models.balance import cut_layers
    from hpcdl.parallel.cut_model import check_same_rows

    check_same_rows(options, ranks)
    cut_layers(model, ranks)


def cut(options: ModelOptions, ranks: int) -> Cut:
    return Cut((1, ranks, 1), schedule="one batch")


STRATEGY = Strategy(
    "train-model-parallel", ModelOptions, train, cut=cut, check=fits, small="--model mlp:{widths} --batch-size 16"
)
