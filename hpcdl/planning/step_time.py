"""The forecast of a step's seconds on a machine, by parts, for any training line.

    step = compute + messages + bubble + queue + start

    compute     a gradient of the rank's rows, of the slowest rank, and the update (compute_time.py)
    messages    those that are not hidden behind computing (message_time.py)
    bubble      a pipeline's stage waits for others (cut_time.py)
    queue       a worker waits for others at the servers' ports
    start       drawing a batch, and what a step of this program costs beyond the other parts

    all-reduce  one of K bytes; --overlap: bucket i begins when it is complete and bucket i - 1 has arrived; of the time
                that overlaps with the backward pass the share `progress` of the machine is hidden
    local SGD   one of K bytes in H steps, and one per optimizer vector where these are averaged
    gossip      an exchange of K bytes with a rank's neighbours; hidden like overlap where a rank computes meanwhile
    servers     W workers, S servers, n = K/S, service s = n/B + n/a + update/S + start, answer n/B:
                bsp: 2 L + s + n/B + (W-1) (s + n/B); ssp, async: a closed queue (kernels/queues.py)

A step is what `--steps` counts; of async servers it is one worker's.
(Sources: those of the strategies; for the overlap Li et al., "PyTorch distributed", VLDB 2020)
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hpcdl.comm.gossip.mixing import exact_factors, matrices
from hpcdl.comm.gossip.topology import topology
from hpcdl.comm.overlap import MIB, buckets
from hpcdl.errors import UsageError
from hpcdl.kernels.queues import queue
from hpcdl.models.model import layers_of
from hpcdl.planning.compute_time import ComputeTime
from hpcdl.planning.cut_time import cut_parts
from hpcdl.planning.dry_run import CUT_PROGRAMS
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.message_time import COMPRESSED, RankGroup
from hpcdl.planning.parts import StepParts
from hpcdl.planning.workload import Workload
from hpcdl.strategies.gossip import batches_of

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
    parts = FORECASTS.get(case.program, cut_parts)(case, machine, computing, start)
    return StepForecast(parts, computing.exact)


def refuse_unknown(case: Workload) -> None:
    """Raise UsageError for a workload without a forecast of time."""
    if case.program not in (*FORECASTS, *CUT_PROGRAMS):
        known = ", ".join(sorted((*FORECASTS, *CUT_PROGRAMS)))
        raise UsageError(f"of {case.program} no time is known; there are {known}")
    if getattr(case.options, "sparse_push", False):
        raise UsageError("--sparse-push: how much a batch touches is in the data, and no time is foretold of it")
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
    options, way = case.options, ""
    if case.program == "train-parameter-server":
        way = f" {options.consistency}"
    elif case.program == "train-gossip" and options.method == "adpsgd":
        way = f" {options.method}"
    elif case.program == "train-allreduce" and options.overlap:
        way = " overlap"
    return case.program + way + (ASLEEP if options.pretend_compute else "")


def calibrate_start(case: Workload, machine: Machine, seconds: float) -> float:
    """Return the `start` for which the forecast of a step is `seconds`; 0 if the forecast is longer anyway."""
    low, high = 0.0, seconds
    if forecast_step(case, machine, low).parts.seconds >= seconds:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if forecast_step(case, machine, middle).parts.seconds < seconds else (low, middle)
    return low


# -- strategies that hold the model whole ------------------------------------------------------------------------------


def training_group(case: Workload, machine: Machine) -> RankGroup:
    """Return the group of all training ranks."""
    return RankGroup(machine, case.size, 1, case.ranks, case.options.allreduce)


def vector_bytes(case: Workload) -> float:
    """Return the bytes of a vector of all parameters."""
    return float(case.length * case.dtype.itemsize)


def largest_share(case: Workload) -> int:
    """Return the rows of the rank with the largest share of a batch."""
    return case.share(0, len(case.roles.workers))


def sequential(case: Workload, machine: Machine, computing: ComputeTime, start: float) -> StepParts:
    """Return the parts of a step without messages."""
    rows = case.batch
    compute = sum(computing.accumulated(rows)) + computing.update()
    return StepParts(compute, 0.0, 0.0, 0.0, start + computing.draw(rows), 0.0, rows)


def all_reduce(case: Workload, machine: Machine, computing: ComputeTime, start: float) -> StepParts:
    """Return the parts of a step with an all-reduce after the backward pass, or in buckets that overlap with it."""
    options, rows, group = case.options, largest_share(case), training_group(case, machine)

    def exchange(bytes: float) -> float:
        if options.compress in COMPRESSED:
            return group.compressed(bytes, options.compress)
        return group.all_reduce(bytes)

    forward, backward = computing.accumulated(rows)
    alone, hidden = exchange(vector_bytes(case)), 0.0
    if options.overlap:
        cut = buckets(case.model.layout, options.bucket_mib * MIB)
        item = case.dtype.itemsize
        each = [exchange((part.stop - part.start) * item) for part in cut]
        alone = sum(each)
        ready = bucket_ready_times(case, computing, cut, rows, forward, backward)
        hidden = machine.progress * max(0.0, alone - exposed_seconds(ready, each, forward + backward))
    compute = forward + backward + computing.update()
    return StepParts(compute, alone - hidden, 0.0, 0.0, start + computing.draw(rows), hidden, case.batch)


def bucket_ready_times(
    case: Workload, computing: ComputeTime, cut: list[slice], rows: float, forward: float, backward: float
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


def local_sgd(case: Workload, machine: Machine, computing: ComputeTime, start: float) -> StepParts:
    """Return the parts of a step with an average of the parameters every H steps."""
    options, rows, group = case.options, largest_share(case), training_group(case, machine)
    vectors = 1 + (len(case.vectors) if options.local_momentum == "average" else 0)
    messages = vectors * group.all_reduce(vector_bytes(case)) / options.sync_every
    outer = computing.update() / options.sync_every if options.outer != "average" else 0.0
    compute = sum(computing.accumulated(rows)) + computing.update() + outer
    return StepParts(compute, messages, 0.0, 0.0, start + computing.draw(rows), 0.0, case.batch)


def gossip(case: Workload, machine: Machine, computing: ComputeTime, start: float) -> StepParts:
    """Return the parts of a step with exchanges after the update, or while the gradient is computed."""
    options, rows, group = case.options, largest_share(case), training_group(case, machine)
    forward, backward = computing.accumulated(rows)
    compute = forward + backward + computing.update()
    begun = start + computing.draw(rows)
    bytes, method = vector_bytes(case), options.method
    if method == "adpsgd":  # x to one, the mean back; no rank waits for another's gradient
        alone = 2 * group.message(bytes) if case.size > 1 else 0.0
        hidden = machine.progress * min(alone, backward)
        return StepParts(compute, alone - hidden, 0.0, 0.0, begun, hidden, case.batch)
    graph = topology(options.topology, case.size, options.seed)
    phase = batches_of(method, graph, options.mixing, options.phase)
    if method == "defacto":
        rounds = [partners(factor) for factor in exact_factors(graph)]
        messages = sum(group.exchange(bytes, each) for each in rounds) / phase
        return StepParts(compute, messages, 0.0, 0.0, begun, 0.0, case.batch)
    of_step = matrices(graph, options.mixing)
    period = min(graph.period or QUEUED, QUEUED)
    vectors = 2 if method in ("gradient-tracking", "detag") else 1
    alone = sum(group.exchange(vectors * bytes, partners(of_step(step))) for step in range(period)) / period
    hidden = 0.0 if method == "adapt-then-combine" else machine.progress * min(alone, forward + backward)
    return StepParts(compute, alone - hidden, 0.0, 0.0, begun, hidden, case.batch)


def partners(matrix: np.ndarray) -> int:
    """Return the largest number of partners of a rank."""
    return int(max((np.count_nonzero(row) - bool(row[i]) for i, row in enumerate(matrix)), default=0))


def servers(case: Workload, machine: Machine, computing: ComputeTime, start: float) -> StepParts:
    """Return the parts of a step of workers that share the servers' ports."""
    options, group = case.options, training_group(case, machine)
    workers = case.size if options.servers_on_workers else len(case.roles.workers)
    holders = case.size if options.servers_on_workers else options.servers
    clocked, rows = options.chosen.clocked, case.share(0, workers) if options.chosen.clocked else case.batch
    bytes = vector_bytes(case) / holders
    latency = group.latency if holders + workers > 1 else 0.0
    wire = max(0.0, group.message(bytes) - latency)
    update = computing.update(1 / holders)
    service = wire + group.links.add(bytes) + update + start
    if options.chosen.in_rounds:  # the updates of a round are one
        service -= update
    own = holders * wire  # of a worker's port, each way
    alone = 2 * latency + max(service, own) + own + (update if options.chosen.in_rounds else 0.0)
    forward, backward = computing.accumulated(rows)
    compute, draw = forward + backward, computing.draw(rows)
    if options.chosen.in_rounds:
        return StepParts(compute, alone, 0.0, (workers - 1) * (service + wire), draw, 0.0, case.batch)
    taken = np.full((workers, 2 * QUEUED), compute + draw)
    bound = options.staleness if options.consistency == "ssp" else math.inf
    (whole, _), (first, _) = (queue(taken[:, :n], (service + own) / 2, latency, bound) for n in (2 * QUEUED, QUEUED))
    cycle = (whole - first) / QUEUED
    waits = max(0.0, cycle - compute - draw - alone)
    own_parts = StepParts(compute, alone, 0.0, waits, draw, 0.0, case.batch)
    return own_parts if clocked else own_parts.per_worker(workers)


FORECASTS: dict[str, Callable[[Workload, Machine, ComputeTime, float], StepParts]] = {
    "train-sequential": sequential,
    "train-allreduce": all_reduce,
    "train-local-sgd": local_sgd,
    "train-gossip": gossip,
    "train-parameter-server": servers,
}
