"""What the journal of a search tells of its trials: rows for tables and pictures, whoever makes them.

    search         the settings, in the first line
    leg            a job begins, or goes on with it, in so many groups of ranks
    begin, again   a group begins with a piece of a trial: this rung, this seed; again: it was interrupted
    end            it has ended, with a score or with a line that says why there is none

A piece of a trial is its training from one rung to the next, once with each seed. Its score is the mean over the seeds;
where one of them has failed the trial has. A row is of the last piece that has a score, so that trials are compared
by what they have reached.

A journal may be of a search that goes on, was killed or is of another version: what cannot be read is left out.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hpcdl.errors import UsageError, blamed_on, printable
from hpcdl.files import from_json

JOURNAL = "journal.jsonl"
VERSION = 1
MOST = 2**31  # of a count in a journal
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
    """A trial's training until a rung. By seed: scores, why it failed, seconds, what else was said.

    at: seconds of the search, in all its jobs, at which its last seed had ended; None before, or where no time is said.
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
        """The mean over the seeds; None before all have ended, and where one has failed."""
        return math.fsum(self.scores.values()) / len(self.scores) if len(self.scores) >= seeds else None

    def ended(self, seeds: int) -> bool:
        """Whether all seeds have."""
        return len(self.scores) + len(self.failed) >= seeds


@dataclass
class TrialRow:
    """A trial: the values, amount (epochs; 0: whole) and score of its last piece that has one.

    scores: by seed. spread: standard deviation of the sample; None of one seed. loss: the score, the smaller the
    better. failed: why it has no score that counts. seconds: of all its pieces and seeds, on its group; steps: of all
    seeds until there. status: ended, failed or begun. folder: in the search's.
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
        """How many pieces there are."""
        return len(self.pieces)


class Ended(NamedTuple):
    """A piece that has ended, in the order of the journal. trials: how many had ended one by then, with this one."""

    trial: int
    piece: TrialPiece
    score: float | None
    trials: int


class Running(NamedTuple):
    """What a group is at; since: as the journal's times are, in UNIX seconds."""

    trial: int
    rung: int
    seed: int
    group: int | None
    since: float | None


