"""Tables of memory forecasts: named configurations, ranks, forecast and measurement of a run, grids that fit."""

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.launch.command_lines import read_command
from hpcdl.memory import KINDS
from hpcdl.planning.configurations import ADAM_BYTES, CONFIGURATIONS
from hpcdl.planning.fitting import Fit
from hpcdl.planning.memory import MORE, RankMemory, forecast
from hpcdl.planning.summaries import summary_of
from hpcdl.planning.tables import size, table
from hpcdl.planning.workload import Workload
from hpcdl.plugins import names_of, refuse_untrusted
from hpcdl.programs import of_strategy
from hpcdl.runs.config_migration import config_of
from hpcdl.runs.options import kinds_of, resumed

SHOWN = 16  # most printed ranks and grids


# -- named configurations --------------------------------------------------------------------------------------------


def configurations() -> list[str]:
    """Return the table of configurations: parameters as counted and on a slide, at 16 bytes each."""
    rows = [["model", "layers", "width", "heads", "counted", "x 16 bytes", "slide's", "x 16 bytes", "slide's"]]
    for name, each in CONFIGURATIONS.items():
        count = each.parameters
        state = f"{ADAM_BYTES * count / 1e9:,.2f} GB"
        nominal = f"{each.nominal:g} x 10^9"
        product = f"{ADAM_BYTES * each.nominal:,.2f} GB"
        numbers = map(str, (each.layers, each.width, each.heads))
        rows.append([name, *numbers, f"{count:,}", state, nominal, product, f"{each.slide:,g} GB"])
    return table(rows)


def configuration(name: str) -> list[str]:
    """Return the table of a configuration's layers, equal blocks together. UsageError for an unknown one."""
    if name not in CONFIGURATIONS:
        raise UsageError(
            f"--model {name} is none of the named configurations ({', '.join(CONFIGURATIONS)}); for another model "
            'give the line that trains it, as in hpcdl plan memory "-n 4: train-allreduce --model mlp:256"'
        )
    found, rows = CONFIGURATIONS[name], [["layer", "parameters", "x 16 bytes"]]
    together: dict[str, int] = {}
    for layer, count in found.by_layer():
        block, _, kind = layer.partition(".")
        name = f"{kind} of {found.layers} blocks" if kind else block
        together[name] = together.get(name, 0) + count
    together["all"] = found.parameters
    for layer, count in together.items():
        rows.append([layer, f"{count:,}", f"{ADAM_BYTES * count:,}"])
    return table(rows)


# -- ranks -----------------------------------------------------------------------------------------------------------


def numbers(ranks: Sequence[int]) -> str:
    """Return ranks in the form "0-2, 5"."""
    found = []
    for _, run in itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0]):
        own = [rank for _, rank in run]
        found.append(f"{own[0]}-{own[-1]}" if len(own) > 1 else f"{own[0]}")
    return ", ".join(found)


def alike(ranks: list[RankMemory]) -> list[tuple[list[int], RankMemory]]:
    """Group ranks of equal memory: (ranks, one of them)."""
    found: dict[tuple, tuple[list[int], RankMemory]] = {}
    for rank in ranks:
        key = rank.role, *(size(value) for value in rank.bytes.values()), rank.updated
        found.setdefault(key, ([], rank))[0].append(rank.rank)
    return list(found.values())


