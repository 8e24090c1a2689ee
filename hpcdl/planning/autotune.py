"""The fastest strategy, grid and schedule among those that fit into a rank's memory, by predicted examples per second.

    updates as of one rank     all-reduce, with and without overlap; ZeRO's stages; servers in rounds; pipelines, tensor
                               parallelism and grids of both (fitting.py)
    other updates              compressed gradients, by each method; local SGD; gossip; asynchronous servers

Other updates may need more steps for the same loss: `compare` shows how many; a forecast of time does not.

`fastest_schedule` is what --schedule auto takes: its times are those of a nominal machine, as only ratios count."""

import contextlib
import dataclasses
import math
from typing import Any, NamedTuple

from hpcdl.comm.compression import methods
from hpcdl.errors import UsageError, parse_bytes
from hpcdl.formatting import counted, size, table
from hpcdl.planning.cluster import Cluster
from hpcdl.planning.dry_run import cut_of
from hpcdl.planning.fitting import fits
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.memory import forecast as memory
from hpcdl.planning.scale_report import duration
from hpcdl.planning.step_time import Forecast, Read, forecast_step
from hpcdl.planning.time_report import rate
from hpcdl.strategies.description import Strategy
from hpcdl.strategies.pipeline_schedules import INTERLEAVED, SCHEDULES
from hpcdl.strategies.workload import Workload

SAME = ["train-allreduce", "train-allreduce --overlap", *(f"train-fully-sharded --stage {n}" for n in (1, 2, 3))]
SAME += ["train-parameter-server", "train-parameter-server --servers-on-workers"]
OTHER = (
    "train-local-sgd --sync-every 8",
    "train-local-sgd --sync-every 8 --compress topk",
    "train-gossip --topology ring",
    "train-parameter-server --consistency async",
)
GRIDS = 16  # most grids with a forecast, the first in the order of fitting.py
SHOWN = 16
VARIED = 2  # most grids with stages whose other schedules have a forecast, too
VARIANTS = ("zb-h1", "zb-v")
NOMINAL = Machine(1, Cluster(), flops=1e10, memory=1e10)  # with a node for each rank


class Candidate(NamedTuple):
    """A line that fits into memory. bytes: on its fullest rank. same_steps: if its updates equal those of one rank."""

    bytes: float
    same_steps: bool
    forecast: Forecast


def program_lines(ranks: int) -> list[tuple[str, bool]]:
    """Return (program and its own options, True if its updates equal those of one rank) of each strategy."""
    if ranks == 1:
        return [("train-sequential", True)]
    compressed = [f"train-allreduce --compress {name}" for name in methods()]
    return [(text, True) for text in SAME] + [(text, False) for text in (*OTHER, *compressed)]


def candidates(model: str, ranks: int, room: float, machine: Machine, read: Read) -> tuple[list[Candidate], list[str]]:
    """Return lines that fit into `room` bytes a rank, fastest first, and why others do not. model: shared options."""
    candidates, refused = [], []
    programs = [(f"{text} {model}", same) for text, same in program_lines(ranks)]
    for text, same in [*programs, *((text, True) for text in grid_lines(model, ranks, room, read))]:
        try:
            case = read(text, ranks)
            largest = max(rank.total for rank in memory(case))
            if largest <= room:
                candidates.append(Candidate(largest, same, forecast_step(case, machine, line=text)))
            else:
                refused.append(f"{text} needs {size(largest)} on a rank")
        except UsageError as error:
            refused.append(f"{text}: {error}")
    if not candidates and refused:
        refused.sort(key=lambda text: "needs" in text)
    return sorted(candidates, key=lambda each: -each.forecast.parts.rate), refused


