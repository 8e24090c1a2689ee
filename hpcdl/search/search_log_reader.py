"""Reads the journal of a search into rows of trials, for tables and pictures.

    search         the settings, in the first line
    leg            a job begins or continues the search, in a number of groups of ranks
    begin, again   a group begins a piece of a trial: this rung, this seed; again: it was interrupted
    end            the piece has ended, with a score or with a line that says why there is none

A piece of a trial is its training from one rung to the next, once with each seed. Its score is the mean over the seeds;
if one of them fails, the trial fails. A row shows the last piece that has a score.

The search may be running, killed or of another version: lines that cannot be read are left out.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hpcdl.errors import UsageError, blamed_on, printable
from hpcdl.files import parse_json

JOURNAL = "journal.jsonl"
VERSION = 1
MOST = 2**31  # upper bound of a count in a journal
RANGE = re.compile(r"(?:(log|int):)?([-+\d.eE]+?)\.\.([-+\d.eE]+)(:log)?")


class Axis(NamedTuple):
    """A parameter of a space as tables and pictures need it. kind: choice, float or int; condition: (name, value) of
    the parameter on which it depends."""

    name: str
    kind: str = "choice"
    choices: tuple[Any, ...] = ()
    low: float = math.nan
    high: float = math.nan
    log: bool = False
    condition: tuple[str, Any] | None = None


@dataclass
class TrialPiece:
    """Training of a trial up to a rung. By seed: scores, failure messages, seconds, further results.

    at: seconds of the search, over all its jobs, when the last seed ended; None before, or if the journal has no times.
    """

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
        """Return the mean over the seeds; None before all have ended, or if one has failed."""
        return math.fsum(self.scores.values()) / len(self.scores) if len(self.scores) >= seeds else None

    def ended(self, seeds: int) -> bool:
        """True if all seeds have ended."""
        return len(self.scores) + len(self.failed) >= seeds


@dataclass
class TrialRow:
    """A trial: the values, amount (epochs; 0: whole) and score of its last piece that has one.

    scores: by seed. spread: standard deviation of the sample; None for one seed. loss: the score with sign such that
    smaller is better. failed: why it has no score. seconds: of all its pieces and seeds; steps: of all seeds up to this
    piece. status: ended, failed or begun. folder: relative to the search's.
    """

    trial: int
    values: dict[str, Any]
    rung: int
    amount: float
    scores: list[float]
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

    @property
    def rungs(self) -> int:
        """The number of pieces."""
        return len(self.pieces)


class EndedPiece(NamedTuple):
    """A piece that has ended, in the order of the journal. trials: number of trials with an ended piece, including
    this."""

    trial: int
    piece: TrialPiece
    score: float | None
    trials: int


class RunningJob(NamedTuple):
    """The job that a group of ranks runs now. since: start time in UNIX seconds."""

    trial: int
    rung: int
    seed: int
    group: int | None
    since: float | None


class Trials:
    """State of a search, built from the events of its journal in their order.

    settings: of the first line. ended: ended pieces in order. running: running jobs by trial, rung and seed. groups: of
    the last job. missing: notes on what could not be read.
    """

    def __init__(self, settings: dict[str, Any] | None = None):
        self.settings: dict[str, Any] = settings or {}
        self.pieces: dict[int, dict[int, TrialPiece]] = {}
        self.ended: list[EndedPiece] = []
        self.running: dict[tuple[int, int, int], RunningJob] = {}
        self.groups = 1
        self.missing: list[str] = []
        self._before, self._leg, self._last = 0.0, math.nan, math.nan
        self._seen: set[int] = set()
        self._rows: dict[int, TrialRow] = {}  # cache; events drop their trial's row

    # -- settings ---------------------------------------------------------------------------------------------------

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
        """The name of the score."""
        return str(self.settings.get("objective") or "score")

    @property
    def maximize(self) -> bool:
        """True if larger scores are better."""
        return self.settings.get("maximize") is True

    @property
    def percent(self) -> bool:
        """True if the score is shown in percent."""
        return self.objective.endswith("accuracy")

    # -- events --------------------------------------------------------------------------------------------------------

    def take(self, event: Any) -> EndedPiece | None:
        """Process one event; return the piece that has ended with it, if any. Unknown events are ignored."""
        if not isinstance(event, dict):
            return None
        kind, time = event.get("event"), finite(event.get("time"))
        self._tick(
            begins := kind == "leg" and "trial" not in event, time
        )  # jobs of a single trial each run concurrently
        if kind == "search":
            settings = event.get("settings")
            self.settings = settings if isinstance(settings, dict) else {}
            self._rows.clear()
            if event.get("version") != VERSION:
                note = f"is of version {str(event.get('version'))[:20]}, and version {VERSION} is read"
                self.missing.append(f"{JOURNAL} {note}: some of it may be left out")
        elif begins:
            self.running.clear()
            self.groups = max(1, as_count(event.get("groups")) or 1)
        elif kind in ("begin", "again", "end", "stop"):  # stop: in memory only, an interrupted job
            key = tuple(as_count(event.get(name)) for name in ("trial", "rung", "seed"))
            if None not in key:
                return self._of_a_piece(str(kind), key, event, time)  # type: ignore[arg-type]
        return None

    def _tick(self, begins: bool, time: float | None) -> None:
        """Advance the time of the search: seconds within jobs count, those between jobs do not."""
        if time is None:
            return
        if begins or math.isnan(self._leg):
            if not math.isnan(self._last):
                self._before += max(0.0, self._last - self._leg)
            self._leg = time
        self._last = time if math.isnan(self._last) or begins else max(time, self._last)

    @property
    def seconds(self) -> float | None:
        """Seconds of the search, over all its jobs, until the last event; None if the journal has no times."""
        return None if math.isnan(self._leg) else self._before + self._last - self._leg

    def _of_a_piece(self, kind: str, key: tuple[int, int, int], event: dict[str, Any], time: float | None) -> Any:
        trial, rung, seed = key
        self._rows.pop(trial, None)
        piece = self.pieces.setdefault(trial, {}).setdefault(rung, TrialPiece(rung))
        if kind == "stop":
            self.running.pop(key, None)
            return None
        if kind != "end":
            self.running[key] = RunningJob(trial, rung, seed, as_count(event.get("group")), time)
            values, amount = event.get("values"), finite(event.get("amount"))
            piece.values = valid_values(values) if isinstance(values, dict) else piece.values
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

    # -- rows and parameters -------------------------------------------------------------------------------------------

    def row(self, trial: int) -> TrialRow:
        """Return the row of a trial that has begun."""
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

    def axes(self) -> list[Axis]:
        """Return the parameters of the space, from the settings and from the values that occur."""
        space_lines = self.settings.get("space")
        parsed = (
            [axis_of(each) for each in space_lines if isinstance(each, str)] if isinstance(space_lines, list) else []
        )
        axes = {axis.name: axis for axis in parsed if axis is not None}
        values: dict[str, list[Any]] = {}
        for pieces in self.pieces.values():
            for piece in pieces.values():
                for name, value in piece.values.items():
                    values.setdefault(name, []).append(value)
        for name, observed in values.items():
            numbers = not any(isinstance(value, str) for value in observed)
            if name not in axes:
                kind = (
                    "choice" if not numbers else "int" if all(isinstance(each, int) for each in observed) else "float"
                )
                axes[name] = Axis(
                    name, kind, low=min(observed) if numbers else math.nan, high=max(observed) if numbers else 0.0
                )
            elif axes[name].kind != "choice" and not numbers:
                axes[name] = axes[name]._replace(kind="choice", log=False)
            if axes[name].kind == "choice":
                more = [str(each) for each in axes[name].choices]
                axes[name] = axes[name]._replace(choices=(*dict.fromkeys([*more, *map(str, observed)]),))
        return [*axes.values()]


def read(folder: Path) -> Trials:
    """Return the journal of the search in a folder. Raises UsageError if there is none, or it cannot be read at all."""
    trials, broken = Trials(), 0
    path = folder / JOURNAL
    with blamed_on(f"{path} cannot be read"):
        if not path.is_file():
            raise UsageError(f"{folder} is no search's folder ({JOURNAL} is missing)")
        with open(path, "rb") as file:
            for line in file:
                event = event_of(line)
                if event is not None:
                    trials.take(event)
                elif line.endswith(b"\n") and line.strip():  # else: the writer died here, or is still writing
                    broken += 1
    if not trials.settings:
        trials.missing.append(f"{JOURNAL} does not begin as a search's does: its settings are not known")
    if broken:
        trials.missing.append(f"{broken} of the lines of {JOURNAL} cannot be read, and are left out")
    return trials


def is_search(folder: Path) -> bool:
    """True if the folder holds the journal of a search."""
    try:
        with open(folder / JOURNAL, "rb") as file:
            first = event_of(file.readline(1 << 20))
    except OSError:
        return False
    return first is not None and first.get("event") == "search"


def event_of(line: bytes) -> dict[str, Any] | None:
    """Return the dictionary of a complete line; None if it is not one."""
    try:
        event = parse_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def best(rows: Iterable[TrialRow], count: int | None = None) -> list[TrialRow]:
    """Return the rows with a score, best first: rows with more training precede those that stopped early, whose scores
    are not comparable."""
    scored = [row for row in rows if row.loss is not None]
    return sorted(scored, key=lambda row: (-extent(row.amount), row.loss, row.trial))[:count]


def extent(amount: float) -> float:
    """Return an amount of training for comparisons: 0 means the whole training, infinity here."""
    return amount or math.inf


def axis_of(text: str) -> Axis | None:
    """Parse a parameter's line: lr=log:0.001..0.5, momentum:beta=0.8..0.99 if optimizer=momentum."""
    name, equals, rest = text.partition("=")
    if not name.strip() or not equals:
        return None
    name = name.strip()
    spec, separator, requirement = rest.rpartition(" if ")
    other, equals, value = requirement.partition("=")
    condition = (other.strip(), value.strip()) if separator and equals else None
    spec = (spec if condition else rest).strip()
    match = RANGE.fullmatch(spec)
    low, high = (decimal(match[2]), decimal(match[3])) if match else (None, None)
    if match and low is not None and high is not None and low < high:
        log = (match[1] == "log" or bool(match[4])) and low > 0
        return Axis(name, "int" if match[1] == "int" else "float", (), low, high, log, condition)
    return Axis(name, "choice", (*(each.strip() for each in spec.split("|")),), condition=condition)


