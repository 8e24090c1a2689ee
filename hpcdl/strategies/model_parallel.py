"""Model parallelism by layers (vertical partition): consecutive layers on consecutive ranks.

    rank 0    x -> layers 1 2 3  --- activations --->                                  <- gradients -  layers 3 2 1
    rank 1                          layers 4 5 6  --- activations --->   <- gradients -  layers 6 5 4
    rank 2                                           layers 7 8, loss  layers 8 7

It trains a model that fits on no single rank, but no faster: one rank computes at a time, so (p-1)/p of the time of p
ranks is idle (pipeline.py fills it). Neighbours exchange rows * width values forward and as many backward; only the
gradient of weights that the first and the last layer share (tied) is reduced. balance: hpcdl/models/balance.py."""

from dataclasses import dataclass
from typing import Any, Literal

from hpcdl.kernels.device import Array
from hpcdl.runs.options import Options, option
from hpcdl.strategies.description import Communicator, Cut, Data, Optimizer, Run, Strategy


def train(
    comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run, balance: str = "parameters"
) -> Array:
    """Train on all ranks of `comm`; return the parameters of this rank's layers."""
    from hpcdl.parallel.pipelined import pipelined

    held, stage = pipelined(run, model, data, optimizer, balance=balance)
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
        "parameters", "what the stages have in equal parts: parameters, or measured time of the layers"
    )


def fits(options: ModelOptions, ranks: int, model: Any) -> None:
    from hpcdl.models.balance import cut_layers
    from hpcdl.parallel.cut_model import check_same_rows

    check_same_rows(options, ranks)
    cut_layers(model, ranks)


def cut(options: ModelOptions, ranks: int) -> Cut:
    return Cut((1, ranks, 1), schedule="one batch")


SMALL = "--model mlp:{widths} --batch-size 16"
STRATEGY = Strategy("train-model-parallel", ModelOptions, train, cut=cut, check=fits, small=SMALL)
