"""A table of runs, a row for each: what it trained, its score, its cost, and how it has ended (`hpcdl runs`).

state        ended: its reason to stop (finished, signal, failed, ...)        running: a process holds its folder
             dead: no process holds it, and no end is recorded                unknown: where locks are not seen"""

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hpcdl.errors import UsageError, unknown
from hpcdl.files import finite
from hpcdl.formatting import size, spent, table
from hpcdl.metric_lines import MetricLines, is_evaluation
from hpcdl.reports.run_reader import Recorded, read_config, read_json
from hpcdl.reports.watching import SCORES, is_held, logged_end

STATES = {True: "running", False: "dead", None: "unknown"}
TEXTS = ("run", "strategy", "model", "data", "score", "state")  # columns that are aligned to the left


class RunRow(NamedTuple):
    """A run. score: name of the main score, value: its last value. seconds: of steps. bytes: sent by all ranks."""

    run: str
    strategy: str
    model: str
    data: str
    ranks: int | None
    steps: int | None
    score: str
    value: float | None
    seconds: float | None
    bytes: int | None
    state: str


def read_row(name: str, folder: Path) -> RunRow:
    """Return the row of a run, from its summary, else from what it wrote at its start and its last evaluation."""
    found = Recorded(folder)
    read_config(found)
    summary = read_json(folder / "summary.json", []) or {}
    about = found.options | (read_json(folder / "started.json", []) or {}) | summary
    last = summary if any(finite(summary.get(each)) for each in SCORES) else last_evaluation(folder)
    score = next((each for each in SCORES if finite(last.get(each))), "")
    sent = summary.get("bytes_sent_per_rank")
    total = sum(filter(finite, sent)) if isinstance(sent, list) else last.get("bytes")

    def text(name: str) -> str:
        return str(about.get(name) or "")

    def number(value: Any) -> Any:
        return value if finite(value) else None

    return RunRow(
        name,
        text("strategy"),
        text("model"),
        text("data"),
        number(about.get("ranks")),
        number(summary.get("steps", last.get("step"))),
        score,
        number(last.get(score)),
        number(summary.get("seconds", last.get("seconds"))),
        number(total),
        state_of(folder, summary),
    )


def state_of(folder: Path, summary: dict[str, Any]) -> str:
    """Return the state of a run. A run that was resumed has the summary of an earlier leg, if any."""
    held = is_held(folder)
    ended = "" if held else logged_end(folder) or str(summary.get("stopped") or "")
    return ended.partition(": ")[0] or STATES[held]  # without the error of a run that failed


def last_evaluation(folder: Path) -> dict[str, Any]:
    """Return the last evaluation in a run's metrics.jsonl; empty if there is none."""
    last: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for each in MetricLines(folder / "metrics.jsonl"):
            if is_evaluation(each):
                last = each
    return last


def ordered(rows: list[RunRow], name: str, down: bool) -> list[RunRow]:
    """Return the rows in order of a column, from small to large or `down`, missing values last. UsageError for an
    unknown column."""
    if name not in RunRow._fields:
        raise UsageError(f"--sort: {unknown('column', name, RunRow._fields)}")
    there = [row for row in rows if getattr(row, name) not in (None, "")]
    missing = [row for row in rows if getattr(row, name) in (None, "")]
    return sorted(there, key=lambda row: getattr(row, name), reverse=down) + missing


def text_of(rows: Iterable[RunRow]) -> list[str]:
    """Return the rows as aligned lines, under the names of the columns."""
    lines = [list(RunRow._fields)]
    for row in rows:
        value = math.nan if row.value is None else row.value
        shown = f"{100 * value:.2f}%" if row.score.endswith("accuracy") else f"{value:.6g}"
        cells = {
            "value": shown if row.score else "-",
            "seconds": "-" if row.seconds is None else spent(row.seconds),
            "bytes": size(math.nan if row.bytes is None else row.bytes),
        }
        lines.append([cells.get(name, "-" if each is None else str(each)) for name, each in row._asdict().items()])
    return table(lines, [RunRow._fields.index(name) for name in TEXTS])
