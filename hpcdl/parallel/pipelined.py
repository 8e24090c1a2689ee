"""Set-up of pipeline parallelism: the placement of layers on stages, groups, shards and the stage of this rank.

    layers      chunk 0 of rank 0 | chunk 0 of rank 1 | ... | chunk 1 of rank 0 | chunk 1 of rank 1 | ...
    in a V      chunk 0 of rank 0 | chunk 0 of rank 1 | ... | chunk 1 of rank 1 | chunk 1 of rank 0

    groups      pipeline    send activations and their gradients                             the stages
                copies      add up gradients; the stages of ZeRO                             copies of this stage
                context     share the tokens of sequences (context.py)                       copies with the same rows
                expert      share the experts of mixtures (expert.py); add up gradients      copies but for experts
                            of the other tensors
                tensor      share each layer (None: each layer is on one rank)               this stage's ranks
                ends        add up gradients of tied weights                                 first and last stage,
                                                                                             in a V one stage: none

The groups are those of a grid (hpcdl/comm/grid.py), or all ranks are one pipeline; further tied weights get groups."""

import itertools
from typing import Any

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.grid import Grid, two_ends
from hpcdl.comm.tensor_group import TensorGroup
from hpcdl.data import Batch, Data
from hpcdl.models.balance import cut_layers, measured_costs
from hpcdl.models.model import unwrapped
from hpcdl.models.part import ModelPart
from hpcdl.optim import Optimizer
from hpcdl.parallel.context import make_context
from hpcdl.parallel.cut_model import CutModel, broadcast_initial_values
from hpcdl.parallel.expert import SharedExperts, check_experts
from hpcdl.parallel.sharded_weights import weights_of
from hpcdl.parallel.stage import Stage
from hpcdl.parallel.timetable import Placement
from hpcdl.parallel.zero import Shards
from hpcdl.runs.run import Run


def pipelined(
    run: Run,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    grid: Grid | None = None,
    where: Placement | None = None,
    balance: str = "parameters",
    recompute: bool = False,
    sequence: bool = False,
    zero: int = 0,
    ahead: int = 0,
    attention: str = "ring",
    microbatches: int = 1,
) -> tuple[CutModel, Stage]:
    """Return this rank's part of the model, and the pipeline stage that computes with it; collective.
    grid: None: all ranks are one pipeline. where, balance: see `place_layers`. recompute: see stage.py. sequence:
    sequence parallelism in `grid.tensor`. zero: stage of ZeRO along `grid.copies`. ahead: see `CutModel`. attention:
    see `make_context`. microbatches: of a batch."""
    comm, context, share, experts = run.comm, None, None, None
    if grid is None:
        pipeline, tensor = comm, None
        copies, ends = run.until_end(comm.split(comm.rank, name="data")), run.until_end(two_ends(comm))
    else:
        pipeline, copies, ends, tensor = grid.pipeline, grid.copies, grid.ends, TensorGroup(grid.tensor, sequence)
        if grid.context.size > 1:
            share = grid.data.rank, grid.data.size
            rows = max(1, run.plan(data)[0] // grid.data.size // microbatches)
            context = make_context(grid.context, unwrapped(model), rows, attention, tensor.size)
        if grid.expert.size > 1:
            check_experts(unwrapped(model), grid.expert.size)
            share = grid.data.rank * grid.expert.size + grid.expert.rank, grid.data.size * grid.expert.size
            experts = SharedExperts(grid.expert)
    broadcast_initial_values(run.bookkeeping, model)
    where = where or Placement(pipeline.size)
    layers = place_layers(run, model, data, pipeline, where, balance)
    place = (0, 1) if tensor is None else (tensor.rank, tensor.size)
    part = ModelPart(unwrapped(model), layers, place, tensor, context, experts)
    summed = tied_groups(run, part, pipeline, ends)
    if tensor is not None and sequence:
        summed.insert(0, (tensor.comm, part.replicated()))
    if experts is not None:
        summed = [*((experts.comm, slices) for slices in part.common()), *summed]
    shards = Shards(run, part, optimizer, copies, zero)
    stage = Stage(pipeline, part, weights_of(shards), model, recompute, where)
    reports_loss = where.place(where.last)[0] == pipeline.rank and place[0] == 0
    return CutModel(comm, model, shards, stage, summed, reports_loss, ahead, share), stage


def place_layers(
    run: Run, model: Any, data: Data, comm: Communicator, where: Placement, balance: str = "parameters"
) -> list[range]:
    """Return this rank's layers, a range of their numbers for each of its chunks; collective. where: the chunks.
    balance: "parameters", or "measured": by the seconds of each layer for a batch on rank 0."""
    costs: Any = None
    if balance == "measured":
        model = unwrapped(model)
        costs = np.empty(len(model.layers) - 1)
        if run.comm.rank == 0:
            x, y = (model.device.array(each) for each in data.train.rows(0, min(data.examples, run.plan(data)[0])))
            few = Batch(x, y, len(x), epoch=0, step=0, index=np.arange(len(x)))
            costs[:] = measured_costs(model, few)
        run.bookkeeping.broadcast(costs)
        costs = costs.tolist()
    ranges = cut_layers(model, where.last + 1, costs)
    names = [[layer.name for layer in model.layers[each.start : each.stop]] for each in ranges]
    run.report(layers_of_stages=[[name for v in where.of(s) for name in names[v]] for s in range(comm.size)])
    return [ranges[v] for v in where.of(comm.rank)]


def tied_groups(
    run: Run, part: ModelPart, pipeline: Communicator, ends: Communicator | None
) -> list[tuple[Communicator | None, list[slice]]]:
    """Return (group of stages or None, slices of the part's vector) of tensors that these stages share; collective."""
    if not any(layer.tied for layer in part.model.layers):
        return []
    own, found = part.tied(), []
    with pipeline.inside("gather the names of tied tensors"):
        stages = pipeline.mpi.allgather(list(own))
    users = {name: [s for s, names in enumerate(stages) if name in names] for name in itertools.chain(*stages)}
    for where in dict.fromkeys(map(tuple, users.values())):
        shared = [at for name, at in own.items() if tuple(users[name]) == where]
        if where == (0, pipeline.size - 1):
            found.append((ends, shared))
        elif len(where) > 1:
            color = 0 if pipeline.rank in where else None
            found.append((run.until_end(pipeline.split(color, name="tied")), shared))
    return found
