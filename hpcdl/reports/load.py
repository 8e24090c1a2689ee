"""What runs have recorded, as a table of columns: pandas.DataFrame(hpcdl.reports.load("runs/a")), or polars'.

    step   epoch   train_loss   seconds   test_loss
       1    0.50         2.31      0.02         nan        a step's line
       2    1.00         2.05      0.04         nan
       2    1.00         2.05      0.04        2.10        an evaluation's

A value that a line lacks is NaN; a column of whole numbers without one that is missing stays whole. Columns grow as the
file is read, 8 bytes for each value: there is no line in memory but the last.
"""

import os
import warnings
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hpcdl.errors import UsageError, blamed_on, unknown
from hpcdl.reports.lines import Lines, is_evaluation
from hpcdl.words import counted

METRICS = "metrics.jsonl"
MARKS = (METRICS, "config.yaml", "started.json")  # a folder with one of these is a run's
LATER = "later"  # what a run that has gone back has set aside; no run of its own
KINDS = {"steps": (False,), "evaluations": (True,), "all": (False, True)}
MISSING = float("nan")
INT64 = range(-(2**63), 2**63)
Folder = str | os.PathLike[str]


def load(folder: Folder | Iterable[Folder], what: Literal["steps", "evaluations", "all"] = "all") -> dict[str, Any]:
    """The metrics of a run, of several, or of all below a folder, as numpy arrays of the same length, by name.

    what: which lines of metrics.jsonl: those of steps, of evaluations, or both. Where it is not the folder of one run
    that is named, a column `run` says which run each row is of. Lines that cannot be read are left out, with a warning.

    Raises UsageError where there is no run.
    """
    if what not in KINDS:
        raise unknown("kind of line", what, KINDS)
    folders = [folder] if isinstance(folder, str | os.PathLike) else [*folder]
    runs = runs_of(folders)
    table, names, counts = Table(), [], []
    for name, path in runs.items():
        before, lines = table.rows, Lines(path / METRICS)
        with blamed_on(f"{path / METRICS} cannot be read"):
            if lines.path.exists():  # else the run has recorded nothing yet
                for line in lines:
                    if is_evaluation(line) in KINDS[what]:
                        table.append(line)
        if lines.broken:
            warnings.warn(f"{path / METRICS}: {broken(lines)}", stacklevel=2)
        names.append(name)
        counts.append(table.rows - before)
    columns: dict[str, Any] = table.columns()
    if len(folders) > 1 or not is_run(Path(folders[0])):
        columns = {"run": np.repeat(np.array(names, object), counts)} | columns
    return columns


def broken(lines: Lines) -> str:
    """What is said of lines that could not be read."""
    return f"{counted(lines.broken, 'line')} cannot be read, and {'is' if lines.broken == 1 else 'are'} left out"


def is_run(folder: Path) -> bool:
    """Whether a run has written to this folder."""
    return any(os.path.isfile(folder / mark) for mark in MARKS)


def runs_of(folders: Iterable[Folder]) -> dict[str, Path]:
    """The runs in these folders and below, by their names: paths from the folder, or from what is above all of them.

    Raises UsageError where there is none.
    """
    given = [Path(folder) for folder in folders]
    if not given:
        raise UsageError("name the folder of a run, or one with runs below it")
    above = Path(os.path.commonpath([os.path.abspath(folder) for folder in given]))
    found: dict[str, Path] = {}
    for folder in given:
        with blamed_on(f"{folder} cannot be read"):
            if not os.path.isdir(folder):
                what = "is a file, not the folder of a run" if os.path.exists(folder) else "is not there"
                raise UsageError(f"{folder} {what}")
            below = list(runs_below(folder))
        if not below:
            raise UsageError(f"{folder} is no run's folder ({METRICS} is missing), and there is none below it")
        for run in below:
            name = os.path.relpath(os.path.abspath(run), above)
            found.setdefault(run.name if name == os.curdir else name, run)
    return found


def runs_below(folder: Path) -> Iterator[Path]:
    """The run's folder that this is, or all below it, numbers in names in their order; a run holds no others."""
    for here, below, _ in os.walk(folder):
        path = Path(here)
        if is_run(path):
            below.clear()
            yield path
        below[:] = sorted((name for name in below if name != LATER and not name.startswith(".")), key=natural)


def natural(name: str) -> list[tuple[int, str]]:
    """A key for sorting in which 2-b comes before 10-a."""
    digits = "".join(each if each.isdecimal() else " " for each in name).split()
    rest, key = name, []
    for number in digits:
        text, _, rest = rest.partition(number)
        key += [(-1, text), (int(number), "")]
    return [*key, (-1, rest)]


class Table:
    """Columns that grow row by row."""

    def __init__(self) -> None:
        self.rows = 0
        self.found: dict[str, array[Any]] = {}

    def append(self, line: dict[str, Any]) -> None:
        """One more row."""
        for name, value in line.items():
            column: Any = self.found.get(name)
            if column is None:
                column = self.found[name] = array("q")
            whole = isinstance(value, int) and value in INT64
            if not whole and not isinstance(value, float):
                continue  # null, or what no run writes
            missing = self.rows - len(column)
            if column.typecode == "q" and (missing or not whole):
                column = self.found[name] = array("d", column)
            if missing:
                column.extend([MISSING] * missing)
            column.append(value if whole else float(value))
        self.rows += 1

    def columns(self) -> dict[str, np.ndarray]:
        """All of them, as arrays of one length."""
        found = {}
        for name, column in self.found.items():
            missing = self.rows - len(column)
            whole = column.typecode == "q" and not missing
            values = np.frombuffer(column, column.typecode) if column else np.empty(0)
            found[name] = values if whole else np.concatenate([values.astype(float), np.full(missing, MISSING)])
        return found