def grid_lines(model: str, ranks: int, room: float, read: Read) -> list[str]:
    """Return the lines of grids that fit and cut the model; [] if the model has no layers."""
    if ranks == 1:
        return []
    lines: list[str] = []
    staged: list[str] = []
    with contextlib.suppress(UsageError):  # the model has no layers: every line reports it
        case = read(f"train-grid {model} --grid data={ranks} --microbatches 1", ranks)
        for fit in fits(case, int(min(room, 1 << 62))):
            line = f"train-grid {model} {fit.options}"
            if fit.shape[0] < ranks and len(lines) < GRIDS:
                lines.append(line)
            if fit.shape[1] > 1 and len(staged) < VARIED:
                staged.append(line)
            if len(lines) == GRIDS and len(staged) == VARIED:
                break
    for line in (f"{each} --schedule {name}" for each in staged for name in VARIANTS):
        with contextlib.suppress(UsageError):  # too few layers or micro-batches
            read(line, ranks)
            lines.append(line)
    return lines


def fastest_schedule(strategy: Strategy, options: Any, ranks: int, machine: Machine = NOMINAL) -> dict[str, Any]:
    """Return the options `schedule` and `chunks` with the shortest planned step among those that fit into --fit bytes a
    rank; of equally fast ones the one with the least memory. UsageError if none fits. pipedream, whose steps are
    others, is left out."""
    room = parse_bytes(options.fit) if options.fit else math.inf
    found, refused, least = [], "", math.inf
    for name in (each for each in SCHEDULES if each != "pipedream"):
        chosen = {"schedule": name, "chunks": max(2, options.chunks) if name in INTERLEAVED else 1}
        try:
            case = Workload(strategy, dataclasses.replace(options, fit="", **chosen), ranks)
            cut, first = cut_of(case), len(case.roles.data_servers)
            held = memory(case, [first + stage * cut.apart for stage in range(cut.shape[1])])
            largest = max(rank.total for rank in held)
            seconds = forecast_step(case, machine).parts.seconds
        except UsageError as error:
            refused = refused or str(error)
            continue
        least = min(least, largest)
        if largest <= room:
            found.append((round(seconds, 12), largest, chosen))
    if found:
        return min(found, key=lambda each: each[:2])[2]
    if least < math.inf:
        raise UsageError(f"--fit {options.fit}: no schedule needs less than {size(least)} on a rank; take more stages")
    raise UsageError(f"--schedule auto: {refused}")


def report(
    candidates: list[Candidate],
    refused: list[str],
    ranks: int,
    model: str,
    measured: list[float] | None = None,
    remark: str = "",
) -> list[str]:
    """Return the table of lines, without `model`, and the fastest command. measured: seconds a step of the first, which
    then stand in its order. remark: a line before the command."""
    if not candidates:
        why = f": {refused[0]}" if refused else ""
        return [f"nothing fits{why}", "take more ranks, more memory, or a smaller --batch-size"]
    if measured:
        order = sorted(range(len(measured)), key=measured.__getitem__)
        candidates, measured = [candidates[at] for at in order] + candidates[len(order) :], sorted(measured)
    rows = [["line", *(["measured", "error"] if measured else []), "a step", "examples/s", "steps", "largest rank"]]
    for i, each in enumerate(candidates[:SHOWN]):
        parts = each.forecast.parts
        steps = "same" if each.same_steps else "other"
        cells = [duration(parts.seconds), rate(parts.rate), steps, size(each.bytes)]
        if measured:
            there = i < len(measured)
            found = [duration(measured[i]), f"{100 * (parts.seconds / measured[i] - 1):+.0f} %"] if there else ["", ""]
            cells = found + cells
        rows.append([each.forecast.line.replace(f" {model}", ""), *cells])
    lines = [f"{ranks} ranks, {model}", *table(rows)]
    if len(candidates) > SHOWN:
        lines.append(f"{len(candidates) - SHOWN} more lines fit")
    if refused:
        lines.append(f"{counted(len(refused), 'line')} left out; the first: {refused[0]}")
    return [
        *lines,
        *[remark] * bool(remark),
        f"the fastest line: mpiexec -n {ranks} hpcdl {candidates[0].forecast.line}",
    ]
