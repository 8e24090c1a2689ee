"""Seconds of a step of a partitioned model: pipelines, tensor parallelism, ZeRO's stages, and grids of them.

    messages         a dry run of a rank's step (dry_run.py) records every message: operation and bytes; messages that
                     end the step along the data axis are counted apart
    tensor t         each layer takes a + b rows / t; undivided it takes a + b rows
    context c        the same with c, as each rank has 1/c of the tokens; messages of the ring count in full
    expert e         as data, of which it has a share; the messages of experts' rows count in full
    pipeline p, m    the schedule's own actions (pipeline_time.py) on the actual stages, with a message between two
                     stages; at least the computing of all stages, divided by their number of cores
        equal stages, no messages     step (m + p - 1) / m of a stage's computing; bubble (p-1) / (m+p-1) of the step
        B and W apart                 less (strategies/zero_bubble.py); W: the layers' weight gradients, by flops, bytes
        pipedream                     the slowest stage's forward, backward and update: the pipeline fills only once
    muon             messages to and from the owners of matrices (parallel/gathered_matrices.py), one after another
    data d           stage 0: an all-reduce; 1: reduce-scatter, all-gather; 2 and 3: layer by layer, in the actions

Messages that gather layers during computing count in full: few networks progress outside of MPI calls. The messages of
ZeRO's stage 1 are all in flight at once, so their latencies overlap."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from hpcdl.models.balance import balanced, cut_layers
from hpcdl.models.layout import INPUTS_SECOND, Tensor
from hpcdl.models.part import ModelPart
from hpcdl.planning.compute_time import ComputeTime, Seconds, StepParts
from hpcdl.planning.dry_run import Messages, cut_of, dry_run_step
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.message_time import RankGroup
from hpcdl.planning.pipeline_time import ActionTimes, last
from hpcdl.strategies.description import Cut
from hpcdl.strategies.pipeline_schedules import actions_of, placement
from hpcdl.strategies.workload import Workload


def messages(case: Workload, rank: int, cut: Cut) -> Messages:
    """Return the messages (operation, bytes) of a rank's step, by the axis of the grid."""
    found: Messages = {}
    dry_run_step(case, rank, cut, None, found)
    return found


def sequential_seconds(group: RankGroup, sent_messages: list[tuple[str, int]]) -> float:
    """Return the seconds of these messages, sent one after another."""
    return sum(getattr(group, operation)(bytes) for operation, bytes in sent_messages)


def concurrent_seconds(group: RankGroup, sent_messages: list[tuple[str, int]]) -> float:
    """Return the seconds of collectives that are all in flight at once: their latencies overlap."""
    steps: dict[str, list[int]] = {}
    for operation, bytes in sent_messages:
        steps.setdefault(operation, []).append(group.chunk_steps(bytes))
    spared = sum(sum(each) - max(each) for each in steps.values()) * group.latency
    longest = max((getattr(group, operation)(bytes) for operation, bytes in sent_messages), default=0.0)
    return max(longest, sequential_seconds(group, sent_messages) - spared)


def cut_parts(case: Workload, machine: Machine, computing: ComputeTime, start: float) -> StepParts:
    """Return the seconds of a step by part, if the program cuts the model. start: seconds beyond the other parts."""
    cut = cut_of(case)
    _, stages, parts = cut.shape
    how = case.ranks, case.options.allreduce
    apart = cut.expert * parts if stages == 1 else stages * cut.apart  # ranks from a copy to the next one
    data, tensor = RankGroup(machine, cut.copies, apart, *how), RankGroup(machine, parts, 1, *how, shared=False)
    rows, along = case.share(0, cut.shares), {"tensor": tensor, "expert": RankGroup(machine, cut.expert, parts, *how)}
    along["context"] = RankGroup(machine, cut.context, parts * cut.expert, *how)
    draw = computing.draw(rows)
    if not cut.schedule:
        sent_messages = messages(case, 0, cut)
        on_data = (concurrent_seconds if cut.zero == 1 else sequential_seconds)(data, sent_messages["data"])
        sent = on_data + layer_seconds(along, sent_messages)
        sent += matrix_seconds(machine, cut, case.ranks, sent_messages)
        forward, backward = tensor_gradient_seconds(computing, rows, cut.sharing)
        compute = forward + backward + computing.update(updated_share(case.model, cut), matrix_share(case.model, cut))
        return StepParts(compute, sent + clipping_seconds(case, machine), 0.0, 0.0, start + draw, 0.0, case.batch)
    return pipeline_parts(case, machine, computing, start, cut, data, along)


