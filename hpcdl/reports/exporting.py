"""Export of old runs' metrics for other tools: what --log would have written, from metrics.jsonl, line by line."""

import contextlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import parse_json, unwritable_parent
from hpcdl.formatting import counted
from hpcdl.launch.option_parser import read_file
from hpcdl.metric_lines import MetricLines
from hpcdl.reports.load import METRICS, broken
from hpcdl.reports.watching import is_held
from hpcdl.runs.metric_logs import Csv, ours, write_events


@dataclass
class Target:
    """The output for a run's folder: at `path`, a CSV table (if `table`) or a folder with TensorBoard's events."""

    run: Path
    path: Path
    table: bool

    def check(self, force: bool) -> None:
        """Raise UsageError if the run is unreadable or its output unwritable. force: replace an earlier output."""
        lines = self.run / METRICS
        with blamed_on(f"{lines} cannot be read"), open(lines, "rb"):
            pass
        there = os.path.exists(self.path) if self.table else bool(ours(self.path))
        if there and not force:
            raise UsageError(f"{self.path} exists already: give another --out, or --force to replace it")
        if there and self.run in self.path.parents and is_held(self.run):
            raise UsageError(f"a job is writing to {self.run}, and may write {self.path}: give another --out")
        if parent := unwritable_parent(self.path.parent):
            raise UsageError(f"{self.path} cannot be written: {parent} is no folder in which you may write")


def export(target: Target) -> str:
    """Write the output; return a note of how many lines it has, and how many were broken. Raises UsageError."""
    lines, count = MetricLines(target.run / METRICS), itertools.count()  # of the lines that are read
    read = (line for line, _ in zip(lines, count, strict=False))
    options = None
    with contextlib.suppress(UsageError):
        options = read_file(target.run / "config.yaml", "")
    with blamed_on(f"{target.path} cannot be written"):
        target.path.parent.mkdir(parents=True, exist_ok=True)
        if target.table:
            Csv.begin(target.path, read).close()
        else:
            write_events(target.path, read, began(target.run), options).close()
    said = [f"{target.path}: {counted(next(count), 'line', ',')}"]
    if lines.broken:
        said.append(f"{lines.path}: {broken(lines)}")
    if os.path.getsize(lines.path) > lines.place:
        said.append(f"the last line of {lines.path} is cut off, and left out")
    return "; ".join(said)


def began(run: Path) -> float:
    """Return the start of a run in UNIX seconds: by started.json, else the time of its options or metrics; else 0."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return float(parse_json((run / "started.json").read_text())["started"])
    for name in ("config.yaml", METRICS):
        with contextlib.suppress(OSError):
            return os.path.getmtime(run / name)
    return 0.0
