"""Data, pipeline and tensor parallelism together, on a grid of ranks (3D parallelism).

    data d                copies of the model, each with its share of a batch    sum of gradients, once a step; or the
                                                                                 stages of ZeRO
    pipeline p            stages of consecutive layers                           activations, for each micro-batch
    tensor t              parts of each layer                                    sums, twice a layer and micro-batch

    for each batch, on the ranks of copy d its share of it, in m micro-batches
        each stage takes them through its layers as the schedule says; within a stage t ranks work on each layer
        sum the gradient over the copies, and what ranks of a copy have alike over them; update

Any product of the axes is the number of ranks, and each axis may be 1: data alone is all-reduce SGD or fully sharded,
pipeline alone hpcdl/strategies/pipeline.py, tensor alone hpcdl/strategies/tensor_parallel.py, and the steps are the
same for all of them. stage: of ZeRO, along the data axis (hpcdl/parallel/zero.py).

(Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021)
"""

from typing import Any

from hpcdl.comm import Communicator
from hpcdl.comm.grid import AXES, Grid
from hpcdl.data import Data
from hpcdl.kernels.device import Array
from hpcdl.optim import Optimizer
from hpcdl.parallel.pipelined import pipelined
from hpcdl.runs.run import Run
from hpcdl.strategies.pipeline_schedules import actions_of, pictures


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    grid: dict[str, int],
    schedule: str = "1f1b",
    microbatches: int = 4,
    chunks: int = 1,
    recompute: bool = False,
    sequence: bool = False,
    stage: int = 0,
    balance: str = "parameters",
    draw: bool = False,
) -> Array:
    """Train on all ranks of `comm`, a grid of the shape `grid`; returns the parameters that this rank holds."""
    groups = run.until_end(Grid(comm, **grid))
    (_, p, t), (copies, stages, _) = groups.place, groups.shape
    held, layers = pipelined(
        run, model, data, optimizer, groups, chunks, balance, recompute, sequence=sequence, zero=stage
    )
    run.report(grid=dict(zip(AXES, groups.shape, strict=True)), stage=stage)
    run.report(schedule=schedule, microbatches=microbatches, chunks=chunks, recompute=recompute)
    run.begin("grid", held, data)

    for batch in run.batches(data, held.share):
        held.zero_gradient()
        loss = layers.run(actions_of(schedule, stages, p, microbatches, chunks), batch.split(microbatches))
        held.update(batch.total)
        run.record(loss if held.reports_loss else 0.0, batch.total)
        run.boundary()
    run.report(**layers.costs(held.peers))
    if draw and comm.rank < comm.size // copies and t == 0:
        run.say(pictures(schedule, stages, microbatches, chunks, layers.gather_spans()))
    return held.parameters
