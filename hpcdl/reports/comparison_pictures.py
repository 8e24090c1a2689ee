"""Pictures of several runs, each a curve; in a comparison each line is a curve with a band over its seeds.
Curves are means over the seeds at the same step; bands reach from the lowest to the highest value."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcdl.files import finite
from hpcdl.reports.charts import Curve, dots
from hpcdl.reports.comparison import SCHEMA_VERSION
from hpcdl.reports.downsampling import number
from hpcdl.reports.figures import Key, Picture, look
from hpcdl.reports.measures import Measure
from hpcdl.reports.run_pictures import AGAINST, COSTS, MEASURES, drawable, learning_curve
from hpcdl.reports.run_reader import Recorded, read_json
from hpcdl.reports.statistics import Statistics

MOST_LINES = 28  # of different look
RESULTS = (  # measures that have a picture of their own: name, title, quantity, sentence
    ("seconds_to_target", "Time to the target", "seconds", "The further to the left, the sooner."),
    ("bytes_to_target", "Bytes to the target", "bytes", "The further to the left, the less was sent for it."),
    ("steps_to_target", "Steps to the target", "steps", "The further to the left, the fewer steps it took."),
    ("seconds", "Time of the whole run", "seconds", "The further to the left, the faster."),
    ("bytes_per_rank", "Bytes sent by a rank", "bytes", "The further to the left, the less has to pass the network."),
)


class ComparedRun(NamedTuple):
    """One run of a line: its folder (None: not in the comparison's), why it failed ("" if it did not), its measures."""

    folder: Path | None
    failed: str
    values: dict[str, Any]


@dataclass
class DrawnLine:
    """A line of a comparison, or one of several runs. index: for colour and style. records: its runs as read."""

    name: str
    index: int
    ranks: Any = None
    runs: list[ComparedRun] = field(default_factory=list)
    statistics: dict[str, Statistics] = field(default_factory=dict)
    records: list[Recorded] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return Key(f"{self.index + 1} {self.name}", *look(self.index))

    def has(self, measure: Measure) -> bool:
        return measure.name in self.statistics and self.statistics[measure.name].mean is not None


@dataclass
class Comparison:
    """The contents of results.json. missing: a sentence for each part that is not shown."""

    folder: Path
    command: str = ""
    budget: str = ""
    seeds: list[Any] = field(default_factory=list)
    target: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    measures: list[Measure] = field(default_factory=list)
    lines: list[DrawnLine] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def read_comparison(folder: Path) -> Comparison:
    """Read results.json; invalid parts are left out."""
    found = Comparison(folder)
    results = read_json(folder / "results.json", found.missing)
    if results is None:
        return found
    version = results.get("schema_version")
    if version != SCHEMA_VERSION:
        found.missing.append(f"results.json has version {str(version)[:20]}, but hpcdl reads version {SCHEMA_VERSION}")
        return found
    found.command, found.budget = (str(results.get(name) or "") for name in ("command", "budget"))
    found.target, found.environment = (entry(results, name, dict) for name in ("target", "environment"))
    found.seeds = entry(results, "seeds", list)
    measures = entry(results, "measures", list)
    found.measures = [measure_of(each) for each in measures if isinstance(each, dict) and "name" in each]
    for each in entry(results, "lines", list):
        if isinstance(each, dict) and "line" in each:
            of = entry(each, "statistics", dict)
            statistics = {name: statistics_of(values) for name, values in of.items() if isinstance(values, dict)}
            runs = [run_of(folder, run) for run in entry(each, "runs", list) if isinstance(run, dict)]
            found.lines.append(DrawnLine(str(each["line"]), len(found.lines), each.get("ranks"), runs, statistics))
    if not found.lines:
        found.missing.append("results.json has no lines")
    return found


def entry(of: dict[str, Any], name: str, kind: type) -> Any:
    """Return of[name] if it has the type `kind`, else an empty value of this type."""
    return of[name] if isinstance(of.get(name), kind) else kind()


def run_of(folder: Path, run: dict[str, Any]) -> ComparedRun:
    """Return a run of results.json; its folder is None if it lies outside of the comparison's folder."""
    name = entry(run, "folder", str)
    inside = name and "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts
    return ComparedRun(folder / name if inside else None, str(run.get("failed") or ""), entry(run, "values", dict))


def measure_of(told: dict[str, Any]) -> Measure:
    """Return a measure of results.json; an invalid format is replaced by a usual one."""
    form, unit, scale = str(told.get("format") or ".4g")[:20], str(told.get("unit") or ""), finite(told.get("scale", 1))
    try:
        format(0.0, f"+{form}")
    except (ValueError, TypeError):
        form = ".4g"
    title = str(told.get("title") or told["name"])
    better = str(told.get("better") or "")
    return Measure(str(told["name"]), title, form, f" {unit.strip()}".rstrip(), 1 if scale is None else scale, better)


def statistics_of(told: dict[str, Any]) -> Statistics:
    """Return statistics of results.json; values that are not finite numbers become None."""
    mean, deviation, difference, p = (finite(told.get(name)) for name in ("mean", "deviation", "difference", "p"))
    low, high = map(finite, ends) if len(ends := entry(told, "interval", list)) == 2 else (None, None)
    interval = None if low is None or high is None else (low, high)
    within_noise = None if told.get("within_noise") is None else told["within_noise"] is True
    censored = bool(told.get("censored"))
    return Statistics(0, mean, deviation, difference, interval, within_noise, p, censored)


def band(records: Sequence[Recorded], x: str, y: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return mean x and mean, lowest, highest y over the seeds, at the steps of the seed with fewest evaluations.
    x, y: names of columns. Steps that not all seeds have reached are left out; None if no step is left."""
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


def together(lines: Sequence[DrawnLine], seeds: int, what: str) -> Iterator[Picture]:
    """Yield pictures of the lines' scores and loss against steps, seconds, bytes. what: "line" or "run", for titles."""
    for measure in ("accuracy", "return", "rmse", "loss"):
        for x, (_, words) in AGAINST.items():
            drawn, keys = [], []
            for line in lines[:MOST_LINES]:
                part = next((p for p in ("test", "validation") if has(line, f"{p}_{measure}")), None)
                made = band(line.records, x, f"{part}_{measure}") if part else None
                if made is not None:
                    at, mean, *ends = made
                    low, high = ends if len(line.records) > 1 else (None, None)
                    drawn.append(Curve(at, mean, *look(line.index), low, high, marked=len(lines) <= 4))
                    keys.append(line.key)
            if drawn:
                drawn, keys = told_apart(drawn, keys, what)
                name, _, better = MEASURES[measure]
                bands = f" Each curve is the mean over {seeds} seeds, its band from the lowest to the highest of them."
                chance = " If bands overlap, chance may decide which curve is ahead."
                over, overlap = (bands, chance) if seeds > 1 else ("", "")
                sense = f"At equal {words}, the {better} curve is the better one."
                title = f"{name[0].upper()}{name[1:]} of each {what} against {words}"
                yield learning_curve(measure, x, title, f"{sense}{over} {COSTS[words]}{overlap}", drawn, keys)


def told_apart(drawn: Sequence[Curve], keys: Sequence[Key], what: str) -> tuple[list[Curve], list[Key]]:
    """Return curves that are drawn in turns where they are equal, and keys that name the first curve they equal."""
    extents = [float(np.ptp(np.concatenate([getattr(curve, name) for curve in drawn]))) for name in ("x", "y")]
    first: list[int] = []
    for i, curve in enumerate(drawn):
        first.append(next((j for j in range(i) if first[j] == j and coincide(drawn[j], curve, extents)), i))
    curves, labels = [], []
    for i, (curve, key) in enumerate(zip(drawn, keys, strict=True)):
        like = drawn[first[i]]
        curves.append(curve._replace(shared=(first[:i].count(first[i]), first.count(first[i]))))
        equal = all(np.array_equal(a, b) for a, b in zip(like[:2], curve[:2], strict=True))
        same = "" if first[i] == i else f" {'=' if equal else '≈'} {what} {keys[first[i]].label.split()[0]}"
        labels.append(key._replace(label=key.label + same))
    return curves, labels


def coincide(one: Curve, other: Curve, extents: Sequence[float]) -> bool:
    """True if no difference is visible: neither on a linear axis of the x and y extents, nor on a logarithmic one."""
    x, y = extents
    pairs = (one.x, other.x, x), (one.y, other.y, y), (one.low, other.low, y), (one.high, other.high, y)
    known = [(a, b, extent) for a, b, extent in pairs if a is not None and b is not None]
    return len(one.x) == len(other.x) and all(
        bool((np.abs(a - b) <= 1e-3 * np.minimum(np.abs(a), extent)).all()) for a, b, extent in known
    )


def has(line: DrawnLine, name: str) -> bool:
    return any(drawable(record.evaluations.mean["step"], record.evaluations.mean[name]) for record in line.records)


def results_of(comparison: Comparison) -> Iterator[Picture]:
    """Yield pictures of RESULTS (costs to reach the target, ...): a point per line with the range over its seeds."""
    for name, title, quantity, sentence in RESULTS:
        rows, keys, never, some = [], [], [], []
        for line in comparison.lines[:MOST_LINES]:
            each = [number(run.values.get(name)) for run in line.runs if not run.failed]
            values = [value for value in each if math.isfinite(value)]
            if values:
                mean = float(np.mean(values))
                rows.append((str(line.index + 1), mean, min(values), max(values), line.key.colour))
                keys.append(line.key._replace(style=0))
            elif each:
                never.append(str(line.index + 1))
            if values and len(values) < len(each):
                some.append(str(line.index + 1))
        to_target = name.endswith("_to_target")
        if not rows or (to_target and not comparison.target):
            continue
        target = " and ".join(f"{key} {value}" for key, value in comparison.target.items())
        said = f" ({target})" if to_target else ""
        missing = f" No value, or not reached: line {', '.join(never)}." if never else ""
        missing += f" Only the seeds that have a value, or reached it: line {', '.join(some)}." if some else ""
        yield Picture(
            name.replace("_", "-"),
            title + said,
            f"{sentence} A point is the mean over the seeds, its bar from the lowest to the highest.{missing}",
            lambda axes, rows=rows, quantity=quantity: dots(axes, rows, quantity, ""),  # type: ignore[misc]
            keys,
            height=1.0 + 0.24 * max(3, len(rows)),
        )
