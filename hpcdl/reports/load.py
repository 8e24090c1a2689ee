"""Recorded metrics of runs as a table of columns: pandas.DataFrame(hpcdl.reports.load("runs/a")), or polars'.

step   epoch   train_loss   seconds   test_loss
   1    0.50         2.31      0.02         nan        a step's line
   2    1.00         2.05      0.04         nan
   2    1.00         2.05      0.04        2.10        an evaluation's"""

import os
import warnings
from array import array
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hpcdl.errors import UsageError, blamed_on, unknown
from hpcdl.formatting import counted
from hpcdl.metric_lines import MetricLines, is_evaluation
from hpcdl.reports.discovery import below
from hpcdl.search.search_log_reader import read

METRICS = "metrics.jsonl"
KINDS = {"steps": (False,), "evaluations": (True,), "all": (False, True)}
MISSING = float("nan")
INT64 = range(-(2**63), 2**63)
Folder = str | os.PathLike[str]


def load(folder: Folder | Iterable[Folder], what: Literal["steps", "evaluations", "all"] = "all") -> dict[str, Any]:
    """Return the metrics of a run, of several, or of all below a folder: numpy arrays by name, NaN where missing.
    what: lines of steps, of evaluations, or all. Unless `folder` is one run's, a column `run` names the run of each
    row. Invalid lines are left out, with a warning. Raises UsageError if there is no run."""
    if what not in KINDS:
        raise unknown("kind of line", what, KINDS)
    folders = [folder] if isinstance(folder, str | os.PathLike) else [*folder]
    runs = runs_of(folders)
    table, counts = GrowingTable(), []
    for path in runs.values():
        before, lines = table.rows, MetricLines(path / METRICS)
        with blamed_on(f"{path / METRICS} cannot be read"):
            if lines.path.exists():  # else the run has recorded nothing yet
                for line in lines:
                    if is_evaluation(line) in KINDS[what]:
                        table.append(line)
        if lines.broken:
            warnings.warn(f"{path / METRICS}: {broken(lines)}", stacklevel=2)
        counts.append(table.rows - before)
    columns: dict[str, Any] = table.columns()
    if len(folders) > 1 or [*runs.values()] != [Path(folders[0])]:
        columns = {"run": np.repeat(np.array([*runs], object), counts)} | columns
    return columns


def trials(folder: Folder) -> list[dict[str, Any]]:
    """Return the trials of a search by number, a dictionary each: pandas.DataFrame(hpcdl.reports.trials("search")).
    values: by parameter. score: None for a trial that has failed (failed: why) or has not ended. amount: epochs, 0
    for a whole training. seconds: of all its pieces and seeds. Raises UsageError if there is no search."""
    names = ("trial", "status", "score", "spread", "scores", "rung", "amount", "seconds", "steps", "failed", "folder")
    return [{name: getattr(row, name) for name in names} | {"values": row.values} for row in read(Path(folder)).rows()]


def broken(lines: MetricLines) -> str:
    return f"{counted(lines.broken, 'line')} cannot be read, and {'is' if lines.broken == 1 else 'are'} left out"


def runs_of(folders: Iterable[Folder]) -> dict[str, Path]:
    """Return the runs in and below these folders, by path from their common parent. UsageError if there is none."""
    given = [Path(folder) for folder in folders]
    if not given:
        raise UsageError("give the folder of a run, or a folder with runs below it")
    above = os.path.commonpath([os.path.abspath(folder) for folder in given])
    found: dict[str, Path] = {}
    for folder in given:
        with blamed_on(f"{folder} cannot be read"):
            if not os.path.isdir(folder):
                what = "is a file, not the folder of a run" if os.path.exists(folder) else "does not exist"
                raise UsageError(f"{folder} {what}")
            runs = below(folder, within=True).runs
        if not runs:
            raise UsageError(f"{folder} is no run's folder ({METRICS} is missing), and no folder below it is one")
        for run in runs:
            name = os.path.relpath(os.path.abspath(run), above)
            found.setdefault(run.name if name == os.curdir else name, run)
    return found


class GrowingTable:
    """Columns that grow by rows."""

    def __init__(self) -> None:
        self.rows = 0
        self.found: defaultdict[str, array[Any]] = defaultdict(lambda: array("q"))

    def append(self, line: dict[str, Any]) -> None:
        for name, value in line.items():
            column = self.found[name]
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
        found = {}
        for name, column in self.found.items():
            missing = self.rows - len(column)
            whole = column.typecode == "q" and not missing
            values = np.frombuffer(column, column.typecode) if column else np.empty(0)
            found[name] = values if whole else np.concatenate([values.astype(float), np.full(missing, MISSING)])
        return found
