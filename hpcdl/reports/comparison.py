"""A comparison: lines, each a program with its options, run with each seed; what is made of the folders of their runs.

    NAME/1-train-allreduce/seed-0/    a run's folder; one for each line and seed
    NAME/results.json                 all values, and their statistics: what `report` reads
    NAME/table.csv                    a row for each line: of each measure its statistics
    NAME/table.md                     the tables of the terminal, and the differences to the first line

All numbers come from the folders, so that a comparison that was stopped, and gone on with, makes the same of them.
"""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from hpcdl.errors import UsageError, printable, unknown
from hpcdl.files import parse_json
from hpcdl.reports.measures import BY_NAME, MEASURES, USUAL, Measure, bounds, shown, values
from hpcdl.reports.statistics import FEWEST, Statistics, of_lines

SCHEMA_VERSION = 1
SIGNS = {True: "+", False: "-", None: "="}  # better than the first line, worse, within noise
NUMBERS = ("runs", "mean", "deviation", "difference")


class Line(NamedTuple):
    """What is compared: as it was written, on how many ranks, in which folder, relative to the comparison's."""

    text: str
    ranks: int
    folder: str


def run_folder(line: str, seed: int) -> Path:
    """Of a run with this seed, relative to the comparison's folder; line: the folder of its line."""
    return Path(line, f"seed-{seed}")


