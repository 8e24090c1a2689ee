"""Reading of a run's folder: options, summary, downsampled metrics, and a sentence for each part that it lacks.
A file may be missing, incomplete, of another version or another program: what can be read is used."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hpcdl.files import parse_json
from hpcdl.formatting import counted
from hpcdl.metric_lines import MetricLines, is_evaluation
from hpcdl.reports.downsampling import Thinned

SCHEMA_VERSION = 2  # of summary.json, as hpcdl/runs/summary.py writes it
LARGEST = 100_000_000  # bytes of a JSON file that is read as a whole
LARGEST_CONFIG = 1_000_000
FORMS = 100  # remembered sets of names in lines
STEP = ("step", "epoch", "seconds", "train_loss", "learning_rate")
SCORES = ("accuracy", "rmse", "rmse_standardized", "return")
EVALUATION = (
    *STEP,
    *(f"{part}_{score}" for part in ("test", "validation") for score in ("loss", *SCORES)),
    *("consensus_distance", "consensus_distance_max", "bytes", "messages"),
)
HEADER = re.compile(r"# ([\w .-]+): (.*)")


@dataclass
class Recorded:
    """A run as read from its folder. steps, evaluations: of metrics.jsonl. missing: a sentence for each absent part."""

    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    started: dict[str, Any] = field(default_factory=dict)
    header: dict[str, str] = field(default_factory=dict)  # of config.yaml: launch, commit, versions, machine
    options: dict[str, Any] = field(default_factory=dict)
    steps: Thinned = field(default_factory=lambda: Thinned(STEP))
    evaluations: Thinned = field(default_factory=lambda: Thinned(EVALUATION))
    missing: list[str] = field(default_factory=list)
    drawn: list[Any] = field(default_factory=list)  # its pictures in a page (hpcdl/reports/page.py)

    def said(self, name: str) -> Any:
        """Return an entry of the summary, else of started.json."""
        value = self.summary.get(name)
        return self.started.get(name) if value is None else value

    @property
    def score(self) -> str:
        """The name of the score beside the loss: accuracy, rmse, rmse_standardized or return; "" without one."""
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
            found.missing.append("no summary: the run is running or was killed, and the costs of its ranks are unknown")
    elif summary.get("schema_version") != SCHEMA_VERSION:
        version = str(summary.get("schema_version"))[:20]
        found.missing.append(f"summary.json has version {version}, but hpcdl reads version {SCHEMA_VERSION}: left out")
    else:
        found.summary = summary
    found.started = read_json(folder / "started.json", found.missing) or {}
    if isinstance(options := found.summary.get("options"), dict):
        found.options |= options
    read_metrics(found)
    return found


def read_config(found: Recorded) -> None:
    path = found.folder / "config.yaml"
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "it is no file")  # reading a pipe would wait
        with open(path, "rb") as file:
            text = file.read(LARGEST_CONFIG).decode(errors="replace")
        found.header = {match[1]: match[2] for line in text.splitlines() if (match := HEADER.fullmatch(line))}
        options = yaml.load(text, yaml.BaseLoader)
        found.options = options if isinstance(options, dict) else {}
    except OSError as error:
        found.missing.append(f"no options: config.yaml: {error.strerror}")
    except Exception:  # YAML may raise many kinds, RecursionError too
        found.missing.append("no options: config.yaml is not valid YAML")


def read_json(path: Path, missing: list[str]) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is none. If the file exists, `missing` gets the reason."""
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
    lines = MetricLines(found.folder / "metrics.jsonl")
    known: dict[tuple[str, ...], Thinned] = {}  # lines have few sets of names, in one order
    try:
        for line in lines:
            table = known.get(names := tuple(line))
            if table is None:
                table = found.evaluations if is_evaluation(line) else found.steps
                if len(known) < FORMS:
                    known[names] = table
            table.add(line)
        cut = os.path.getsize(lines.path) > lines.place
    except OSError as error:
        found.missing.append(f"no curves: metrics.jsonl: {error.strerror}")
        return
    if lines.broken:
        found.missing.append(f"metrics.jsonl: {counted(lines.broken, 'broken line', ',')} left out")
    if cut:
        found.missing.append("metrics.jsonl: the last line is cut off, and left out")
    if not any([len(found.steps), len(found.evaluations)]):  # a list: each bins what is left
        found.missing.append("no curves: metrics.jsonl has no lines yet")
