"""Tables of memory forecasts: named configurations, ranks, forecast and measurement of a run, grids that fit."""

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcdl.comm.grid import AXES
from hpcdl.errors import UsageError
from hpcdl.formatting import counted, size, table
from hpcdl.launch.command_lines import read_command
from hpcdl.launch.config_migration import config_of
from hpcdl.launch.option_parser import resumed
from hpcdl.memory import KINDS
from hpcdl.models.configurations import ADAM_BYTES, CONFIGURATIONS
from hpcdl.planning.fitting import fits
from hpcdl.planning.memory import OTHER_KINDS, RankMemory, forecast
from hpcdl.planning.summaries import summary_of
from hpcdl.plugins import names_of, refuse_untrusted
from hpcdl.programs import of_strategy
from hpcdl.runs.options import kinds_of
from hpcdl.strategies.workload import Workload

SHOWN = 16  # most printed ranks and grids


def configurations() -> list[str]:
    """Return the table of configurations: parameters as counted and as published, at 16 bytes each."""
    rows = [["model", "layers", "width", "heads", "counted", "x 16 bytes", "nominal", "x 16 bytes", "slide's"]]
    for name, each in CONFIGURATIONS.items():
        count = each.parameters
        state = f"{ADAM_BYTES * count / 1e9:,.2f} GB"
        nominal = f"{each.nominal:g} x 10^9"
        product = f"{ADAM_BYTES * each.nominal:,.2f} GB"
        slide = "-" if each.slide is None else f"{each.slide:,g} GB"
        numbers = map(str, (each.layers, each.width, each.heads))
        rows.append([name, *numbers, f"{count:,}", state, nominal, product, slide])
    return table(rows)


