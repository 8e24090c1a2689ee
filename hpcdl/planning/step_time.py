"""The forecast of a step's seconds on a machine, by parts, for any training line.

    step = compute + messages + bubble + queue + start

    compute     a gradient of the slowest rank's rows, and the update (compute_time.py)
    messages    seconds of messages that are not hidden behind computing (message_time.py)
    bubble      a pipeline's stage waits for others (cut_time.py)
    queue       a worker waits for others at the servers' ports
    start       drawing a batch, and what a step of this program costs beyond the other parts

The parts follow from what the strategy declares of a step (hpcdl/strategies/description.py: Cut, or StepCost):

    calls       one after another; the machine's share `progress` of their overlap with `hidden_by` is hidden
    buckets     bucket i begins when it is complete and bucket i - 1 has arrived
    service     of parameter servers (message_time.py): in rounds W - 1 other workers come first; else a closed queue

A step is what `--steps` counts; of async servers it is one worker's. (Li et al., "PyTorch distributed", VLDB 2020)"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels.queues import queue
from hpcdl.models.model import layers_of
from hpcdl.planning.compute_time import ComputeTime, StepParts
from hpcdl.planning.cut_time import cut_parts
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.message_time import RankGroup, call_seconds, service_seconds
from hpcdl.strategies.description import StepCost
from hpcdl.strategies.workload import Workload

ASLEEP = " asleep"  # suffix for programs that pretend to compute: ranks wake late, and leave their cores to others
Read: TypeAlias = Callable[[str, int], Workload]  # (line, ranks) -> workload
QUEUED = 64  # simulated steps of a queue, after as many that fill it


class Forecast(NamedTuple):
    """The forecast of a line's step. exact: the machine has measured the model on this number of ranks."""

    line: str
    case: Workload
    parts: StepParts
    exact: bool


def forecast_step(case: Workload, machine: Machine, start: float | None = None, line: str = "") -> Forecast:
    """Return the forecast of a workload's step; UsageError if there is none. start: seconds; None: the machine's."""
    refuse_unknown(case)
    computing = ComputeTime(case, machine)
    start = start_seconds(case, machine) if start is None else start
    if case.strategy.step is None:
        parts = cut_parts(case, machine, computing, start)
    else:
        step = case.strategy.step(case)
        parts = (served_parts if step.service else parts_of)(case, machine, computing, start, step)
    return Forecast(line, case, parts, computing.exact)


def refuse_unknown(case: Workload) -> None:
    """Raise UsageError if there is no forecast of time for the workload."""
    if not (case.strategy.step or case.strategy.cut):
        raise UsageError(f"there is no forecast of the time of {case.program}")
    if case.options.device != "cpu":
        raise UsageError("--device cuda: there is no forecast of the time on a GPU; leave the option out")


def start_seconds(case: Workload, machine: Machine) -> float:
    """Return the `start` of the program: measured on the nearest number of ranks, else the machine's."""
    for name in (program_name(case), program_name(case).removesuffix(ASLEEP)):
        sections = [each for each in machine.measured if name in each.programs]
        if sections:
            return min(sections, key=lambda each: abs(each.ranks - case.ranks)).programs[name]
    return machine.start


def program_name(case: Workload) -> str:
    """Return the program's name in a machine sheet, with the mode that changes its `start`."""
    mode = case.strategy.mode(case.options)
    return f"{case.program} {mode}".rstrip() + (ASLEEP if case.options.pretend_compute else "")


def calibrate_start(case: Workload, machine: Machine, seconds: float) -> float:
    """Return the `start` for which the forecast of a step is `seconds`; 0 if the forecast is longer anyway."""
    low, high = 0.0, seconds
    if forecast_step(case, machine, low).parts.seconds >= seconds:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if forecast_step(case, machine, middle).parts.seconds < seconds else (low, middle)
    return low


