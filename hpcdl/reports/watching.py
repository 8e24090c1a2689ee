"""A running job watched through its files: its progress, its speed, and the time that is left.

started.json     the program, the number of steps, and the time at which Slurm or --time-limit ends the run
config.yaml      the options, which replace the missing started.json of an older run
metrics.jsonl    steps and evaluations; new lines are read each time, a bounded number of points is kept
summary.json     the run has ended
.lock            locked while the run lives, on file systems of this machine
logs/            the reason of a stop"""

import collections
import contextlib
import fcntl
import math
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.files import finite
from hpcdl.launch.option_parser import read_file
from hpcdl.machine.file_systems import file_system
from hpcdl.metric_lines import MetricLines, is_evaluation
from hpcdl.reports.downsampling import Thinned
from hpcdl.reports.load import METRICS, runs_of
from hpcdl.reports.run_reader import read_json
from hpcdl.runs.stopping import Budget

POINTS = 512  # of a curve, at most
WINDOW = 60.0  # seconds of steps over which the current speed is measured
PATIENCE = 60.0  # seconds without a change after which a summary counts as final, if the lock is unknown
STEADY = 60.0  # seconds of steps after which the overhead (evaluations, checkpoints) is known well enough
LOCAL = re.compile("bcachefs|btrfs|ext[234]|f2fs|jfs|overlay|ramfs|reiserfs|tmpfs|xfs|zfs")  # of one machine
ENDED = re.compile(rb"ended after step (\d+): (.+)")  # in the log of rank 0
SCORES = ["validation_accuracy", "test_accuracy", "test_return", "validation_rmse", "test_rmse"]  # the main one first
SCORES += ["validation_rmse_standardized", "test_rmse_standardized", "validation_loss", "test_loss"]


