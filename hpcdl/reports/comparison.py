"""Results and tables of compared lines, each a program with its options, run with each seed; from the runs' folders.

NAME/1-train-allreduce/seed-0/    a run's folder; one for each line and seed
NAME/results.json                 all values, and their statistics: what `report` reads
NAME/table.csv                    a row for each line: statistics of each measure
NAME/table.md                     the tables of the terminal, and the differences to the first line"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from hpcdl.errors import printable, unknown
from hpcdl.files import parse_json
from hpcdl.formatting import counted
from hpcdl.metric_lines import CLASS_SCORES
from hpcdl.reports.measures import BY_NAME, USUAL, Measure, measure_of, measured, shown
from hpcdl.reports.statistics import FEWEST, Statistics, of_lines

SCHEMA_VERSION = 1
SIGNS = {True: "+", False: "-", None: "="}  # better than the first line, worse, within noise
JUDGED: tuple[dict[str, str], ...] = (  # by a verdict, and in its words: of each row the first measure that all have
    {each: each.replace("_", " ") for each in ("test_accuracy", "test_return", "test_rmse", "test_loss", "train_loss")},
    {"seconds_to_target": "time to the target", "seconds": "time"},
    {"bytes_to_target": "bytes sent to the target", "bytes_per_rank": "bytes sent by the busiest rank"},
)
NUMBERS = ("runs", "mean", "deviation", "difference")


class Line(NamedTuple):
    """A compared line: its text as written, its number of ranks, its folder relative to the comparison's."""

    text: str
    ranks: int
    folder: str


def run_folder(line: str, seed: int) -> Path:
    """Return the folder of a run relative to the comparison's. line: the folder of its line."""
    return Path(line, f"seed-{seed}")


def results(
    folder: Path,
    lines: list[Line],
    seeds: list[int],
    target: dict[str, float],
    failed: dict[tuple[int, int], str],
    about: dict[str, Any],
    known: dict[tuple[int, int], dict[str, Any]],
) -> dict[str, Any]:
    """Return the contents of results.json. failed: reasons, by line and seed; about: how the comparison was started.
    known: entries of ended runs, by line and seed. They are not read again; entries of newly ended runs are added."""

    def run(i: int, seed: int) -> dict[str, Any]:
        found = known.get((i, seed)) or run_of(folder, lines[i], seed, target, failed.get((i, seed)))
        if found["failed"] is None:
            known[i, seed] = found
        return found

    found = [[run(i, seed) for seed in seeds] for i in range(len(lines))]

    def columns(kind: str, name: str) -> list[list[float | None]]:
        return [[run.get(kind, {}).get(name) for run in runs] for runs in found]

    names = dict.fromkeys([*BY_NAME, *(name for runs in found for run in runs for name in run["values"])])
    by_name = {name: columns("values", name) for name in names}
    measures = [measure for measure in map(measure_of, names) if measure and any(map(any, by_name[measure.name]))]
    statistics = {name: of_lines(by_name[name], columns("beyond", name)) for name, *_ in measures}
    about = {"schema_version": SCHEMA_VERSION, **about, "seeds": seeds, "target": target}
    each_line = [
        {"line": line.text, "ranks": line.ranks, "folder": line.folder, "runs": runs}
        | {"statistics": {name: of[i]._asdict() for name, of in statistics.items()}}
        for i, (line, runs) in enumerate(zip(lines, found, strict=True))
    ]
    return about | {"measures": [measure._asdict() for measure in measures], "lines": each_line}


def run_of(folder: Path, line: Line, seed: int, target: dict[str, float], failed: str | None) -> dict[str, Any]:
    """Return a run's entry: folder, why it failed or ended, measures, lower bounds of a missed target's costs."""
    path = run_folder(line.folder, seed)
    run: dict[str, Any] = {"seed": seed, "folder": str(path), "failed": failed, "stopped": None, "values": {}}
    if failed is None:
        try:
            summary = parse_json((folder / path / "summary.json").read_text())
            run["stopped"] = summary.get("stopped")
            run["values"], run["beyond"] = measured(folder / path, summary, target)
        except (OSError, ValueError, AttributeError, TypeError, KeyError):
            run["failed"] = "its summary.json is missing or damaged"
    return run


