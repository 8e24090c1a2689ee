"""What one run's folder says: options, summary, and its metrics thinned; and in a line each what it lacks.

Each file may be missing, cut, of another version, or not ours at all: what can be read is taken, and the rest is said.
"""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hpcdl.files import parse_json
from hpcdl.formatting import counted
from hpcdl.reports.downsampling import Thinned
from hpcdl.reports.lines import MetricLines, is_evaluation

SCHEMA_VERSION = 2  # of summary.json, as hpcdl/runs/summary.py writes it
LARGEST = 100_000_000  # bytes of a JSON file that is read as a whole
LARGEST_CONFIG = 1_000_000
FORMS = 100  # sets of names in lines that are remembered
STEP = ("step", "epoch", "seconds", "train_loss", "learning_rate")
SCORES = ("accuracy", "rmse", "return")
EVALUATION = (
    *STEP,
    *(f"{part}_{score}" for part in ("test", "validation") for score in ("loss", *SCORES)),
    *("consensus_distance", "consensus_distance_max", "bytes", "messages"),
)
HEADER = re.compile(r"# ([\w .-]+): (.*)")


@dataclass
class Recorded:
    """A run as its folder tells it. steps, evaluations: of metrics.jsonl; missing: what is not shown, and why."""

    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    started: dict[str, Any] = field(default_factory=dict)
    header: dict[str, str] = field(default_factory=dict)  # of config.yaml: launch, commit, versions, machine
    options: dict[str, Any] = field(default_factory=dict)
    steps: Thinned = field(default_factory=lambda: Thinned(STEP))
    evaluations: Thinned = field(default_factory=lambda: Thinned(EVALUATION))
    missing: list[str] = field(default_factory=list)

    def said(self, name: str) -> Any:
        """Return an entry of the summary, else of started.json."""
        value = self.summary.get(name)
        return self.started.get(name) if value is None else value

    @property
    def score(self) -> str:
        """Name of the score beside the loss in lines: accuracy, rmse or return; "" without one."""
        mean = self.evaluations.mean
        known = [name for name in EVALUATION if name in mean and np.isfinite(mean[name]).any()]
        return next((each for each in SCORES if {f"test_{each}", f"validation_{each}"} & {*known}), "")


def record(folder: Path) -> Recorded:
    """Read a run's folder, except its trace."""
    found = Recorded(folder)
    read_config(found)
    summary = read_json(folder / "summary.json", found.missing)
    if summary is None:
        if not (folder / "summary.json").exists():
            found.missing.append("no summary: the run goes on, or was killed, and what it cost each rank is not known")
    elif summary.get("schema_version") != SCHEMA_VERSION:
        version = str(summary.get("schema_version"))[:20]
        found.missing.append(f"summary.json is of version {version}, and version {SCHEMA_VERSION} is read: left out")
    else:
        found.summary = summary
    if (folder / "started.json").exists():
        found.started = read_json(folder / "started.json", found.missing) or {}
    if isinstance(options := found.summary.get("options"), dict):
        found.options |= options
    read_metrics(found)
    return found


def read_config(found: Recorded) -> None:
    """Read options and header of config.yaml."""
    path = found.folder / "config.yaml"
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "it is no file")  # a pipe would be waited for
        with open(path, "rb") as file:
            text = file.read(LARGEST_CONFIG).decode(errors="replace")
        found.header = {match[1]: match[2] for line in text.splitlines() if (match := HEADER.fullmatch(line))}
        options = yaml.load(text, yaml.BaseLoader)
        found.options = options if isinstance(options, dict) else {}
    except OSError as error:
        found.missing.append(f"no options: config.yaml: {error.strerror}")
    except Exception:  # whatever YAML raises, RecursionError too
        found.missing.append("no options: config.yaml is no YAML")


def read_json(path: Path, missing: list[str]) -> dict[str, Any] | None:
    """The object in a file; None, and where it is there a line that says why, where it cannot be read."""
    if not path.exists():
        return None
    why = "it holds no object"
    try:
        if not path.is_file():
            why = "it is no file"
        elif os.path.getsize(path) > LARGEST:
            why = f"it has more than {LARGEST:,} bytes"
        else:
            found = parse_json(path.read_bytes())
            if isinstance(found, dict):
                return found
    except OSError as error:
        why = error.strerror or "no reason given"
    except ValueError:
        why = "it is cut off, or no JSON"
    missing.append(f"{path.name} cannot be read: {why}")
    return None


def read_metrics(found: Recorded) -> None:
    """Read and downsample metrics.jsonl."""
    path = found.folder / "metrics.jsonl"
    lines = MetricLines(path)
    known: dict[tuple[str, ...], Callable[[dict[str, Any]], None]] = {}  # lines have few sets of names, in one order
    try:
        for line in lines:
            add = known.get(names := tuple(line))
            if add is None:
                add = (found.evaluations if is_evaluation(line) else found.steps).add
                if len(known) < FORMS:
                    known[names] = add
            add(line)
        cut = os.path.getsize(path) > lines.place
    except OSError as error:
        found.missing.append(f"no curves: metrics.jsonl: {error.strerror}")
        return
    if lines.broken:
        found.missing.append(f"metrics.jsonl: {counted(lines.broken, 'broken line', ',')} left out")
    if cut:
        found.missing.append("metrics.jsonl: the last line is cut off, and left out")
    if not len(found.steps) and not len(found.evaluations):
        found.missing.append("no curves: metrics.jsonl has no lines yet")
    for reader in (found.steps, found.evaluations):
        with contextlib.suppress(ValueError):
            len(reader)  # bin what is left