def decimal(text: str) -> float | None:
    """Return the finite number of a text; None if it is not one."""
    try:
        return finite(float(text))
    except ValueError:
        return None


def finite(value: Any) -> float | None:
    """Return the value as a float; None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def as_count(value: Any) -> int | None:
    """Return the value if it is a count; else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else None


def valid_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a space can have: texts and finite numbers; others are left out."""
    return {str(name): value for name, value in values.items() if isinstance(value, str) or finite(value) is not None}


def deviation(values: list[float]) -> float | None:
    """Return the standard deviation of the sample; None for one value."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    try:
        return math.sqrt(math.fsum((each - mean) ** 2 for each in values) / (len(values) - 1))
    except OverflowError:
        return None


def number_text(value: Any) -> str:
    """Return a parameter's value for display, with four digits."""
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def score_text(trials: Trials, score: float | None, spread: float | None = None) -> str:
    """Return a score for display, with its deviation over the seeds if known."""
    if score is None:
        return "-"
    form = ".2%" if trials.percent else ".4g"
    return format(score, form) + (f" ± {format(spread, form)}" if spread is not None else "")


def values_text(row: TrialRow) -> str:
    """Return the values of a row for display: lr=0.0621 model=mlp:64."""
    return printable(" ".join(f"{name}={number_text(value)}" for name, value in row.values.items()), allowed="")
