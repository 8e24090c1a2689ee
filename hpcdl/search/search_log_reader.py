"""Reads the journal of a search (journal.py) into rows of trials, for tables and pictures.

A piece of a trial is its training from one rung to the next, once with each seed. A piece's score is the mean over the
seeds; if a seed fails, the trial fails. Unreadable lines (a running or killed search, another version) are left out."""

import contextlib
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from hpcdl.errors import UsageError, blamed_on, printable
from hpcdl.files import finite
from hpcdl.search.journal import NAME as JOURNAL
from hpcdl.search.journal import VERSION, object_of
from hpcdl.search.space import Parameter, read_parameter

MOST = 2**31  # upper bound of a count in a journal


@dataclass
class TrialPiece:
    """Training of a trial up to a rung. By seed: scores, failed (messages), seconds, more (further results). at: when
    the last seed ended, in seconds of the search over all its launches; None: not yet, or the journal has no times."""

    rung: int = 0
    amount: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    parent: int | None = None
    scores: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    more: dict[int, dict[str, Any]] = field(default_factory=dict)
    at: float | None = None

    def score(self, seeds: int) -> float | None:
        """Return the mean score over `seeds` seeds; None before all of them have ended, or if one has failed."""
        return math.fsum(self.scores.values()) / len(self.scores) if len(self.scores) >= seeds else None

    def ended(self, seeds: int) -> bool:
        return len(self.scores) + len(self.failed) >= seeds


@dataclass
class TrialRow:
    """A trial. values, rung, amount (epochs; 0: whole), score, parent: of a failed piece, else the last with a score.
    scores: by seed. spread: their standard deviation, of a sample; None: one seed. loss: score, negated if larger is
    better. failed: why there is no score; None: not failed. seconds: of all pieces and seeds. steps: of all seeds up to
    this piece; None: unknown. status: ended, failed or begun. folder: relative to the search's folder."""

    trial: int
    values: dict[str, Any]
    rung: int
    amount: float
    scores: list[float]  # hpcdl/reports/load.py reads it by its name
    score: float | None
    loss: float | None
    spread: float | None
    failed: str | None
    seconds: float
    steps: int | None
    status: str
    parent: int | None
    folder: str
    pieces: list[TrialPiece]


class EndedPiece(NamedTuple):
    """A piece that has ended. score: None if it failed. trials: number of trials that have an ended piece by now."""

    trial: int
    piece: TrialPiece
    score: float | None
    trials: int