def parts_of(case: Workload, machine: Machine, computing: ComputeTime, start: float, step: StepCost) -> StepParts:
    """Return the parts of a step in which all ranks compute and communicate with each other."""
    forward, backward = computed(computing, step)
    each = [call.times * call_seconds(case, machine, call) for call in step.calls]
    alone, hidden = sum(each), 0.0
    if step.buckets:
        ready = bucket_ready_times(case, computing, step.buckets, step.drawn, forward, backward)
        count = len(each) // len(step.buckets)  # calls of a bucket
        reduced = [sum(each[i : i + count]) for i in range(0, len(each), count)]
        hidden = machine.progress * max(0.0, alone - exposed_seconds(ready, reduced, forward + backward))
    elif step.hidden_by:
        hidden = machine.progress * min(alone, backward + (forward if step.hidden_by == "gradient" else 0.0))
    compute = forward + backward + step.updates * computing.update()
    return StepParts(compute, alone - hidden, 0.0, 0.0, start + computing.draw(step.drawn), hidden, step.examples)


def computed(computing: ComputeTime, step: StepCost) -> tuple[float, float]:
    """Return the seconds (forward, backward) of a step's gradients."""
    each = [(times, computing.accumulated(rows)) for rows, times in step.gradients if times]
    forward, backward = (sum(times * seconds[k] for times, seconds in each) for k in (0, 1))
    return forward, backward


def bucket_ready_times(
    case: Workload, computing: ComputeTime, cut: Sequence[slice], rows: float, forward: float, backward: float
) -> list[float]:
    """Return the seconds after which the gradient of each bucket is complete. cut: the buckets' slices."""
    done, total = 0.0, 1.0
    slices = dict(case.model.layout.layer_slices)
    names = [layer.name for layer in layers_of(case.model) or []]
    if computing.pretended > 0 or not names:  # pretended in proportion to the elements
        return [forward + backward * (1 - part.start / case.length) for part in cut]
    each = [pair[1] for pair in computing.layers(rows)]
    total = sum(each) or 1.0
    passed: dict[int, float] = {}  # by start of a layer's slice: the share of the backward pass until then
    for name, seconds in zip(reversed(names), reversed(each), strict=True):
        done += seconds
        if slices.get(name) is not None:
            passed[slices[name].start] = done / total
    return [forward + backward * passed.get(part.start, 1.0) for part in cut]


def exposed_seconds(ready: list[float], each: list[float], computed: float) -> float:
    """Return how many seconds the buckets' all-reduces, one after another, go on after computing has ended."""
    now = 0.0
    for complete, seconds in zip(ready, each, strict=True):
        now = max(complete, now) + seconds
    return max(0.0, now - computed)


def served_parts(case: Workload, machine: Machine, computing: ComputeTime, start: float, step: StepCost) -> StepParts:
    """Return the parts of a step of workers that share the servers' ports."""
    service, group = step.service, RankGroup(machine, case.size, 1, case.ranks, case.options.allreduce)
    assert service is not None
    updating = step.updates * computing.update(1 / service.servers)
    serving, answer, alone = service_seconds(group, service, updating, start)
    compute, draw = sum(computed(computing, step)), computing.draw(step.drawn)
    if service.rounds:
        waits = (service.workers - 1) * (serving + answer)
        return StepParts(compute, alone, 0.0, waits, draw, 0.0, step.examples)
    taken = np.full((service.workers, 2 * QUEUED), compute + draw)
    half = (serving + answer) / 2
    whole, first = (queue(taken[:, :n], half, group.latency, service.bound)[0] for n in (2 * QUEUED, QUEUED))
    cycle = (whole - first) / QUEUED
    at_once = service.workers if service.apart else 1  # workers that take steps of their own: a step is any worker's
    waits = max(0.0, cycle - compute - draw - alone)
    computing_each, messages, queued, drawing = (each / at_once for each in (compute, alone, waits, draw))
    return StepParts(computing_each, messages, 0.0, queued, drawing, 0.0, step.examples)
