"""The pictures of several runs: each a curve, or in a comparison each line a curve with a band over its seeds.

A comparison is what results.json says: lines, their runs of several seeds, measures and statistics of them. A line
keeps its colour in all pictures. Curves are means over the seeds at the same step; bands reach from the lowest to the
highest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcdl.reports.charts import Curve, curves, dots
from hpcdl.reports.comparison import SCHEMA_VERSION
from hpcdl.reports.downsampling import number
from hpcdl.reports.figures import Key, Picture, look
from hpcdl.reports.run_pictures import AGAINST, BETTER, COSTS, NAMES, drawable
from hpcdl.reports.run_reader import Recorded, read_json

MOST_LINES = 28  # of different look
RESULTS = (  # measures that have a picture of their own: name, title, quantity, sentence
    ("seconds_to_target", "Time to the target", "seconds", "The further to the left, the sooner."),
    ("bytes_to_target", "Bytes to the target", "bytes", "The further to the left, the less was sent for it."),
    ("steps_to_target", "Steps to the target", "steps", "The further to the left, the fewer updates it took."),
    ("seconds", "Time of the whole run", "seconds", "The further to the left, the faster."),
    ("bytes_per_rank", "Bytes sent by a rank", "bytes", "The further to the left, the less has to pass the network."),
)
MEASURES = ("accuracy", "return", "rmse", "loss")


class ComparedRun(NamedTuple):
    """One run of a line: its folder, and why it failed if it did."""

    seed: Any
    folder: Path | None
    failed: str
    values: dict[str, Any]


@dataclass
class DrawnLine:
    """A line of a comparison, or a run among others. records: of the runs that could be read."""

    name: str
    index: int
    folder: Path | None = None
    ranks: Any = None
    runs: list[ComparedRun] = field(default_factory=list)
    statistics: dict[str, Any] = field(default_factory=dict)
    records: list[Recorded] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """Its row in a legend."""
        colour, style = look(self.index)
        return Key(f"{self.index + 1} {self.name}", colour, style)


@dataclass
class Comparison:
    """What results.json says; missing: what is not shown, and why."""

    folder: Path
    command: str = ""
    budget: str = ""
    seeds: list[Any] = field(default_factory=list)
    target: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    measures: list[dict[str, Any]] = field(default_factory=list)
    lines: list[DrawnLine] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def read_comparison(folder: Path) -> Comparison:
    """Read results.json; whatever in it is not as it should be is left out."""
    found = Comparison(folder)
    results = read_json(folder / "results.json", found.missing)
    if results is None:
        return found
    version = results.get("schema_version")
    if version != SCHEMA_VERSION:
        found.missing.append(f"results.json is of version {str(version)[:20]}, and version {SCHEMA_VERSION} is read")
        return found
    found.command, found.budget = (str(results.get(name) or "") for name in ("command", "budget"))
    for name in ("target", "environment", "options"):
        if isinstance(results.get(name), dict):
            setattr(found, name, results[name])
    found.seeds = as_list(results.get("seeds"))
    found.measures = [each for each in as_list(results.get("measures")) if isinstance(each, dict) and "name" in each]
    for each in as_list(results.get("lines")):
        if isinstance(each, dict) and "line" in each:
            told = each.get("statistics")
            statistics = told if isinstance(told, dict) else {}
            line = DrawnLine(str(each["line"]), len(found.lines), inside(folder, each.get("folder")), each.get("ranks"))
            line.statistics = {str(name): of for name, of in statistics.items() if isinstance(of, dict)}
            line.runs = [run_of(folder, run) for run in as_list(each.get("runs")) if isinstance(run, dict)]
            found.lines.append(line)
    if not found.lines:
        found.missing.append("results.json has no lines")
    return found


def run_of(folder: Path, run: dict[str, Any]) -> ComparedRun:
    values = run.get("values")
    place, failed = inside(folder, run.get("folder")), str(run.get("failed") or "")
    return ComparedRun(run.get("seed"), place, failed, values if isinstance(values, dict) else {})


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def inside(folder: Path, name: Any) -> Path | None:
    """A folder named in results.json; None where it is none, or lies outside of the comparison's."""
    if not isinstance(name, str) or not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        return None
    return folder / name


