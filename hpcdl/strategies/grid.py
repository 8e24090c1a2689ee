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
same for all of them. stage: of ZeRO, along the data axis (hpcdl/parallel/holding.py).

(Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021)
"""

from hpcdl.comm.grid import Grid
from hpcdl.comm.tensor_group import TensorGroup
from hpcdl.models.part import Part
from hpcdl.runs.straggler import unslowed
from hpcdl.parallel.holding import Holding
from hpcdl.parallel.stage import Stage, place_layers
from hpcdl.strategies.pipeline_schedules import pictures, steps_of


def train(
    comm,
    model,
    data,
    optimizer,
    run,
    grid,
    schedule="1f1b",
    microbatches=4,
    chunks=1,
    recompute=False,
    sequence=False,
    stage=0,
    balance="parameters",
    draw=False,
):
    """Train on all ranks of `comm`, a grid of the shape `grid`; returns the parameters that this rank holds."""
    grid = run.until_end(Grid(comm, **grid))
    (_, p, t), (_, stages, parts) = grid.place, grid.shape
    group = TensorGroup(grid.tensor, sequence)
    layers = place_layers(run, model, data, grid.pipeline, chunks, balance)
    part = Part(unslowed(model), layers, (t, parts), group)
    alike = [(grid.tensor, part.shared_alike())] if sequence else []
    alike.append((grid.ends, part.tied()))
    held = Holding(run, part, optimizer, grid.data, alike, stage, counts=p == stages - 1 and t == 0)
    layers = Stage(grid.pipeline, part, held.store(), model, recompute)
    held.descend, held.score = layers.descend, layers.score
    run.extra |= {"grid": dict(zip(("data", "pipeline", "tensor"), grid.shape, strict=True)), "stage": stage}
    run.extra |= {"schedule": schedule, "microbatches": microbatches, "chunks": chunks, "recompute": recompute}
    run.begin("grid", model, held.parameters, held.optimizer, data, part=held)
    layers.done.clear()  # what was tried out

    for batch in run.batches(data, held.share):
        held.zero()
        loss = layers.run(steps_of(schedule, stages, p, microbatches, chunks), batch.split(microbatches))
        held.update(batch.total)
        run.record(loss if held.counts else 0.0, batch)
        run.boundary()
    run.extra |= layers.costs(run)
    if draw and comm.rank < comm.size // grid.shape[0] and t == 0:
        run.show(pictures(schedule, stages, microbatches, chunks, layers.gather_spans()))
    return held.parameters