def of_case(case: Workload) -> list[str]:
    """Return the table of a workload's memory, ranks of equal memory in one line."""
    few = case.ranks <= SHOWN * 4
    only = None if few else sorted({0, 1, case.ranks // 2, case.ranks - 2, case.ranks - 1})
    ranks, item = forecast(case, only), case.dtype.itemsize
    text = f"{case.program} on {counted(case.ranks, 'rank')}, {case.spec}, {counted(case.length, 'parameter', ',')}"
    lines = [f"{text}, {case.dtype}, batch of {case.plan[0]:,}"]
    rows = [["ranks", "role", *KINDS, *MORE, "all", "16 bit"]]
    groups = alike(ranks)
    for own, rank in groups:
        half = sum(value for value in rank.half(item).values() if not math.isnan(value))
        cells = [size(rank.bytes[kind]) for kind in (*KINDS, *MORE)]
        rows.append([numbers(own), rank.role, *cells, size(rank.total), size(half)])
    lines += table(rows, (0, 1))
    if not few:
        lines.append(f"of {case.ranks} ranks these are the first, one in the middle and the last")
    return [*lines, different(groups)]


def different(groups: list[tuple[list[int], RankMemory]]) -> str:
    """Return a sentence about the kinds of memory in which ranks differ."""
    if len(groups) == 1:
        return "all ranks hold the same"
    first = groups[0][1]
    kinds = [
        kind for kind in (*KINDS, *MORE) if any(size(rank.bytes[kind]) != size(first.bytes[kind]) for _, rank in groups)
    ]
    return f"ranks differ in {', '.join(kinds) or 'how many parameters they update'}"


class Compared(NamedTuple):
    """Forecast and measured bytes of a rank's kind of memory."""

    rank: int
    kind: str
    foretold: float
    held: float

    @property
    def error(self) -> float:
        """Relative error of the forecast; 0 if both are 0."""
        if not self.held:
            return 0.0 if not self.foretold else math.inf
        return self.foretold / self.held - 1


def options_of(run: str, options_class: type, trust: Iterable[str] = ()) -> Any:
    """Return the options of the run in a folder, without output. Raises UsageError.

    trust: names of code in the options that may be called, as by --trust.
    """
    found = resumed(run, kinds_of(options_class)) | {"out": "none", "resume": ""}
    for name, value in found.items():
        refuse_untrusted(names_of(name, value), str(config_of(run)), trust)
    return options_class(**found)


def compared(folder: str | Path, trust: Iterable[str] = ()) -> tuple[Workload, list[Compared]]:
    """Compare the forecast of a run, from its options, with the `memory_bytes_per_rank` that it has measured.

    trust: names of code in its options that may be called, as by --trust. UsageError if the folder has no summary with
    measurements, or the program is unknown.
    """
    summary: dict[str, Any] = summary_of(folder)
    measured = summary.get("memory_bytes_per_rank")
    if not isinstance(measured, dict) or set(measured) != set(KINDS):
        raise UsageError(f"{folder}: its summary.json has no memory_bytes_per_rank; train again with this version")
    program = of_strategy(str(summary["strategy"]))
    if program is None:
        raise UsageError(f"{folder}: no program trains by the strategy {summary['strategy']!r}")
    ranks = int(summary["ranks"])
    command = read_command(1, f"-n {ranks}: {program}", {}, ranks)
    options = options_of(str(folder), command.training.options_class, trust)
    case = Workload(program, options, ranks, command.training.check)
    found = [
        Compared(rank.rank, kind, rank.bytes[kind], float(measured[kind][rank.rank]))
        for rank in forecast(case)
        for kind in KINDS
    ]
    return case, found


def of_run(folder: str | Path, trust: Iterable[str] = ()) -> list[str]:
    """Return the comparison of a run as a table."""
    case, found = compared(folder, trust)
    rows = [["rank", "kind", "foretold", "held", "error"]]
    rows += [[str(e.rank), e.kind, size(e.foretold), size(e.held), f"{100 * e.error:+.1f} %"] for e in found]
    worst = max(found, key=lambda e: abs(e.error))
    said = f"largest error {100 * worst.error:+.1f} %, {worst.kind} of rank {worst.rank}"
    return [f"{folder}: {case.program} on {counted(case.ranks, 'rank')}, {case.spec}", *table(rows, (0, 1)), said]


# -- grids -----------------------------------------------------------------------------------------------------------


def of_fits(case: Workload, found: list[Fit], refused: list[str], room: int, half: bool) -> list[str]:
    """Return the table of grids that fit, best first, and the command of the first."""
    how = "16 bit with master weights" if half else str(case.dtype)
    text = f"{case.spec}, {counted(case.length, 'parameter', ',')}, {how}, {case.options.optimizer}"
    lines = [f"{text}: {counted(len(found), 'grid')} of {case.ranks} ranks with {size(room)} each"]
    if not found:
        return [*lines, "nothing fits: take more ranks, more memory, or a smaller --batch-size"]
    rows = [["data", "pipeline", "tensor", "stage", "micro-batches", "recompute", "idle", "largest rank"]]
    for fit in found[:SHOWN]:
        cells = *map(str, fit.shape), str(fit.stage), str(fit.microbatches), "yes" if fit.recompute else "no"
        rows.append([*cells, f"{100 * fit.idle:.0f} %", size(fit.bytes)])
    lines += table(rows, ())
    if len(found) > SHOWN:
        lines.append(f"and {len(found) - SHOWN} more")
    if refused:
        lines.append(f"{counted(len(refused), 'grid')} cannot be, as {refused[0]}")
    told = f"--model {case.spec} --optimizer {case.options.optimizer} --batch-size {case.plan[0]}"
    return [*lines, f"first: mpiexec -n {case.ranks} hpcdl train-grid {told} {found[0].options}"]
