"""Context parallelism: the tokens of each sequence are cut over the ranks; every rank has all of the model.

    on each rank, its tokens of the batch's sequences (zigzag, hpcdl/parallel/context.py):
        forward and backward through all layers, token by token, except
        attention: ring (keys and values travel around) or Ulysses (shares of tokens become shares of heads)
    g <- all-reduce sum of the ranks' gradients; update

The steps are those of sequential SGD. A rank holds 1/C of the activations, so that C ranks train on sequences C times
as long; parameters, gradient and optimizer state are whole on each rank, or cut over the ranks by ZeRO (stage).

    sent by a rank and micro-batch for each attention layer of T tokens on a rank, w numbers of q, 2u of k and v
        ring         (C-1) 6 T u                       in 3 (C-1) messages, behind computing
        ulysses      (C-1)/C T (5 w + 4 u)             in 5 (C-1) messages, not hidden
    and an all-reduce of the gradient for each step, or as ZeRO does

(Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context", 2023; Jacobs et al.,
"DeepSpeed Ulysses", 2023; Llama Team, "The Llama 3 herd of models", 2024)"""

from dataclasses import dataclass
from typing import Any, Literal

from hpcdl.kernels.device import Array
from hpcdl.runs.options import Options, check_zero_stage, option
from hpcdl.strategies.description import Communicator, Cut, Data, Optimizer, Run, Strategy


def train(
    comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run, attention: str = "ring", stage: int = 0
) -> Array:
    """Train on all ranks of `comm`; return the parameters that this rank holds."""
    from hpcdl.models.model import unwrapped
    from hpcdl.models.part import ModelPart
    from hpcdl.parallel.context import costs, make_context
    from hpcdl.parallel.cut_model import CutModel
    from hpcdl.parallel.zero import Shards
    from hpcdl.runs.accumulated import accumulation

    rows = max(1, run.plan(data)[0] // accumulation(model))
    context = make_context(comm, unwrapped(model), rows, attention)
    part = ModelPart(unwrapped(model), context=context)
    held = CutModel(comm, model, Shards(run, part, optimizer, comm, stage), share=(0, 1))
    run.report(stage=stage)
    run.begin("context_parallel", held, data)

    for batch in run.batches(data, held.share):
        held.zero_gradient()
        loss = held.forward_backward(batch)
        held.update(batch.total)
        run.record(loss, batch.total)
        run.boundary()
    run.report(**costs(context, held.peers))
    return held.parameters


@dataclass(frozen=True)
class ContextParallelOptions(Options):
    attention: Literal["ring", "ulysses", "auto"] = option(
        "ring", "how attention reaches the tokens of other ranks; auto: the faster of both, as tried at the start"
    )
    stage: int = option(0, "stage of ZeRO over the ranks: 0, 1, 2 or 3")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_zero_stage(self.stage)


def fits(options: ContextParallelOptions, ranks: int, model: Any) -> None:
    from hpcdl.parallel.context import check_context
    from hpcdl.parallel.cut_model import check_same_rows

    check_same_rows(options, ranks)
    check_context(model, ranks, options.attention)


def cut(options: ContextParallelOptions, ranks: int) -> Cut:
    return Cut((1, 1, 1), options.stage, context=ranks, attention=options.attention)


SMALL = "--data text --model gpt:layers=1,width=16,heads=4 --batch-size 8"
STRATEGY = Strategy("train-context-parallel", ContextParallelOptions, train, cut=cut, check=fits, small=SMALL)