def results(
    folder: Path,
    lines: list[Line],
    seeds: list[int],
    target: dict[str, float],
    failed: dict[tuple[int, int], str],
    about: dict[str, Any],
    known: dict[tuple[int, int], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """What results.json holds. failed: why, by line and seed; about: how the comparison was started.

    known: runs that have ended, by line and seed, as they were read before; they are not read again.
    """
    known = {} if known is None else known

    def run(i: int, seed: int) -> dict[str, Any]:
        found = known.get((i, seed)) or run_of(folder, lines[i], seed, target, failed.get((i, seed)))
        if found["failed"] is None:
            known[i, seed] = found
        return found

    found = [[run(i, seed) for seed in seeds] for i in range(len(lines))]
    by_line, censored = ([columns(runs, kind) for runs in found] for kind in ("values", "beyond"))
    measured = [measure for measure in MEASURES if any(any(of[measure.name]) for of in by_line)]
    statistics = {
        measure.name: of_lines([of[measure.name] for of in by_line], [of[measure.name] for of in censored])
        for measure in measured
    }
    return {
        "schema_version": SCHEMA_VERSION,
        **about,
        "seeds": seeds,
        "target": target,
        "measures": [measure._asdict() for measure in measured],
        "lines": [
            {
                "line": line.text,
                "ranks": line.ranks,
                "folder": line.folder,
                "runs": runs,
                "statistics": {name: of[i]._asdict() for name, of in statistics.items()},
            }
            for i, (line, runs) in enumerate(zip(lines, found, strict=True))
        ],
    }


def run_of(folder: Path, line: Line, seed: int, target: dict[str, float], failed: str | None) -> dict[str, Any]:
    """One run: where it is, why it failed or ended, what is measured; beyond: what is only known to be larger."""
    path = run_folder(line.folder, seed)
    run: dict[str, Any] = {"seed": seed, "folder": str(path), "failed": failed, "stopped": None, "values": {}}
    if failed is None:
        try:
            summary = parse_json((folder / path / "summary.json").read_text())
            run |= {"stopped": summary.get("stopped"), "values": values(folder / path, summary, target)}
            run["beyond"] = bounds(folder / path, target)
        except (OSError, ValueError, AttributeError, TypeError, KeyError):
            run["failed"] = "there is no summary.json that can be read"
    return run


def columns(runs: list[dict[str, Any]], kind: str) -> dict[str, list[float | None]]:
    """The values of a line's runs by measure, one for each seed; kind: "values" or "beyond"."""
    return {measure.name: [run.get(kind, {}).get(measure.name) for run in runs] for measure in MEASURES}


def chosen(names: str) -> list[str]:
    """The columns that --columns names, with commas between; "": the usual ones. Raises UsageError."""
    wanted = names.split(",") if names else USUAL
    for name in wanted:
        if name not in BY_NAME:
            raise unknown("column", name, BY_NAME)
    return wanted


# -- tables ----------------------------------------------------------------------------------------------------------


def cell(measure: Measure, found: Statistics) -> str:
    """Mean and deviation, and how the difference to the first line is to be taken."""
    if found.mean is None:
        return ""
    spread = f" ± {shown(measure, found.deviation, unit=False)}" if found.deviation else ""
    return f"{'> ' * bool(found.censored)}{shown(measure, found.mean, unit=False)}{spread}{sign(measure, found)}"


def sign(measure: Measure, found: Statistics) -> str:
    """Whether a line is better than the first one, as far as noise lets it be seen."""
    if found.difference is None or found.within_noise is None or not measure.better:
        return ""
    better = (found.difference > 0) == (measure.better == "more")
    seen = any(digit in "123456789" for digit in shown(measure, found.difference, unit=False))
    return f" {SIGNS[better if seen and not found.within_noise else None]}"


def difference(measure: Measure, found: Statistics) -> str:
    """The difference to the first line, with its interval and its p."""
    if found.difference is None:
        return ""
    said = shown(measure, found.difference, "+", unit=False)
    if found.interval is not None:
        low, high = (shown(measure, each, "+", unit=False) for each in found.interval)
        said += f" ({low} to {high})"
    return said + judged(found.p, found.within_noise)


def judged(p: float | None, within_noise: bool | None) -> str:
    """The p of a difference, and whether it is within noise; "" where there are too few seeds."""
    said = "" if p is None else f", p {p:.2g}" if p >= 0.001 else ", p < 0.001"
    return said + ", within noise" * bool(within_noise)


def heading(measure: Measure) -> str:
    """A column's title, with the unit."""
    return measure.title + (f", {measure.unit.strip()}" if measure.unit else "")


def rows(found: dict[str, Any], names: Iterable[str], show: Any) -> tuple[list[str], list[list[str]]]:
    """The headings, and of each line the cells that `show` makes; columns of which nothing is known are left out."""
    there = {each["name"] for each in found["measures"]}
    measures = [BY_NAME[name] for name in names if name in there]
    cells = [
        [show(measure, Statistics(**line["statistics"][measure.name])) for measure in measures]
        for line in found["lines"]
    ]
    kept = [i for i in range(len(measures)) if any(row[i] for row in cells)]
    return [heading(measures[i]) for i in kept], [[row[i] for i in kept] for row in cells]


def as_tables(found: dict[str, Any], names: list[str], width: int) -> list[Table]:
    """The tables of a terminal of so many columns: which lines there are, and as many measures to a table as fit."""
    legend = Table("", "line", "ranks", "runs", box=None, pad_edge=False)
    for number, line in enumerate(found["lines"], 1):
        failed = [run for run in line["runs"] if run["failed"] is not None]
        runs = f"{len(line['runs']) - len(failed)} of {len(line['runs'])}" if failed else str(len(line["runs"]))
        legend.add_row(str(number), printable(line["line"]), str(line["ranks"]), runs)
    tables, (titles, cells) = [legend], rows(found, names, cell)
    for columns in in_width([[title, *(row[i] for row in cells)] for i, title in enumerate(titles)], width):
        table = Table(pad_edge=False)
        table.add_column("")
        for (title, *_), wide in zip(columns, widths(columns, width), strict=True):
            table.add_column(title, width=wide)
        for number in range(1, 1 + len(cells)):
            table.add_row(str(number), *(column[number] for column in columns))
        tables.append(table)
    return tables


def in_width(columns: list[list[str]], width: int) -> list[list[list[str]]]:
    """Columns, each a title and its cells, in groups that fit beside each other; titles may be broken between words."""
    groups: list[list[list[str]]] = []
    left = 0
    for title, *cells in columns:
        needed = 3 + least(title, cells)
        if not groups or needed > left:
            groups.append([])
            left = room(cells, width)
        groups[-1].append([title, *cells])
        left -= needed
    return groups


def widths(columns: list[list[str]], width: int) -> list[int]:
    """How wide columns become that fit: what they need at least, and of what is left as much as their titles take.

    Rich would take it from the widest, and break cells and words while titles have more than they need.
    """
    found = [least(title, cells) for title, *cells in columns]
    left = max(0, room(columns[0][1:], width) - sum(found) - 3 * len(found))
    for i, (title, *_) in enumerate(columns):
        more = max(0, min(left, len(title) - found[i]))
        found[i] += more
        left -= more
    return found


def least(title: str, cells: list[str]) -> int:
    """Characters that a column needs: those of a cell, or of a word of the title."""
    return max(map(len, [*title.split(), *cells]))


def room(cells: list[str], width: int) -> int:
    """Characters beside the column of numbers of a table with so many rows."""
    return width - 4 - len(str(len(cells)))


def remarks(found: dict[str, Any]) -> list[str]:
    """What is to be said below the tables: how they are read, what failed, what ended before its time."""
    said = []
    if len(found["lines"]) > 1 and len(found["seeds"]) > 1:
        signs = "+ better, - worse than line 1, = within noise"
        fewest = f"fewer than {FEWEST} seeds tell no noise from a difference"
        said.append(f"mean ± deviation over the seeds; {signs if len(found['seeds']) >= FEWEST else fewest}")
    for number, line in enumerate(found["lines"], 1):
        whys: dict[str, list[int]] = {}
        for run in line["runs"]:
            if run["failed"] is not None:
                whys.setdefault(run["failed"], []).append(run["seed"])
        for why, seeds in whys.items():
            of = "seeds" if len(seeds) > 1 else "seed"
            said.append(f"line {number} failed with {of} {', '.join(map(str, seeds))}: {printable(why, allowed='')}")
    if found.get("budget"):
        early = [
            str(n) for n, line in enumerate(found["lines"], 1) if any(r["stopped"] == "finished" for r in line["runs"])
        ]
        if early:
            which = f"line{'s' * (len(early) > 1)} {', '.join(early)}"
            said.append(
                f"{which}: the epochs or steps ended before the budget did; ask for more of them to compare at equal "
                "budgets"
            )
    for name, goal in found["target"].items():
        for number, line in enumerate(found["lines"], 1):
            ended = [run for run in line["runs"] if run["failed"] is None]
            missed = [run for run in ended if run["values"].get("steps_to_target") is None]
            if missed:
                said.append(f"line {number}: {len(missed)} of {len(ended)} runs did not reach {name} {goal:g}")
    return said


def markdown(found: dict[str, Any], names: list[str]) -> str:
    """table.md: the measures, and their differences to the first line."""
    text = [f"`{code(found['command'])}`", ""]
    paired = "Differences to the first line, paired by seed; p is corrected for the number of lines:"
    parts = [("", cell)] + ([(paired, difference)] if len(found["lines"]) > 1 else [])
    for title, show in parts:
        titles, cells = rows(found, names, show)
        if titles:
            text += [title, ""] * bool(title)
            text += [f"| line | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
            text += [
                f"| `{code(line['line'])}` | {' | '.join(row)} |"
                for line, row in zip(found["lines"], cells, strict=True)
            ]
            text.append("")
    return "\n".join([*text, *(f"- {code(said)}" for said in remarks(found))]).rstrip("\n") + "\n"


def code(text: str) -> str:
    """A user's text as it may stand in a table of Markdown."""
    return printable(text, allowed="").replace("`", "'").replace("|", "\\|")


def table(found: dict[str, Any]) -> str:
    """table.csv: a row for each line, with the statistics of all measures as they are, in the units of results.json."""
    file = io.StringIO()
    names = [measure["name"] for measure in found["measures"]]
    kinds = (*NUMBERS, "difference_low", "difference_high", "within_noise", "p", "censored")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["line", "ranks", "runs", "failed", *(f"{name}_{kind}" for name in names for kind in kinds)])
    for line in found["lines"]:
        row = [line["line"], line["ranks"], len(line["runs"]), sum(run["failed"] is not None for run in line["runs"])]
        for name in names:
            one = line["statistics"][name]
            row += [*(one[kind] for kind in NUMBERS), *(one["interval"] or (None, None)), one["within_noise"]]
            row += [one.get("p"), one.get("censored")]
        writer.writerow(["" if each is None else each for each in row])
    return file.getvalue()


def read(folder: Path) -> dict[str, Any]:
    """The results of the comparison in a folder. Raises UsageError where there are none, or of another version."""
    path = folder / "results.json"
    try:
        found = parse_json(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(f"{path} is of another version of hpcdl, or is no comparison's")
    return found