def chosen(names: str, found: dict[str, Any] | None = None) -> list[str]:
    """Return the columns that --columns names, separated by commas; for "" the usual ones, and the further test scores
    that the results `found` have. Raises UsageError."""
    there = [each["name"] for each in found["measures"]] if found else []
    further = [name for name in there if name.startswith("test_") and name not in BY_NAME]
    wanted = names.split(",") if names else USUAL + further
    if bad := [name for name in wanted if measure_of(name) is None]:
        raise unknown("column", bad[0], [*BY_NAME, *(f"test_{name}" for name in CLASS_SCORES[1:])])
    return wanted


def cell(measure: Measure, found: Statistics) -> str:
    """Return the text of mean and deviation, and +, - or = against the first line (see `sign`); "" without a mean."""
    if found.mean is None:
        return ""
    spread = f" ± {shown(measure, found.deviation, unit=False)}" if found.deviation else ""
    return f"{'> ' * bool(found.censored)}{shown(measure, found.mean, unit=False)}{spread}{sign(measure, found)}"


def sign(measure: Measure, found: Statistics) -> str:
    """Return + (better than the first line), - (worse) or = (within noise), after a space; "" if that is unknown."""
    if found.difference is None or found.within_noise is None or not measure.better:
        return ""
    better = (found.difference > 0) == (measure.better == "more")
    return f" {SIGNS[better if visible(measure, found.difference) and not found.within_noise else None]}"


def visible(measure: Measure, value: float) -> bool:
    """True if the value is not 0 in the digits shown."""
    return any(digit in "123456789" for digit in shown(measure, value, unit=False).partition("e")[0])


def difference(measure: Measure, found: Statistics) -> str:
    if found.difference is None:
        return ""
    said = shown(measure, found.difference, "+", unit=False)
    if found.interval is not None:
        low, high = (shown(measure, each, "+", unit=False) for each in found.interval)
        said += f" ({low} to {high})"
    p = "" if found.p is None else f", p {found.p:.2g}" if found.p >= 0.001 else ", p < 0.001"
    return said + p + ", within noise" * bool(found.within_noise)


def verdict(first: str, seeds: int, measures: Iterable[Measure], lines: Sequence[Mapping[str, Statistics]]) -> str:
    """Return a sentence: by which of score, time and bytes a line is better or worse than the first, beyond noise.
    first: text of the first line. lines: statistics of each line by measure; "" for one line. Signs: see `sign`."""
    if len(lines) < 2:
        return ""
    differ, alike, judged = list[str](), list[str](), set[int]()
    by_name = {
        each.name: each for each in measures if not any(each.name in of and of[each.name].censored for of in lines)
    }
    for words in JUDGED:
        name = next((name for name in words if name in by_name), None)
        if name is None:
            continue
        each = {i: sign(by_name[name], of[name]).strip() for i, of in enumerate(lines[1:], 2) if name in of}
        found = {said: [i for i in each if each[i] == said] for said in SIGNS.values()}
        judged.update(*found.values())
        told = [numbered(found[said], how) for said, how in (("+", "better"), ("-", "worse")) if found[said]]
        if told:
            differ.append(f"by {words[name]}, {' and '.join(told)}")
        elif found["="]:
            alike.append(words[name])
    if not judged:
        return f"No verdict: it takes {FEWEST} seeds with values of two lines to tell a difference from noise."
    left = [i for i in range(2, len(lines) + 1) if i not in judged]
    said = [*differ, *([f"by {listed(alike)}, no line can be told apart"] if alike else [])]
    said += [numbered(left, "without a verdict, for want of values")] if left else []
    return f"Over {counted(seeds, 'seed')}, compared with line 1 ({first}): {'; '.join(said)}."


def numbered(lines: Sequence[int], how: str) -> str:
    """Return "line 3 is better", or "lines 3 and 4 are better"."""
    which = listed([*map(str, lines)])
    return f"lines {which} are {how}" if len(lines) > 1 else f"line {which} is {how}"


def listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def rows(found: dict[str, Any], names: Iterable[str], show: Any) -> tuple[list[str], list[list[str]]]:
    """Return the headings of measures, and for each line the cells that `show` makes. Empty columns are left out."""
    there = {each["name"] for each in found["measures"]}
    titles, columns = [], []
    for measure in filter(None, (measure_of(name) for name in names if name in there)):
        column = [show(measure, Statistics(**line["statistics"][measure.name])) for line in found["lines"]]
        if any(column):
            titles.append(measure.title + (f", {measure.unit.strip()}" if measure.unit else ""))
            columns.append(column)
    return titles, [[column[i] for column in columns] for i in range(len(found["lines"]))]


def as_tables(found: dict[str, Any], names: list[str], width: int) -> list[Table]:
    """Return the tables for a terminal of `width` columns: one of the lines, then tables of as many measures as fit."""
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
    """Return columns (title, then cells) in groups that fit side by side; titles may be broken between words."""
    groups: list[list[list[str]]] = []
    left = 0
    for column in columns:
        if not groups or 3 + least(column) > left:
            groups.append([])
            left = room(column, width)
        groups[-1].append(column)
        left -= 3 + least(column)
    return groups


def widths(columns: list[list[str]], width: int) -> list[int]:
    """Return the widths of columns that fit: the least width of each, then more for its title while there is room.
    Rich would narrow the widest column, and break cells and words although titles have more room than they need."""
    found = [*map(least, columns)]
    left = max(0, room(columns[0], width) - sum(found) - 3 * len(found))
    for i, (title, *_) in enumerate(columns):
        more = max(0, min(left, len(title) - found[i]))
        found[i] += more
        left -= more
    return found


def least(column: list[str]) -> int:
    """Return how many characters wide a column has to be: its longest cell, or the longest word of its title."""
    return max(map(len, [*column[0].split(), *column[1:]]))


def room(column: list[str], width: int) -> int:
    """Return how many of `width` characters the column of line numbers leaves. column: any other one, for its rows."""
    return width - 4 - len(str(len(column) - 1))


def remarks(found: dict[str, Any]) -> list[str]:
    """Return lines to print below the tables: how to read them, failures, early ends, missed targets."""
    said = []
    if len(found["lines"]) > 1 and len(found["seeds"]) > 1:
        signs = "+ better, - worse than line 1, = within noise"
        fewest = f"fewer than {FEWEST} seeds cannot tell noise from a difference"
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
        ends = {number: [run["stopped"] for run in line["runs"]] for number, line in enumerate(found["lines"], 1)}
        if early := [str(number) for number, stopped in ends.items() if "finished" in stopped]:
            which = f"line{'s' * (len(early) > 1)} {', '.join(early)}"
            more = "give more --epochs or --steps to compare at equal budgets"
            said.append(f"{which}: the epochs or steps ended before the budget did; {more}")
    for name, goal in found["target"].items():
        for number, line in enumerate(found["lines"], 1):
            ended = [run for run in line["runs"] if run["failed"] is None]
            missed = [run for run in ended if run["values"].get("steps_to_target") is None]
            if missed:
                said.append(f"line {number}: {len(missed)} of {len(ended)} runs did not reach {name} {goal:g}")
    return said


def markdown(found: dict[str, Any], names: list[str]) -> str:
    """Return table.md: the measures, and their differences to the first line."""
    text = [f"`{code(found['command'])}`", ""]
    paired = "Differences to the first line, paired by seed; p is corrected for the number of lines:"
    parts = [("", cell)] + ([(paired, difference)] if len(found["lines"]) > 1 else [])
    for title, show in parts:
        titles, cells = rows(found, names, show)
        if titles:
            text += [title, ""] * bool(title)
            text += [f"| line | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
            for line, row in zip(found["lines"], cells, strict=True):
                text.append(f"| `{code(line['line'])}` | {' | '.join(row)} |")
            text.append("")
    return "\n".join([*text, *(f"- {code(said)}" for said in remarks(found))]).rstrip("\n") + "\n"


def code(text: str) -> str:
    """Return a user's text as code in a Markdown table may hold it: without backquotes, and with | escaped."""
    return printable(text, allowed="").replace("`", "'").replace("|", "\\|")


def table(found: dict[str, Any]) -> str:
    """Return table.csv: a row for each line, with the statistics of all measures, in the units of results.json."""
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