class Trials:
    """What the events of a journal tell, given one by one in their order.

    settings: of the first line. ended: pieces in the order in which they have. running: what groups are at, by trial,
    rung and seed. groups: of the last job. missing: what could not be read.
    """

    def __init__(self, settings: dict[str, Any] | None = None):
        self.settings: dict[str, Any] = settings or {}
        self.pieces: dict[int, dict[int, TrialPiece]] = {}
        self.ended: list[Ended] = []
        self.running: dict[tuple[int, int, int], Running] = {}
        self.groups = 1
        self.missing: list[str] = []
        self._before, self._leg, self._last = 0.0, math.nan, math.nan
        self._seen: set[int] = set()
        self._rows: dict[int, TrialRow] = {}  # of trials of which nothing new was told

    # -- what a search was asked for -----------------------------------------------------------------------------------

    @property
    def seeds(self) -> int:
        """How often each point is trained."""
        return max(1, whole(self.settings.get("seeds")) or 1)

    @property
    def asked(self) -> int | None:
        """How many trials the search has been asked for; None where that is not known."""
        return whole(self.settings.get("trials")) or None

    @property
    def objective(self) -> str:
        """The name of the score."""
        return str(self.settings.get("objective") or "score")

    @property
    def maximize(self) -> bool:
        """Whether more of it is better."""
        return self.settings.get("maximize") is True

    @property
    def percent(self) -> bool:
        """Whether the score is a share, shown in percent."""
        return self.objective.endswith("accuracy")

    # -- events --------------------------------------------------------------------------------------------------------

    def take(self, event: Any) -> Ended | None:
        """One more event; returns the piece that has ended with it, if one has. What is no event of ours is nothing."""
        if not isinstance(event, dict):
            return None
        kind, time = event.get("event"), finite(event.get("time"))
        self._tick(begins := kind == "leg" and "trial" not in event, time)  # those of one trial each are side by side
        if kind == "search":
            found = event.get("settings")
            self.settings = found if isinstance(found, dict) else {}
            self._rows.clear()
            if event.get("version") != VERSION:
                said = f"is of version {str(event.get('version'))[:20]}, and version {VERSION} is read"
                self.missing.append(f"{JOURNAL} {said}: some of it may be left out")
        elif begins:
            self.running.clear()
            self.groups = max(1, whole(event.get("groups")) or 1)
        elif kind in ("begin", "again", "end", "stop"):  # stop: what who watches is told of one that is interrupted
            key = tuple(whole(event.get(name)) for name in ("trial", "rung", "seed"))
            if None not in key:
                return self._of_a_piece(str(kind), key, event, time)  # type: ignore[arg-type]
        return None

    def _tick(self, begins: bool, time: float | None) -> None:
        """Seconds of the search: those within jobs, not those between them."""
        if time is None:
            return
        if begins or math.isnan(self._leg):
            if not math.isnan(self._last):
                self._before += max(0.0, self._last - self._leg)
            self._leg = time
        self._last = time if math.isnan(self._last) or begins else max(time, self._last)

    @property
    def seconds(self) -> float | None:
        """Of the search, in all its jobs, until the last event; None where no time is said."""
        return None if math.isnan(self._leg) else self._before + self._last - self._leg

    def _of_a_piece(self, kind: str, key: tuple[int, int, int], event: dict[str, Any], time: float | None) -> Any:
        trial, rung, seed = key
        self._rows.pop(trial, None)
        piece = self.pieces.setdefault(trial, {}).setdefault(rung, TrialPiece(rung))
        if kind == "stop":
            self.running.pop(key, None)
            return None
        if kind != "end":
            self.running[key] = Running(trial, rung, seed, whole(event.get("group")), time)
            values, amount = event.get("values"), finite(event.get("amount"))
            piece.values = plain(values) if isinstance(values, dict) else piece.values
            piece.amount = piece.amount if amount is None else max(0.0, amount)
            piece.parent = whole(event["parent"]) if "parent" in event else piece.parent
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
        self.ended.append(Ended(trial, piece, piece.score(self.seeds), len(self._seen)))
        return self.ended[-1]

    # -- what they make ------------------------------------------------------------------------------------------------

    def row(self, trial: int) -> TrialRow:
        """The row of a trial that has begun."""
        pieces = [piece for _, piece in sorted(self.pieces[trial].items())]
        wrong = next((piece for piece in pieces if piece.failed), None)
        scored = [piece for piece in pieces if piece.score(self.seeds) is not None]
        shown = wrong or (scored or pieces)[-1]
        score = None if wrong else shown.score(self.seeds)
        scores = [shown.scores[seed] for seed in sorted(shown.scores)]
        failed = None
        if wrong:
            seed, why = min(wrong.failed.items())
            failed = f"seed {seed}: {why}" if self.seeds > 1 else why
        steps = [whole(more.get("steps")) for more in shown.more.values()]
        return TrialRow(
            trial=trial,
            values=shown.values,
            rung=shown.rung,
            amount=shown.amount,
            scores=scores,
            score=score,
            loss=None if score is None else -score if self.maximize else score,
            spread=deviation(scores) if score is not None else None,
            failed=failed,
            seconds=math.fsum(each for piece in pieces for each in piece.seconds.values()),
            steps=sum(each or 0 for each in steps) if steps and None not in steps else None,
            status="failed" if wrong else "ended" if pieces[-1].ended(self.seeds) else "begun",
            parent=shown.parent,
            folder=f"trials/{trial:04d}",
            pieces=pieces,
        )

    def rows(self) -> list[TrialRow]:
        """Of all trials that have begun, in the order of their numbers."""
        self._rows.update((trial, self.row(trial)) for trial in self.pieces if trial not in self._rows)
        return [self._rows[trial] for trial in sorted(self.pieces)]

    def axes(self) -> list[Axis]:
        """The parameters of the space: as the settings describe them, and those that only values tell of."""
        described = self.settings.get("space")
        found = [axis_of(each) for each in described if isinstance(each, str)] if isinstance(described, list) else []
        known = {axis.name: axis for axis in found if axis is not None}
        values: dict[str, list[Any]] = {}
        for pieces in self.pieces.values():
            for piece in pieces.values():
                for name, value in piece.values.items():
                    values.setdefault(name, []).append(value)
        for name, of in values.items():
            numbers = not any(isinstance(value, str) for value in of)
            if name not in known:
                kind = "choice" if not numbers else "int" if all(isinstance(each, int) for each in of) else "float"
                known[name] = Axis(name, kind, low=min(of) if numbers else math.nan, high=max(of) if numbers else 0.0)
            elif known[name].kind != "choice" and not numbers:
                known[name] = known[name]._replace(kind="choice", log=False)
            if known[name].kind == "choice":
                more = [str(each) for each in known[name].choices]
                known[name] = known[name]._replace(choices=(*dict.fromkeys([*more, *map(str, of)]),))
        return [*known.values()]