def layer_seconds(along: dict[str, RankGroup], sent_messages: Messages) -> float:
    """Return the seconds of the messages within layers, by the axes of these groups."""
    return sum(sequential_seconds(group, sent_messages.get(axis, [])) for axis, group in along.items())


def updated_share(model: Any, cut: Cut) -> float:
    """Return the share of the parameters that a rank updates."""
    owned = owned_share(model.layout.tensors.values(), cut)
    return owned / (cut.shape[1] * cut.shape[2] * (cut.copies if cut.zero else 1))


def matrix_share(model: Any, cut: Cut) -> float:
    """Return the share of Muon's matrices that a rank orthogonalizes: ranks share all of a stage if a matrix is cut."""
    _, stages, parts = cut.shape
    if cut.zero or parts > 1:
        return 1 / (stages * parts * cut.copies * cut.expert)
    return owned_share(model.layout.hidden, cut) / stages


def owned_share(tensors: Iterable[Tensor], cut: Cut) -> float:
    """Return the share of these tensors that a rank has along the axis expert: all but other ranks' experts."""
    sizes = [(math.prod(each.shape), cut.expert if each.hidden == INPUTS_SECOND else 1) for each in tensors]
    return sum(size / ranks for size, ranks in sizes) / max(1, sum(size for size, _ in sizes))


def matrix_seconds(machine: Machine, cut: Cut, ranks: int, sent_messages: Messages) -> float:
    """Return the seconds to gather matrices on their owners, and to hand them back; 0 if none is cut."""
    group = RankGroup(machine, cut.shape[0] * cut.shape[1] * cut.apart, 1, ranks)
    return sequential_seconds(group, sent_messages.get("matrices", []))


def clipping_seconds(case: Workload, machine: Machine) -> float:
    """Return the seconds to sum the norm of the gradient over all ranks."""
    return RankGroup(machine, case.size, 1, case.ranks).all_reduce(8, "tree") if case.options.clip_norm else 0.0


def tensor_gradient_seconds(computing: ComputeTime, rows: float, parts: int) -> Seconds:
    """Return the seconds (forward, backward) of `rows` rows, in --accumulate parts, if `parts` ranks share a layer."""
    if parts == 1:
        return computing.accumulated(rows)
    pieces = max(1, min(computing.case.options.accumulate, round(rows)))
    each = computing.layers(rows / pieces / parts)
    forward, backward = (sum(pair[k] for pair in each) for k in (0, 1))
    whole = computing.delayed(1.0, forward + backward)
    return pieces * whole / 3, pieces * whole * 2 / 3