class Trials:
    """State of a search, built from the events of its journal in their order. settings: of the journal's first line.
    ended: pieces in the order of their ends. running: start times (UNIX seconds; None: unknown) of running jobs, by
    (trial, rung, seed). groups: number of groups in the last launch. missing: notes on lines that could not be read."""

    def __init__(self, settings: dict[str, Any] | None = None):
        self.settings: dict[str, Any] = settings or {}
        self.pieces: dict[int, dict[int, TrialPiece]] = {}
        self.ended: list[EndedPiece] = []
        self.running: dict[tuple[int, int, int], float | None] = {}
        self.groups = 1
        self.missing: list[str] = []
        self._before, self._leg, self._last = 0.0, math.nan, math.nan
        self._seen: set[int] = set()
        self._rows: dict[int, TrialRow] = {}  # cache; events drop their trial's row

    @property
    def seeds(self) -> int:
        """The number of repetitions of each point."""
        return max(1, as_count(self.settings.get("seeds")) or 1)

    @property
    def asked(self) -> int | None:
        """The number of trials that were requested; None if unknown."""
        return as_count(self.settings.get("trials")) or None

    @property
    def objective(self) -> str:
        return str(self.settings.get("objective") or "score")

    @property
    def maximize(self) -> bool:
        return self.settings.get("maximize") is True

    @property
    def percent(self) -> bool:
        return self.objective.endswith("accuracy")

    def take(self, event: Any) -> EndedPiece | None:
        """Process one event; return the piece that this event ends, or None. Unknown events are ignored."""
        if not isinstance(event, dict):
            return None
        kind, time = event.get("event"), finite(event.get("time"))
        begins = kind == "leg" and "trial" not in event  # jobs of a single trial each run concurrently
        self._tick(begins, time)
        if kind == "search":
            settings = event.get("settings")
            self.settings = settings if isinstance(settings, dict) else {}
            self._rows.clear()
            if event.get("version") != VERSION:
                note = f"has version {str(event.get('version'))[:20]}, and this hpcdl reads version {VERSION}"
                self.missing.append(f"{JOURNAL} {note}: some events may be left out")
        elif begins:
            self.running.clear()
            self.groups = max(1, as_count(event.get("groups")) or 1)
        elif kind in ("begin", "again", "end", "stop"):  # stop: in memory only, an interrupted job
            key = tuple(as_count(event.get(name)) for name in ("trial", "rung", "seed"))
            if None not in key:
                return self._of_a_piece(str(kind), key, event, time)  # type: ignore[arg-type]
        return None

    def _tick(self, begins: bool, time: float | None) -> None:
        """Count the time until an event; None: no time. begins: a launch begins; the pause before it is left out."""
        if time is None:
            return
        if begins or math.isnan(self._leg):
            if not math.isnan(self._last):
                self._before += max(0.0, self._last - self._leg)
            self._leg = time
        self._last = time if math.isnan(self._last) or begins else max(time, self._last)

    @property
    def seconds(self) -> float | None:
        """Seconds of the search until the last event, summed over its launches; None if the journal has no times."""
        return None if math.isnan(self._leg) else self._before + self._last - self._leg

    def _of_a_piece(self, kind: str, key: tuple[int, int, int], event: dict[str, Any], time: float | None) -> Any:
        trial, rung, seed = key
        self._rows.pop(trial, None)
        piece = self.pieces.setdefault(trial, {}).setdefault(rung, TrialPiece(rung))
        if kind == "stop":
            self.running.pop(key, None)
            return None
        if kind != "end":
            self.running[key] = time
            values, amount = event.get("values"), finite(event.get("amount"))
            if isinstance(values, dict):  # a space has texts and finite numbers
                known = [isinstance(value, str) or finite(value) is not None for value in values.values()]
                piece.values = {str(name): value for name, value in compress(values.items(), known)}
            piece.amount = piece.amount if amount is None else max(0.0, amount)
            piece.parent = as_count(event["parent"]) if "parent" in event else piece.parent
            return None
        if seed in piece.scores or seed in piece.failed or seed >= self.seeds:
            return None
        self.running.pop(key, None)
        score, failed, more = finite(event.get("score")), event.get("failed"), event.get("more")
        if failed is None and score is not None:
            piece.scores[seed] = score
        else:
            piece.failed[seed] = str(failed) if failed is not None else f"its score is {event.get('score')}"
        piece.seconds[seed] = max(0.0, finite(event.get("seconds")) or 0.0)
        piece.more[seed] = more if isinstance(more, dict) else {}
        if not piece.ended(self.seeds):
            return None
        piece.at = None if time is None else self.seconds
        self._seen.add(trial)
        self.ended.append(EndedPiece(trial, piece, piece.score(self.seeds), len(self._seen)))
        return self.ended[-1]

    def row(self, trial: int) -> TrialRow:
        pieces = [piece for _, piece in sorted(self.pieces[trial].items())]
        failed_piece = next((piece for piece in pieces if piece.failed), None)
        scored = [piece for piece in pieces if piece.score(self.seeds) is not None]
        last = failed_piece or (scored or pieces)[-1]
        score = None if failed_piece else last.score(self.seeds)
        scores = [last.scores[seed] for seed in sorted(last.scores)]
        failed = None
        if failed_piece:
            seed, why = min(failed_piece.failed.items())
            failed = f"seed {seed}: {why}" if self.seeds > 1 else why
        steps = [as_count(more.get("steps")) for more in last.more.values()]
        return TrialRow(
            trial=trial,
            values=last.values,
            rung=last.rung,
            amount=last.amount,
            scores=scores,
            score=score,
            loss=None if score is None else -score if self.maximize else score,
            spread=deviation(scores) if score is not None else None,
            failed=failed,
            seconds=math.fsum(each for piece in pieces for each in piece.seconds.values()),
            steps=sum(each or 0 for each in steps) if steps and None not in steps else None,
            status="failed" if failed_piece else "ended" if pieces[-1].ended(self.seeds) else "begun",
            parent=last.parent,
            folder=f"trials/{trial:04d}",
            pieces=pieces,
        )

    def rows(self) -> list[TrialRow]:
        """Return the rows of all trials that have begun, in the order of their numbers."""
        self._rows.update((trial, self.row(trial)) for trial in self.pieces if trial not in self._rows)
        return [self._rows[trial] for trial in sorted(self.pieces)]

    def axes(self) -> list[Parameter]:
        """Return the parameters of the space, from the settings and from the values of the trials."""
        lines, axes = self.settings.get("space"), dict[str, Parameter]()
        for line in lines if isinstance(lines, list) else ():
            with contextlib.suppress(UsageError):
                if isinstance(line, str):
                    axis = read_parameter(line)
                    axes[axis.name] = axis
        values: dict[str, list[Any]] = {}
        for pieces in self.pieces.values():
            for piece in pieces.values():
                for name, value in piece.values.items():
                    values.setdefault(name, []).append(value)
        for name, observed in values.items():
            numbers = not any(isinstance(value, str) for value in observed)
            if name not in axes and numbers:
                kind = "int" if all(isinstance(each, int) for each in observed) else "float"
                axes[name] = Parameter(name, kind, low=min(observed), high=max(observed))
            elif name not in axes:
                axes[name] = Parameter(name)
            elif axes[name].kind != "choice" and not numbers:
                axes[name] = replace(axes[name], kind="choice", log=False)
            if axes[name].kind == "choice":
                more = [str(each) for each in axes[name].choices]
                axes[name] = replace(axes[name], choices=(*dict.fromkeys([*more, *map(str, observed)]),))
        return [*axes.values()]