class WatchedRun:
    """A run's folder. `look` updates the attributes from its files. now: returns the time in UNIX seconds."""

    def __init__(self, folder: Path, now: Any = time.time):
        self.folder, self.now = folder, now
        self.place: tuple[int, int] | None = None  # of metrics.jsonl: device and number
        self.seen: dict[str, tuple[int, int] | None] = {}  # inode and time of change of each file at the last look
        self.started: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.summary: dict[str, Any] | None = None
        self.problem = ""  # what could not be read
        self._over()

    def _over(self) -> None:
        """Reset all that was read from metrics.jsonl."""
        self.lines = MetricLines(self.folder / METRICS)
        self.last: dict[str, Any] = {}  # the last value of each name
        self.scores: dict[str, Any] = {}  # of the last evaluation
        self.curves = {"loss": Thinned(("step", "train_loss"), POINTS)}
        self.recent: collections.deque[tuple[float, float]] = collections.deque()  # step and seconds, a second apart
        self.sent = (0.0, 0.0)  # the step of the last evaluation, and the bytes by then
        self.before = 0.0  # seconds that steps took in legs before this one

    def look(self) -> bool:
        """Read new data; return True if there were any."""
        changed = False
        if self._changed("started.json"):
            changed, self.started = True, read_json(self.folder / "started.json", []) or {}
        if self._changed("config.yaml"):
            changed, self.options, self.problem = True, {}, ""
            try:
                if self.seen["config.yaml"] is not None:
                    self.options = read_file(self.folder / "config.yaml", str(self.folder / "config.yaml"))
            except UsageError as error:
                self.problem = str(error)
        if self._changed("summary.json"):
            changed, self.summary = True, read_json(self.folder / "summary.json", [])
        if (self.folder / METRICS).exists():
            changed |= self._read_metrics()
        elif self.place is not None:
            self.place, changed = None, True
            self._over()
        return changed

    def _changed(self, name: str) -> bool:
        """Return True if a file has changed, appeared or vanished since the last call for it."""
        mark = None
        with contextlib.suppress(OSError):
            about = os.stat(self.folder / name)
            mark = (about.st_ino, about.st_mtime_ns)
        before, self.seen[name] = self.seen.get(name), mark
        return before != mark

    def _read_metrics(self) -> bool:
        """Read the new lines; all lines if the file was replaced or cut. Return True if there were any."""
        with contextlib.suppress(OSError):
            about = os.stat(self.lines.path)
            place = (about.st_dev, about.st_ino)
            anew = self.place is not None and (place != self.place or about.st_size < self.lines.place)
            if anew:
                self._over()
            self.place, before = place, self.lines.place
            for line in self.lines:
                self._take(line)
            return anew or self.lines.place > before
        return False

    def _take(self, line: dict[str, Any]) -> None:
        step, seconds = line["step"], line.get("seconds")
        self.last |= line
        if is_evaluation(line):
            self.scores = {name: line[name] for name in line if name.startswith(("test_", "validation_", "consensus_"))}
            self.sent = (step, number(line.get("bytes"), 0))
            name = self.score
            if name:
                self.curves.setdefault(name, Thinned(("step", name), POINTS)).add(line)
        else:
            self.curves["loss"].add(line)
        if not isinstance(seconds, int | float) or not math.isfinite(seconds):
            return
        if step <= number(self.started.get("first_step"), 0):
            self.before = seconds
        if not self.recent or seconds - self.recent[-1][1] >= 1 or seconds < self.recent[-1][1]:
            self.recent.append((step, seconds))
            while len(self.recent) > 2 and seconds - self.recent[1][1] >= WINDOW:
                self.recent.popleft()

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return the curve of the loss or of a score: (step, value), means of neighbours if there are many."""
        x, y = self.curves[name].mean.values()
        return [*zip(x[np.isfinite(y)].tolist(), y[np.isfinite(y)].tolist(), strict=True)]

    @property
    def score(self) -> str:
        """Name of the main score; "" before the first evaluation."""
        return next((name for name in SCORES if isinstance(self.scores.get(name), int | float)), "")

    @property
    def step(self) -> int:
        return int(number(self.last.get("step"), number(self.started.get("first_step"), 0)))

    @property
    def rounds(self) -> bool:
        return "round" in self.last or self.started.get("program") == "train-federated"

    @property
    def steps(self) -> int | None:
        """The planned number of steps; None if unknown."""
        found = number(self.started.get("steps"), 0) or whole(self.options.get("rounds" if self.rounds else "steps"))
        if found:
            return int(found)
        epochs, epoch = whole(self.options.get("epochs")), number(self.last.get("epoch"), 0)
        return round(self.step / epoch) * epochs if epochs and epoch > 0 else None

    @property
    def epochs(self) -> float | None:
        """The planned number of epochs; None if unknown."""
        per_epoch, epoch = number(self.started.get("steps_per_epoch"), 0), number(self.last.get("epoch"), 0)
        per_epoch = per_epoch or (round(self.step / epoch) if epoch > 0 else 0)
        return self.steps / per_epoch if self.steps and per_epoch else None

    @property
    def batch(self) -> int | None:
        """Examples of a step; None if unknown."""
        found = number(self.started.get("batch_size"), 0)
        if not found and not whole(self.options.get("batch_per_rank")) and not self.rounds:
            found = whole(self.options.get("batch_size"))
        return int(found) or None

    def rates(self) -> tuple[float, float] | None:
        """Return steps per second over the last WINDOW seconds and over all steps; None before the first step."""
        seconds, step = number(self.last.get("seconds"), 0), self.step
        if seconds <= 0 or step <= 0:
            return None
        then, at = self.recent[0] if self.recent else (0, 0.0)
        now = (step - then) / (seconds - at) if seconds > at and step > then else step / seconds
        return now, step / seconds

    def left(self) -> float | None:
        """Return the remaining seconds of the run at its current speed; None if unknown.
        Overhead (evaluations, checkpoints) is added in the proportion of this leg so far."""
        rates, seconds = self.rates(), number(self.last.get("seconds"), 0)
        if rates is None:
            return None
        budget, (at, sent) = self.budget, self.sent
        allowed = [] if self.steps is None else [float(self.steps)]  # total number of steps that each limit allows
        if math.isfinite(budget.bytes) and at > 0 and sent > 0:
            allowed.append(budget.bytes * at / sent)  # at the rate until the last evaluation
        if math.isfinite(budget.examples) and self.batch:
            allowed.append(budget.examples / self.batch)
        lefts = [(steps - self.step) / rates[0] for steps in allowed]
        lefts += [budget.seconds - seconds] if math.isfinite(budget.seconds) else []
        if not lefts:
            return None
        of_steps, changed, share = seconds - self.before, last_change(self.folder), 1.0
        begun = number(self.started.get("started"), 0)
        if begun and of_steps >= STEADY and changed is not None:
            share = max(1.0, (changed - begun) / of_steps)
        return max(0.0, min(lefts)) * share

    @property
    def budget(self) -> Budget:
        text = self.options.get("budget")
        with contextlib.suppress(UsageError):
            return Budget.read(text if isinstance(text, str) else "")
        return Budget()

    def ends(self) -> list[tuple[str, float]]:
        """Return pairs ("Slurm" or "--time-limit", seconds until this ends the run), the earlier end first."""
        slurm, limit, begun = (number(self.started.get(name), 0) for name in ("ends", "time_limit", "started"))
        found = [("Slurm", slurm), ("--time-limit", limit and begun and begun + limit)]
        return sorted(((what, at - self.now()) for what, at in found if at), key=lambda each: each[1])

    def quiet(self) -> float:
        changed = last_change(self.folder)
        return 0.0 if changed is None else max(0.0, self.now() - changed)

    def state(self) -> tuple[str, str]:
        """Return the state (gone, ended, stopped, dead or going) and the reason, if any.
        dead: no process holds the lock, and the run has not logged its end. A run with an unknown lock is going."""
        if last_change(self.folder) is None:
            return "gone", ""
        living, summary = is_held(self.folder), self.summary
        silent = living is False or (living is None and self.quiet() > PATIENCE)
        written, *others = (self.seen.get(name) for name in ("summary.json", "started.json", "config.yaml"))
        last = written is not None and all(each is None or each[1] <= written[1] for each in others)  # no other leg
        if summary and number(summary.get("steps"), -1) == self.step and (silent or last):
            return "ended", str(summary.get("stopped") or "")
        if living is not False:
            return "going", ""
        reason = logged_end(self.folder)
        return ("stopped", reason) if reason else ("dead", "")


def logged_end(folder: Path) -> str:
    """Return why a run has ended, as rank 0 has logged it; "" if its last line is another."""
    with contextlib.suppress(OSError), open(folder / "logs" / "rank-0000.log", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        said = ENDED.findall(b"".join(file.read().splitlines()[-1:]))
        return said[0][1].decode(errors="replace") if said else ""
    return ""


def last_change(folder: Path) -> float | None:
    """Return the last change of a run's files in UNIX seconds; None without files."""
    times = []
    for name in (METRICS, "started.json", "config.yaml", "summary.json", "checkpoint.h5"):
        with contextlib.suppress(OSError):
            times.append(os.stat(folder / name).st_mtime)
    return max(times, default=None)