def pipeline_parts(
    case: Workload,
    machine: Machine,
    computing: ComputeTime,
    start: float,
    cut: Cut,
    data: RankGroup,
    within: dict[str, RankGroup],
) -> StepParts:
    """Return the parts of a pipeline's step. data: group of replicas. within: groups that share layers, by axis. start:
    of an action."""
    stages = cut.shape[1]
    many, once = max(1, cut.microbatches), cut.schedule in ("one batch", "pipedream")
    pieces = max(1, case.options.accumulate) if cut.schedule == "one batch" else 1
    rows = case.share(0, cut.shares) / (pieces if once else many)
    many = 1 if once else many
    sharing = machine.sharing(case.ranks)
    schedule = "naive" if cut.schedule == "one batch" else cut.schedule
    where = placement(cut.schedule, stages, cut.chunks)
    forward, backward, weights = stage_seconds(case, computing, cut, rows)
    ends = [place * cut.apart for place in sorted({0, stages // 2, stages - 1})]
    sent_messages = [messages(case, rank, cut) for rank in ends]
    ending = 1 if cut.zero == 0 and cut.copies > 1 else 0
    actions = many * where.chunks * pieces
    on_data = max(sequential_seconds(data, each["data"][: len(each["data"]) - ending]) for each in sent_messages)
    closing = max(sequential_seconds(data, each["data"][len(each["data"]) - ending :]) for each in sent_messages)
    if cut.zero == 1:
        on_data, closing = 0.0, max(concurrent_seconds(data, each["data"]) for each in sent_messages)
    along = (max(layer_seconds(within, each) for each in sent_messages) + on_data) / actions
    longest = max((bytes for each in sent_messages for _, bytes in each["pipeline"]), default=0)
    hop = RankGroup(machine, stages, cut.apart, case.ranks).message(longest) if stages > 1 else 0.0
    forward, backward = forward + along / 2 + start, backward + along / 2 + start
    update = computing.update(updated_share(case.model, cut), matrix_share(case.model, cut))
    closing += max(matrix_seconds(machine, cut, case.ranks, each) for each in sent_messages)
    closing += max(sequential_seconds(within["expert"], each.get("common", [])) for each in sent_messages)
    closing += tied_seconds(case, machine, cut) + clipping_seconds(case, machine)
    draw = computing.draw(rows * many * pieces)
    virtual = forward + backward
    stage = np.array([sum(virtual[v] for v in where.of(place)) for place in range(stages)])  # of a micro-batch
    own = float(stage.max()) * many * pieces - (along + 2 * start) * actions
    if cut.schedule == "pipedream":
        whole = alone = float(stage.max())
        whole += 2 * hop if stages > 1 else 0.0
    else:
        plan = [list(actions_of(schedule, stages, place, many, cut.chunks)) for place in range(stages)]
        times, together = ActionTimes(forward[None], backward[None], weights[None]), waits_for_all(case, cut)
        whole, alone = (pieces * float(last(plan, times, each, where, together)[0]) for each in (hop, 0.0))
    if not computing.pretended:  # stages that wait leave their core to others
        whole, alone, own, update = (each / sharing for each in (whole, alone, own, update))
        on_node = min(case.ranks, machine.links.ranks_per_node)
        busy = float(stage.sum()) * many * pieces / sharing * on_node / stages / machine.cores
        whole, alone = max(whole, busy), max(alone, busy)
    begun = 2 * start * actions
    bubble = max(0.0, alone - own - begun - along * actions)
    sent = whole - alone + along * actions + closing
    return StepParts(own + update, sent, bubble, 0.0, begun + draw, 0.0, case.batch)


def waits_for_all(case: Workload, cut: Cut) -> bool:
    """Return True if the update of the first stage waits for the last one, so that no stage begins the next step."""
    where = placement(cut.schedule, cut.shape[1], cut.chunks)
    apart = where.place(0)[0] != where.place(where.last)[0]
    return bool(case.options.clip_norm) or (apart and any(layer.tied for layer in case.model.layers))


def stage_seconds(
    case: Workload, computing: ComputeTime, cut: Cut, rows: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the seconds of a micro-batch by virtual stage: forward, backward, and of it the weight gradients."""
    where = placement(cut.schedule, cut.shape[1], cut.chunks)
    each = computing.layers(rows / cut.sharing)
    costs = None
    if getattr(case.options, "balance", "parameters") == "measured":
        costs = [sum(pair) for pair in each[:-1]]
        costs[-1] += sum(each[-1])
        balanced(costs, where.last + 1)
    ranges = cut_layers(case.model, where.last + 1, costs)
    forward = [sum(each[i][0] for i in layers) for layers in ranges]
    backward = [sum(each[i][1] for i in layers) for layers in ranges]
    weights = [sum(each[i][1] * computing.apart(i, rows / cut.sharing) for i in layers) for layers in ranges]
    if cut.recompute:
        backward = [a + b for a, b in zip(forward, backward, strict=True)]
    back = 1.0 if cut.recompute else 2 / 3
    first, second, third = (
        np.array([computing.delayed(fraction / where.chunks, each) for each in seconds])
        for fraction, seconds in ((1 / 3, forward), (back, backward), (1 / 3, weights))
    )
    return first, second, third


def tied_seconds(case: Workload, machine: Machine, cut: Cut) -> float:
    """Return the seconds to sum the gradients of weights that the first and the last stage share."""
    stages = cut.shape[1]
    if stages == 1 or not any(layer.tied for layer in case.model.layers):
        return 0.0
    where = placement(cut.schedule, stages, cut.chunks)
    ranges = cut_layers(case.model, where.last + 1)
    held = ModelPart(case.model, [ranges[v] for v in where.of(stages - 1)]).copies
    bytes = sum(math.prod(tensor.shape) for tensor in held) * case.dtype.itemsize / cut.shape[2]
    ends = RankGroup(machine, 2, (stages - 1) * cut.apart, case.ranks, case.options.allreduce, False)
    return ends.all_reduce(bytes)