def read(folder: Path) -> Trials:
    """Read the journal of the search in `folder` into Trials. Raises UsageError if it is missing or unreadable."""
    trials, broken = Trials(), 0
    path = folder / JOURNAL
    with blamed_on(f"{path} cannot be read"):
        if not path.is_file():
            raise UsageError(f"{folder} is not the folder of a search: {JOURNAL} is missing")
        with open(path, "rb") as file:
            for line in file:
                event = object_of(line)
                if event is not None:
                    trials.take(event)
                elif line.endswith(b"\n") and line.strip():  # else: the writer died here, or is still writing
                    broken += 1
    if not trials.settings:
        trials.missing.append(f"{JOURNAL} does not begin with the settings of a search: they are not known")
    if broken:
        trials.missing.append(f"{broken} of the lines of {JOURNAL} cannot be read, and are left out")
    return trials


def is_search(folder: Path) -> bool:
    """True if the folder holds the journal of a search."""
    try:
        with open(folder / JOURNAL, "rb") as file:
            first = object_of(file.readline(1 << 20))
    except OSError:
        return False
    return first is not None and first.get("event") == "search"


def best(rows: Iterable[TrialRow], count: int | None = None) -> list[TrialRow]:
    """Return `count` (None: all) rows with a score: most training first, as only equal training compares; then best."""
    scored = [row for row in rows if row.loss is not None]
    return sorted(scored, key=lambda row: (-extent(row.amount), row.loss, row.trial))[:count]


def extent(amount: float) -> float:
    """Return an amount of training as a number to compare: infinity for 0, which means the whole training."""
    return amount or math.inf


def as_count(value: Any) -> int | None:
    """Return the value if it is an integer from 0 to MOST - 1, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else None


def deviation(values: list[float]) -> float | None:
    """Return the standard deviation of a sample; None if there are fewer than two values, or they overflow."""
    with contextlib.suppress(statistics.StatisticsError, OverflowError):
        return statistics.stdev(values)
    return None


def number_text(value: Any) -> str:
    """Return a parameter's value for display: a text as it is, an integer with commas, a float with four digits."""
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def score_text(trials: Trials, score: float | None, spread: float | None = None) -> str:
    """Return a score for display (None: a dash), with `spread`, its deviation over the seeds, if given."""
    if score is None:
        return "-"
    form = ".2%" if trials.percent else ".4g"
    return format(score, form) + (f" ± {format(spread, form)}" if spread is not None else "")


def values_text(row: TrialRow) -> str:
    """Return the values of a row for display: lr=0.0621 model=mlp:64."""
    return printable(" ".join(f"{name}={number_text(value)}" for name, value in row.values.items()), allowed="")