def band(records: Sequence[Recorded], x: str, y: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """(x, mean, lowest, highest) over the seeds, at the steps of the one that was evaluated least; None: nothing.

    x, too, is a mean over the seeds at these steps. Steps that not all have come to are left out.
    """
    series = []
    for record in records:
        table = record.evaluations.mean
        there = np.isfinite(table["step"]) & np.isfinite(table[x]) & np.isfinite(table[y])
        if there.any():
            order = np.argsort(table["step"][there], kind="stable")
            series.append([table[name][there][order] for name in ("step", x, y)])
    if not series:
        return None
    steps = min(series, key=lambda each: len(each[0]))[0]
    first, last = max(each[0][0] for each in series), min(each[0][-1] for each in series)
    steps = steps[(steps >= first) & (steps <= last)]
    if not len(steps):
        return None
    at = np.mean([np.interp(steps, each[0], each[1]) for each in series], axis=0)
    values = np.array([np.interp(steps, each[0], each[2]) for each in series])
    return at, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def together(lines: Sequence[DrawnLine], seeds: int, what: str) -> list[Picture]:
    """Score and loss of all lines against steps, seconds and bytes. what: they are, in the singular."""
    found = []
    for measure in MEASURES:
        for x, (quantity, words) in AGAINST.items():
            drawn, keys = [], []
            for line in lines[:MOST_LINES]:
                part = next((p for p in ("test", "validation") if has(line, f"{p}_{measure}")), None)
                made = band(line.records, x, f"{part}_{measure}") if part else None
                if made is not None:
                    colour, style = look(line.index)
                    low, high = (made[2], made[3]) if len(line.records) > 1 else (None, None)
                    drawn.append(Curve(made[0], made[1], colour, style, low, high, marked=len(lines) <= 4))
                    keys.append(line.key)
            if drawn:
                found.append(one_together(measure, quantity, words, drawn, keys, seeds, what))
    return found


def has(line: DrawnLine, name: str) -> bool:
    return any(drawable(record.evaluations.mean["step"], record.evaluations.mean[name]) for record in line.records)


def one_together(
    measure: str, quantity: str, words: str, drawn: list[Curve], keys: list[Key], seeds: int, what: str
) -> Picture:
    name = NAMES[measure]
    over = (
        f" Each curve is the mean over {seeds} seeds, its band from the lowest to the highest of them."
        if seeds > 1
        else ""
    )
    overlap = " Where bands overlap, chance may decide which is ahead." if seeds > 1 else ""
    return Picture(
        f"{measure}-{words.replace(' ', '-')}",
        f"{name[0].upper()}{name[1:]} of each {what} against {words}",
        f"The {BETTER[measure]} the better at the same {words.removesuffix(' sent')}.{over} {COSTS[words]}{overlap}",
        lambda axes: curves(axes, drawn, quantity, name, measure == "accuracy", free=BETTER[measure] == "lower"),
        keys,
    )


def results_of(comparison: Comparison) -> list[Picture]:
    """A point for each line with the range over its seeds, of what has no curve: what it took to get to the target."""
    found = []
    for name, title, quantity, sentence in RESULTS:
        rows, keys, never = [], [], []
        for line in comparison.lines[:MOST_LINES]:
            each = [number(run.values.get(name)) for run in line.runs if not run.failed]
            values = [value for value in each if math.isfinite(value)]
            if values:
                mean = float(np.mean(values))
                rows.append((str(line.index + 1), mean, min(values), max(values), look(line.index)[0]))
                keys.append(Key(line.key.label, line.key.colour, 0))
            elif line.runs and not all(run.failed for run in line.runs):
                never.append(str(line.index + 1))
        if not rows or (name.endswith("_to_target") and not comparison.target):
            continue
        target = " and ".join(f"{key} {value}" for key, value in comparison.target.items())
        said = f" ({target})" if name.endswith("_to_target") else ""
        missing = f" Not reached, or not known: line {', '.join(never)}." if never else ""
        found.append(
            Picture(
                name.replace("_", "-"),
                title + said,
                f"{sentence} A point is the mean over the seeds, its bar from the lowest to the highest.{missing}",
                lambda axes, rows=rows, quantity=quantity: dots(axes, rows, quantity, ""),  # type: ignore[misc]
                keys,
                height=1.0 + 0.24 * max(3, len(rows)),
            )
        )
    return found


def shown(value: float, measure: dict[str, Any], unit: bool = False, sign: str = "") -> str:
    """A value in the format, and times the scale, that its measure has; what no format can show, in a usual one."""
    times = number(measure.get("scale", 1))
    value *= times if math.isfinite(times) else 1
    try:
        text = format(value, sign + str(measure.get("format") or ".4g")[:20])
    except (ValueError, TypeError):
        text = format(value, f"{sign}.4g")
    name = str(measure.get("unit") or "").strip() if unit else ""
    return f"{text} {name}" if name else text
