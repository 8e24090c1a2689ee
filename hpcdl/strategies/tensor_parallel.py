"""Tensor parallelism: every layer is cut, and all ranks work on it together (horizontal partition).

    a pair of products, Y = act(X A), Z = Y B, on N ranks

            A by columns          B by rows
            A_1 | A_2 | A_3       B_1
                                  B_2          rank r:   Y_r = act(X A_r)      needs all of X, which every rank has
                                  B_3                    Z_r = Y_r B_r         a summand of Z
                                               all:      Z = Z_1 + ... + Z_N   (operator g: one all-reduce)
            backward                           all:      dX = dX_1 + ... + dX_N (operator f: one all-reduce)

Half a block of a transformer (attention by heads, MLP by units) is such a pair; the layers of an MLP are cut by columns
and rows in turn. The embedding sums the ranks' parts of the vocabulary; the loss works on outputs on all ranks.

    all-reduces        a block: 4 (6 with recomputation), of rows * width values each; embedding 1, head 1 (backward)
    of a micro-batch   loss: 2, of 1 and 2 values for each row
    held               1/N of the weights and their gradients; norms and the biases after g are on every rank

sequence (sequence parallelism): norms, residuals and activations between the pairs are cut by tokens, and held once
instead of N times. f and g become all-gather and reduce-scatter, which send the same bytes; backward gathers the input
of the first product again, so that a block sends 5/4 of these bytes.

(Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019;
Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022)"""

from dataclasses import dataclass
from typing import Any

from hpcdl.kernels.device import Array
from hpcdl.runs.options import Options, option
from hpcdl.strategies.description import Communicator, Cut, Data, Optimizer, Run, Strategy


def train(comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run, sequence: bool = False) -> Array:
    """Train on all ranks of `comm`; return the parameters of this rank's part."""
    from hpcdl.comm.tensor_group import TensorGroup
    from hpcdl.models.model import unwrapped
    from hpcdl.models.part import ModelPart
    from hpcdl.parallel.cut_model import CutModel
    from hpcdl.parallel.zero import Shards

    part = ModelPart(unwrapped(model), share=(comm.rank, comm.size), group=TensorGroup(comm, sequence))
    copies = run.until_end(comm.split(comm.rank, name="data"))  # of this part: only this rank
    summed = [(comm, part.replicated())] if sequence else []
    held = CutModel(comm, model, Shards(run, part, optimizer, copies), summed=summed, reports_loss=comm.rank == 0)
    run.report(parts=comm.size, sequence_parallel=sequence)
    run.begin("tensor_parallel", held, data)

    for batch in run.batches(data, held.share):
        held.zero_gradient()
        loss = held.forward_backward(batch)
        held.update(batch.total)
        run.record(loss, batch.total)
        run.boundary()
    return held.parameters


@dataclass(frozen=True)
class TensorOptions(Options):
    sequence_parallel: bool = option(False, "cut the activations between the parts of layers by tokens, too (gpt)")


def fits(options: TensorOptions, ranks: int, model: Any) -> None:
    from hpcdl.parallel.cut_model import check_same_rows, check_tensor

    check_same_rows(options, ranks)
    check_tensor(model, ranks, options.sequence_parallel)


def cut(options: TensorOptions, ranks: int) -> Cut:
    return Cut((1, 1, ranks), tensor=True, sequence=options.sequence_parallel)


RENAMED, SMALL = {"sequence": "sequence_parallel"}, "--model mlp:32 --batch-size 8"
STRATEGY = Strategy("train-tensor-parallel", TensorOptions, train, cut=cut, check=fits, renamed=RENAMED, small=SMALL)
