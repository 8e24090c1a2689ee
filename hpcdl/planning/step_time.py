"""The forecast of a step's seconds on a machine, by parts, for any training line.

    step = compute + messages + bubble + queue + start

    compute     a gradient of the rank's rows, of the slowest rank, and the update (compute_time.py)
    messages    those that are not hidden behind computing (message_time.py)
    bubble      a pipeline's stage waits for others (cut_time.py)
    queue       a worker waits for others at the servers' ports
    start       drawing a batch, and what a step of this program costs beyond the other parts

What a strategy computes and sends in a step, it says itself (hpcdl/strategies/description.py: StepCost, Cut). Here that
becomes seconds:

    calls       one after another; hidden_by: of the time that overlaps with that computing the share `progress` of the
                machine is hidden
    buckets     bucket i begins when it is complete and bucket i - 1 has arrived
    service     of parameter servers (message_time.py): in rounds W - 1 other workers come first; else a closed queue
                (kernels/queues.py)

A step is what `--steps` counts; of async servers it is one worker's. (Li et al., "PyTorch distributed", VLDB 2020)
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels.queues import queue
from hpcdl.models.model import layers_of
from hpcdl.planning.compute_time import ComputeTime
from hpcdl.planning.cut_time import cut_parts
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.message_time import RankGroup, call_seconds, service_seconds
from hpcdl.planning.parts import StepParts
from hpcdl.strategies.description import StepCost
from hpcdl.strategies.workload import Workload

ASLEEP = " asleep"  # suffix for programs that pretend to compute: ranks wake late, and leave their cores to others
QUEUED = 64  # simulated steps of a queue, after as many that fill it


class StepForecast(NamedTuple):
    """The forecast of a step. exact: True if the machine has measured the model on the same number of ranks."""

    parts: StepParts
    exact: bool


def forecast_step(case: Workload, machine: Machine, start: float | None = None) -> StepForecast:
    """Return the forecast of a workload's step. start: seconds; default: of the machine. UsageError if unknown."""
    refuse_unknown(case)
    computing = ComputeTime(case, machine)
    start = start_seconds(case, machine) if start is None else start
    if case.strategy.step is None:
        return StepForecast(cut_parts(case, machine, computing, start), computing.exact)
    step = case.strategy.step(case)
    return StepForecast(
        (served_parts if step.service else parts_of)(case, machine, computing, start, step), computing.exact
    )


def refuse_unknown(case: Workload) -> None:
    """Raise UsageError for a workload without a forecast of time."""
    if not (case.strategy.step or case.strategy.cut):
        raise UsageError(f"of {case.program} no time is known")
    if case.options.device != "cpu":
        raise UsageError("--device cuda: no time is known of a GPU; leave it out")


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
    """Return the parts of a step whose ranks all compute, and call each other."""
    forward, backward = computed(computing, step)
    each = [call.times * call_seconds(case, machine, call) for call in step.calls]
    alone, hidden = sum(each), 0.0
    if step.buckets:
        ready = bucket_ready_times(case, computing, step.buckets, step.drawn, forward, backward)
        hidden = machine.progress * max(0.0, alone - exposed_seconds(ready, each, forward + backward))
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
    """Return the seconds after which each bucket's gradient is complete."""
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
    """Return the seconds of the buckets' all-reduces, one by one, after computing has ended."""
    now = 0.0
    for complete, seconds in zip(ready, each, strict=True):
        now = max(complete, now) + seconds
    return max(0.0, now - computed)


def served_parts(case: Workload, machine: Machine, computing: ComputeTime, start: float, step: StepCost) -> StepParts:
    """Return the parts of a step of workers that share the servers' ports."""
    service, group = step.service, RankGroup(machine, case.size, 1, case.ranks, case.options.allreduce)
    assert service is not None
    serving, answer, alone = service_seconds(
        group, service, step.updates * computing.update(1 / service.servers), start
    )
    compute, draw = sum(computed(computing, step)), computing.draw(step.drawn)
    if service.rounds:
        waits = (service.workers - 1) * (serving + answer)
        return StepParts(compute, alone, 0.0, waits, draw, 0.0, step.examples)
    taken = np.full((service.workers, 2 * QUEUED), compute + draw)
    half = (serving + answer) / 2
    whole, first = (queue(taken[:, :n], half, group.latency, service.bound)[0] for n in (2 * QUEUED, QUEUED))
    cycle = (whole - first) / QUEUED
    parts = StepParts(compute, alone, 0.0, max(0.0, cycle - compute - draw - alone), draw, 0.0, step.examples)
    return parts.per_worker(service.workers) if service.apart else parts