def configuration(name: str) -> list[str]:
    """Return a configuration's source, and the table of its layers, equal blocks together. UsageError: unknown name."""
    if name not in CONFIGURATIONS:
        raise UsageError(
            f"--model {name} is none of the named configurations ({', '.join(CONFIGURATIONS)}); for another model "
            'give the line that trains it, as in hpcdl plan memory "-n 4: train-allreduce --model mlp:256"'
        )
    chosen, rows = CONFIGURATIONS[name], [["layer", "parameters", "x 16 bytes"]]
    together: dict[str, int] = {}
    for layer, count in chosen.by_layer():
        block, _, kind = layer.partition(".")
        name = f"{kind} of {chosen.layers} blocks" if kind else block
        together[name] = together.get(name, 0) + count
    together["all"] = chosen.parameters
    for layer, count in together.items():
        rows.append([layer, f"{count:,}", f"{ADAM_BYTES * count:,}"])
    return [chosen.source, *table(rows)]


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return ranks in the form "0-2, 5"."""
    runs = itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0])
    own = [[rank for _, rank in run] for _, run in runs]
    return ", ".join(f"{each[0]}-{each[-1]}" if len(each) > 1 else f"{each[0]}" for each in own)


def workload_report(case: Workload) -> list[str]:
    """Return the table of a workload's memory, ranks of equal memory in one line."""
    few = case.ranks <= SHOWN * 4
    only = None if few else sorted({0, 1, case.ranks // 2, case.ranks - 2, case.ranks - 1})
    ranks, item = forecast(case, only), case.dtype.itemsize
    text = f"{case.program} on {counted(case.ranks, 'rank')}, {case.spec}, {counted(case.length, 'parameter', ',')}"
    lines = [f"{text}, {case.dtype}, batch of {case.plan[0]:,}"]
    rows = [["ranks", "role", *KINDS, *OTHER_KINDS, "all", "16 bit"]]
    same: dict[tuple, tuple[list[int], RankMemory]] = {}
    for rank in ranks:
        key = rank.role, *(size(value) for value in rank.bytes.values()), rank.updated
        same.setdefault(key, ([], rank))[0].append(rank.rank)
    groups = list(same.values())
    for own, rank in groups:
        half = sum(value for value in rank.half(item).values() if not math.isnan(value))
        cells = [size(rank.bytes[kind]) for kind in (*KINDS, *OTHER_KINDS)]
        rows.append([rank_ranges(own), rank.role, *cells, size(rank.total), size(half)])
    lines += table(rows, (0, 1))
    if not few:
        lines.append(f"shown of {case.ranks} ranks: the first two, one in the middle, the last two")
    return [*lines, difference(groups)]


def difference(groups: list[tuple[list[int], RankMemory]]) -> str:
    """Return a sentence on the kinds of memory in which the ranks differ."""
    if len(groups) == 1:
        return "all ranks hold the same amounts of memory"
    shown = {kind: {size(rank.bytes[kind]) for _, rank in groups} for kind in (*KINDS, *OTHER_KINDS)}
    kinds = [kind for kind, sizes in shown.items() if len(sizes) > 1]
    return f"ranks differ in {', '.join(kinds) or 'how many parameters they update'}"


class ComparedMemory(NamedTuple):
    """Forecast and measured bytes of a rank's kind of memory."""

    rank: int
    kind: str
    forecast: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the forecast; 0 if both are 0."""
        if not self.measured:
            return 0.0 if not self.forecast else math.inf
        return self.forecast / self.measured - 1


def compare_run(folder: str | Path, trust: Iterable[str] = ()) -> tuple[Workload, list[ComparedMemory]]:
    """Compare a run's forecast, by its options, with its measured `memory_bytes_per_rank`. trust: names of code in the
    options that may be called, as by --trust. UsageError without measurements, or for an unknown program."""
    summary: dict[str, Any] = summary_of(folder)
    measured = summary.get("memory_bytes_per_rank")
    if not isinstance(measured, dict) or set(measured) != set(KINDS):
        raise UsageError(f"{folder}: its summary.json has no memory_bytes_per_rank; train again with this version")
    program = of_strategy(str(summary["strategy"]))
    if program is None:
        raise UsageError(f"{folder}: no program trains by the strategy {summary['strategy']!r}")
    ranks = int(summary["ranks"])
    command = read_command(1, f"-n {ranks}: {program}", {}, ranks)
    options_class = command.training.strategy.options_class
    options = resumed(str(folder), kinds_of(options_class)) | {"out": "none", "resume": ""}
    for name, value in options.items():
        refuse_untrusted(names_of(name, value), str(config_of(str(folder))), trust)
    case = Workload(command.training.strategy, options_class(**options), ranks)
    case.expert_rows = summary.get("expert_rows", {})
    each = itertools.product(forecast(case), KINDS)
    return case, [ComparedMemory(of.rank, kind, of.bytes[kind], float(measured[kind][of.rank])) for of, kind in each]


def run_report(folder: str | Path, trust: Iterable[str] = ()) -> list[str]:
    """Return the comparison of a run as a table."""
    case, errors = compare_run(folder, trust)
    rows = [["rank", "kind", "foretold", "held", "error"]]
    rows += [[str(e.rank), e.kind, size(e.forecast), size(e.measured), f"{100 * e.error:+.1f} %"] for e in errors]
    worst = max(errors, key=lambda e: abs(e.error))
    largest = f"largest error {100 * worst.error:+.1f} %, {worst.kind} of rank {worst.rank}"
    return [f"{folder}: {case.program} on {counted(case.ranks, 'rank')}, {case.spec}", *table(rows, (0, 1)), largest]


def grid_report(case: Workload, room: int, half: bool) -> list[str]:
    """Return the table of the best grids that fit, and the command of the first."""
    refused: list[str] = []
    fitting = list(itertools.islice(fits(case, room, half, refused), SHOWN + 1))
    precision = "16 bit with master weights" if half else str(case.dtype)
    text = f"{case.spec}, {counted(case.length, 'parameter', ',')}, {precision}, {case.options.optimizer}"
    lines = [f"{text}: grids of {case.ranks} ranks that fit into {size(room)} a rank"]
    if fitting:
        rows = [[*AXES, "stage", "micro-batches", "recompute", "idle", "largest rank"]]
        for fit in fitting[:SHOWN]:
            cells = *map(str, fit.shape), str(fit.stage), str(fit.microbatches), "yes" if fit.recompute else "no"
            rows.append([*cells, f"{100 * fit.idle:.0f} %", size(fit.bytes)])
        lines += table(rows, ())
    else:
        lines.append("nothing fits: take more ranks, more memory, or a smaller --batch-size")
    if len(fitting) > SHOWN:
        lines.append("more grids fit")
    elif refused:  # the search came to all
        lines.append(f"{counted(len(refused), 'grid')} left out; the first: {refused[0]}")
    if fitting:
        options = f"--model {case.spec} --optimizer {case.options.optimizer} --batch-size {case.plan[0]}"
        lines.append(f"the first grid: mpiexec -n {case.ranks} hpcdl train-grid {options} {fitting[0].options}")
    return lines