def number(value: Any, otherwise: float) -> float:
    """Return the value if it is a finite number, else `otherwise`."""
    return value if finite(value) is not None else otherwise


def whole(text: Any) -> int:
    """Return the integer of an option's text; 0 for other texts, as `full`."""
    return int(text) if isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 19 else 0


def is_held(folder: Path) -> bool | None:
    """True if a process holds the lock of this folder; None if unknown, as on network file systems."""
    try:
        if not LOCAL.fullmatch(file_system(folder)):
            return None
        with open(folder / ".lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back when the file is closed
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None


class Watching:
    """Folders of runs: the run that changed last, and how many have ended."""

    def __init__(self, folders: Iterable[str], now: Any = time.time):
        self.folders, self.now = [*folders], now
        self.runs = runs_of(self.folders)  # here: a folder without a run is refused
        self.single = len(self.runs) == 1
        self.name, self.run = "", None  # type: str, WatchedRun | None
        self.done = 0

    def look(self) -> bool:
        """Read new data; return True if there were any."""
        with contextlib.suppress(UsageError):
            self.runs = runs_of(self.folders)
        if self.run is None or len(self.runs) > 1:
            self.done = sum((folder / "summary.json").exists() for folder in self.runs.values())
            name = max(self.runs, key=lambda name: last_change(self.runs[name]) or 0)
            if self.run is None or self.runs[name] != self.run.folder:
                self.name, self.run = name, WatchedRun(self.runs[name], self.now)
        self.single = len(self.runs) == 1
        return self.run.look()