def read(folder: Path) -> Trials:
    """The journal of the search in a folder. Raises UsageError where there is none, or it cannot be read at all."""
    found, broken = Trials(), 0
    path = folder / JOURNAL
    with blamed_on(f"{path} cannot be read"):
        if not path.is_file():
            raise UsageError(f"{folder} is no search's folder ({JOURNAL} is missing)")
        with open(path, "rb") as file:
            for line in file:
                event = event_of(line)
                if event is not None:
                    found.take(event)
                elif line.endswith(b"\n") and line.strip():  # else: its writer was killed there, or is at it
                    broken += 1
    if not found.settings:
        found.missing.append(f"{JOURNAL} does not begin as a search's does: its settings are not known")
    if broken:
        found.missing.append(f"{broken} of the lines of {JOURNAL} cannot be read, and are left out")
    return found


def is_search(folder: Path) -> bool:
    """Whether the folder holds a journal that a search has begun."""
    try:
        with open(folder / JOURNAL, "rb") as file:
            first = event_of(file.readline(1 << 20))
    except OSError:
        return False
    return first is not None and first.get("event") == "search"


def event_of(line: bytes) -> dict[str, Any] | None:
    """What a whole line says; None where it is none."""
    try:
        found = from_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def best(rows: Iterable[TrialRow], count: int | None = None) -> list[TrialRow]:
    """The best rows with a score, the best one first: trials that have come further before those that were stopped
    early, whose scores are not those of a whole training."""
    scored = [row for row in rows if row.loss is not None]
    return sorted(scored, key=lambda row: (-extent(row.amount), row.loss, row.trial))[:count]


def extent(amount: float) -> float:
    """An amount of training for comparisons: 0 is all of it."""
    return amount or math.inf


def axis_of(described: str) -> Axis | None:
    """A line that describes a parameter: lr=log:0.001..0.5, momentum:beta=0.8..0.99 if optimizer=momentum."""
    name, equals, rest = described.partition("=")
    if not name.strip() or not equals:
        return None
    name = name.strip()
    spec, given, on = rest.rpartition(" if ")
    other, equals, value = on.partition("=")
    condition = (other.strip(), value.strip()) if given and equals else None
    spec = (spec if condition else rest).strip()
    found = RANGE.fullmatch(spec)
    low, high = (decimal(found[2]), decimal(found[3])) if found else (None, None)
    if found and low is not None and high is not None and low < high:
        log = (found[1] == "log" or bool(found[4])) and low > 0
        return Axis(name, "int" if found[1] == "int" else "float", (), low, high, log, condition)
    return Axis(name, "choice", (*(each.strip() for each in spec.split("|")),), condition=condition)


def decimal(text: str) -> float | None:
    """The number that a text says."""
    try:
        return finite(float(text))
    except ValueError:
        return None


def finite(value: Any) -> float | None:
    """The value as a number; None for what is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: Any) -> int | None:
    """The value if it is a count; else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else None


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values as a space gives them: texts and finite numbers; others are left out."""
    return {str(name): value for name, value in values.items() if isinstance(value, str) or finite(value) is not None}


def deviation(values: list[float]) -> float | None:
    """The standard deviation of the sample; None of one value."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    try:
        return math.sqrt(math.fsum((each - mean) ** 2 for each in values) / (len(values) - 1))
    except OverflowError:
        return None


def number_text(value: Any) -> str:
    """A value of a parameter for people: four digits of a number."""
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def score_text(trials: Trials, score: float | None, spread: float | None = None) -> str:
    """A score for people, and its deviation over the seeds, where there is one."""
    if score is None:
        return "-"
    form = ".2%" if trials.percent else ".4g"
    return format(score, form) + (f" ± {format(spread, form)}" if spread is not None else "")


def values_text(row: TrialRow) -> str:
    """lr=0.0621 model=mlp:64"""
    return printable(" ".join(f"{name}={number_text(value)}" for name, value in row.values.items()), kept="")
