"""Metrics of old runs for other tools: what --log would have written, from metrics.jsonl, line by line."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import parse_json
from hpcdl.formatting import counted
from hpcdl.launch.option_parser import read_file
from hpcdl.reports.lines import MetricLines
from hpcdl.reports.load import METRICS, broken
from hpcdl.reports.watching import is_held
from hpcdl.runs.metric_logs import ours, write_csv, write_events


@dataclass
class Target:
    """The output for a run: a table or a folder of events."""

    run: Path
    path: Path
    table: bool

    def check(self, force: bool) -> None:
        """Raise UsageError where nothing can be read, or nothing be written; force: what is there of us may go."""
        lines = self.run / METRICS
        with blamed_on(f"{lines} cannot be read"), open(lines, "rb"):
            pass
        there = os.path.exists(self.path) if self.table else bool(ours(self.path))
        if there and not force:
            raise UsageError(f"{self.path} is there already: give another --out, or --force to replace it")
        if there and self.run in self.path.parents and is_held(self.run):
            raise UsageError(f"a job is writing to {self.run}, and may write {self.path}: give another --out")
        parent = self.path.absolute().parent
        while not os.path.exists(parent):
            parent = parent.parent
        if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
            raise UsageError(f"{self.path} cannot be written: no permission in {parent}, or it is no folder")


def export(target: Target) -> str:
    """Write it; returns what is to be said: how many lines, and what of them was broken.

    Raises UsageError where a file cannot be read or written.
    """
    lines, count = MetricLines(target.run / METRICS), 0

    def read() -> Iterator[dict[str, Any]]:
        nonlocal count
        for each in lines:
            count += 1
            yield each

    with blamed_on(f"{target.path} cannot be written"):
        target.path.parent.mkdir(parents=True, exist_ok=True)
        if target.table:
            write_csv(target.path, read()).close()
        else:
            write_events(target.path, read(), began(target.run), options(target.run)).close()
    said = [f"{target.path}: {counted(count, 'line', ',')}"]
    if lines.broken:
        said.append(f"of {lines.path} {broken(lines)}")
    if os.path.getsize(lines.path) > lines.place:
        said.append(f"the last line of {lines.path} is cut off, and left out")
    return "; ".join(said)


def began(run: Path) -> float:
    """Return the start of a run in UNIX seconds: by started.json, else by the time of its options' file."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return float(parse_json((run / "started.json").read_text())["started"])
    for name in ("config.yaml", METRICS):
        with contextlib.suppress(OSError):
            return os.path.getmtime(run / name)
    return 0.0


def options(run: Path) -> dict[str, Any] | None:
    """Return the run's options as texts; None if they cannot be read."""
    with contextlib.suppress(UsageError):
        return read_file(run / "config.yaml", "")
    return None
