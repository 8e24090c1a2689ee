"""How a search shows how far it is: on a terminal a table that lives, else a line for each piece that has ended.

    random, validation accuracy: 12 of 24 trials ended, 1 failed, 4 running; 3 min left, until 16:31
           validation
    trial    accuracy  time  values
        7      96.10%  12 s  lr=0.0621 batch-size=64 model=mlp:64
        3      95.48%   9 s  lr=0.0954 batch-size=32 model=mlp:256,128
    running: trial 12 (8 s), trial 13 (5 s), trial 14 (5 s), trial 15 (1 s)

It is told the events of the journal, on rank 0, and knows nothing of ranks. What users have written stands there as it
is: no markup, and nothing that moves a terminal.
"""

import functools
import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpcdl.errors import UsageError, printable
from hpcdl.formatting import clock, counted, duration, spent
from hpcdl.runs.progress import console as users_console
from hpcdl.search.importance import importance
from hpcdl.search.methods import make_method
from hpcdl.search.methods.asha import amounts
from hpcdl.search.methods.pbt import PopulationBasedTraining
from hpcdl.search.results import training_command
from hpcdl.search.search_log_reader import Running, TrialRow, Trials, best, finite, score_text, values_text
from hpcdl.search.space import Space

SHOWN = 10  # of the best trials, while it goes on and at the end
NARROW = 60  # columns of a terminal below which values are cut off, and times left out
OFTEN = 0.2  # seconds between two looks of the live table at least
OPTIMISTIC = (
    "one seed: the best of many scores that vary by chance is better than it would be once more; train it with other "
    "seeds, or search with --seeds 3"
)


class View:
    """mode: auto (live on a terminal, else lines), bar (live), lines or none.

    past: the events that the journal has already, with the first line, which are not news. `watch` is told those that
    come, from any thread; `end` says what has come out.
    """

    def __init__(
        self,
        mode: str = "auto",
        folder: Path | None = None,
        past: Iterable[dict[str, Any]] = (),
        console: Console | None = None,
        now: Callable[[], float] = time.time,
    ):
        self.folder, self.now, self.trials = folder, now, Trials()
        self.console = console or (Console(quiet=True) if mode == "none" else users_console())
        self.mode = ("bar" if self.console.is_terminal else "lines") if mode == "auto" else mode
        self.live: Live | None = None
        self._drawn, self._lock = -math.inf, threading.Lock()
        for event in past:
            self.trials.take(event)

    def start(self) -> None:
        """Begin to show."""
        if self.mode == "bar":
            self.live = Live(self.table(), console=self.console, auto_refresh=False)
            self.live.start()

    def watch(self, event: Any) -> None:
        """An event: as a line of the journal, or with the attributes kind, group, job and result."""
        with self._lock:
            ended = self.trials.take(event if isinstance(event, dict) else as_line(event, self.now()))
            if self.live is not None and self.now() - self._drawn >= OFTEN:
                self._drawn = self.now()
                self.live.update(self.table(), refresh=True)
            elif self.mode == "lines" and ended is not None:
                self.say(self.news(self.trials.row(ended.trial)))

    def close(self) -> None:
        """Show the last state, and no more."""
        with self._lock:
            if self.live is not None:
                self.live.update(self.table(), refresh=True)
                self.live.stop()
                self.live = None

    def end(self) -> None:
        """What has come out: the best trials, how to train the best longer, what each option explains."""
        self.close()
        if self.mode == "none":
            return
        rows = self.trials.rows()
        top = best(rows, SHOWN)
        if top and self.mode != "bar":
            self.console.print(self.best(top, fold=True))
        for said in conclusions(self.trials, rows, self.folder):
            self.say(said)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(Text(printable(text, kept="")), soft_wrap=True)

    # -- its parts -----------------------------------------------------------------------------------------------------

    def table(self) -> Group:
        """All of it: counts, the best, what runs."""
        rows = self.trials.rows()
        parts: list[Any] = [Text(printable(self.headline(rows), kept=""), style="bold")]
        top = best(rows, max(1, min(SHOWN, self.console.height - 6)))
        parts += [self.best(top)] if top else []
        running = self.running()
        parts += [Text(running, style="dim", no_wrap=True, overflow="ellipsis")] if running else []
        return Group(*parts)

    def headline(self, rows: list[TrialRow]) -> str:
        """Method, score, counts and how long it takes still."""
        trials, counts = self.trials, Counter(row.status for row in rows)
        of = f" of {trials.asked}" if trials.asked is not None else ""
        said = [f"{counts['ended']}{of} trials ended"] if of else [f"{counted(counts['ended'], 'trial')} ended"]
        said += [f"{counts['failed']} failed"] if counts["failed"] else []
        said += [f"{len({each.trial for each in trials.running.values()})} running"] if trials.running else []
        what = ", ".join(filter(None, [str(trials.settings.get("method") or ""), spoken(trials)]))
        left = remaining(trials, self.now())
        when = f"; {duration(left)} left, until {clock(self.now() + left, self.now())}" if left is not None else ""
        return f"{what}: {', '.join(said)}{when}"

    def best(self, rows: list[TrialRow], fold: bool = False) -> Table:
        """These rows; fold: values that are too long are broken where there is room for that, else cut off."""
        narrow = self.console.width < NARROW
        rungs = any(row.amount for row in rows)
        table = Table(box=None, pad_edge=False)
        names = ["trial", spoken(self.trials).replace(" ", "\n"), *["epochs"] * rungs, *["time"] * (not narrow)]
        for name in names:
            table.add_column(Text(printable(name)), justify="right", no_wrap=True)
        table.add_column("values")
        how: dict[str, Any] = {"overflow": "fold"} if fold and not narrow else {"no_wrap": True, "overflow": "ellipsis"}
        for row in rows:
            cells = [str(row.trial), score_text(self.trials, row.score, row.spread)]
            cells += [f"{row.amount:g}" if row.amount else "all"] if rungs else []
            cells += [spent(row.seconds)] if not narrow else []
            table.add_row(*map(Text, cells), Text(values_text(row), **how))
        return table

    def running(self) -> str:
        """What groups are at."""
        return "running: " + ", ".join(map(self.at_work, self.trials.running.values())) if self.trials.running else ""

    def at_work(self, each: Running) -> str:
        seed = f" seed {each.seed}" if self.trials.seeds > 1 else ""
        since = f" ({duration(self.now() - each.since)})" if each.since is not None else ""
        return f"trial {each.trial}{seed}{since}"

    def news(self, row: TrialRow) -> str:
        """The line of a piece that has ended."""
        trials = self.trials
        whole = f"/{trials.asked}" if trials.asked is not None and not row.amount else ""
        epochs = f", {counted(row.amount, 'epoch', 'g')}" if row.amount else ""
        what = f"{spoken(trials)} {score_text(trials, row.score, row.spread)}"
        said = f"failed: {row.failed}" if row.failed is not None else what
        return f"[{len(trials.ended)}{whole}] trial {row.trial}{epochs}: {said}, {values_text(row)}"


def spoken(trials: Trials) -> str:
    """The score, as people say it."""
    return trials.objective.replace("_", " ")


def as_line(event: Any, now: float) -> dict[str, Any]:
    """What a group does as the journal's line: `kind`, and which `job` with which `result`."""
    task, result = event.job.task, event.result
    told = {"event": event.kind, "trial": task.trial, "rung": task.rung, "seed": event.job.seed, "group": event.group}
    told |= {"values": task.values, "amount": task.amount, "parent": task.parent, "time": now}
    return told if result is None else told | result._asdict()


def conclusions(trials: Trials, rows: list[TrialRow], folder: Path | None) -> list[str]:
    """What is said at the end, line by line."""
    said = []
    top = next(iter(best(rows, 1)), None)
    whys = Counter(row.failed for row in rows if row.failed is not None)
    for why, count in whys.most_common(3):
        said.append(f"{counted(count, 'trial')} failed: {why}")
    if top is None:
        said.append("no trial has a score")
    else:
        score = f"{spoken(trials)} {score_text(trials, top.score, top.spread)}"
        said.append(f"the best is trial {top.trial}, {score}: {values_text(top)}")
        command = training_command(folder, trials, top) if folder is not None else None
        said += [f"to train it longer: {command}"] if command else []
        shares = importance(rows, trials.axes())
        known = [f"{name} {share:.0%}" for name, share in shares if share is not None]
        said += [f"of the differences between trials each option alone explains: {', '.join(known)}"] if known else []
        said += [OPTIMISTIC] if trials.seeds == 1 and len(rows) > 1 else []
    beside = beside_training(trials)
    said += [f"beside its training a trial took {1e3 * beside:.0f} ms (median)"] if beside is not None else []
    if folder is not None:
        said.append(f"all of it: {folder} (hpcdl report {folder} makes a page with pictures)")
    return said


def beside_training(trials: Trials) -> float | None:
    """Seconds that a group spent on a trial with one seed, but not in its training: the median; None where unknown.

    Of the first pieces of trials: the later ones count the training of those before, too.
    """
    found = []
    for each in (each for each in trials.ended if each.piece.rung == 0):
        for seed, more in each.piece.more.items():
            training, whole = finite(more.get("training_seconds")), finite(each.piece.seconds.get(seed))
            found += [whole - training] if training is not None and whole is not None else []
    return statistics.median(found) if found else None


def remaining(trials: Trials, now: float) -> float | None:
    """Seconds until the search has ended, if what is to come takes as long as what has; None where nobody knows.

    Known are methods that ask for whole trials, and successive halving, of which a rung has 1/eta of the trials of the
    one before; of a rung that nothing has come through the time goes with the epochs. Of other methods with rungs it
    goes with the epochs all over.
    """
    planned = pieces_planned(trials)
    if not trials.ended or not trials.running:
        return None
    if planned is None:
        return remaining_epochs(trials, now)
    spent: dict[int, list[float]] = {}
    for each in trials.ended:
        spent.setdefault(each.piece.rung, []).extend(each.piece.seconds.values())
    left, mean = 0.0, 0.0
    for rung, (count, epochs) in enumerate(planned):
        seconds = spent.get(rung, [])
        mean = math.fsum(seconds) / len(seconds) if seconds else mean * (epochs if rung else 0.0)
        running = [each for each in trials.running.values() if each.rung == rung and each.since is not None]
        begun = math.fsum(min(mean, max(0.0, now - (each.since or now))) for each in running)
        left += max(0.0, max(len(running), count * trials.seeds - len(seconds)) * mean - begun)
    return left / trials.groups


def remaining_epochs(trials: Trials, now: float) -> float | None:
    """The same of a method whose epochs are known, whoever goes on: hyperband, and population based training."""
    told = trials.settings
    numbers = [finite(told.get(name)) or 0.0 for name in ("trials", "least", "most", "eta")]
    planned = epochs_planned(str(told.get("method")), *numbers)
    if planned is None:
        return None
    whole, interval = planned
    done, spent = 0.0, 0.0
    for each in trials.ended:
        before = trials.pieces[each.trial].get(each.piece.rung - 1)
        epochs = interval or each.piece.amount - (before.amount if before else 0.0)
        done += epochs * len(each.piece.seconds)
        spent += math.fsum(each.piece.seconds.values())
    if done <= 0:
        return None
    begun = math.fsum(max(0.0, now - each.since) for each in trials.running.values() if each.since is not None)
    return max(0.0, (whole * trials.seeds - done) * spent / done - begun) / trials.groups


@functools.cache
def epochs_planned(text: str, trials: float, least: float, most: float, eta: float) -> tuple[float, float] | None:
    """The epochs of all trials together, and those of a piece where all are alike, else 0; None where nobody knows.

    Of hyperband found by asking it, and telling it that all trials are the same; of a population as if nobody left any
    out by going on from a member that is ahead.
    """
    if text.partition(":")[0] not in ("hyperband", "pbt") or not max(trials, most / max(least, 1e-9)) < 1e5:
        return None
    try:
        how: dict[str, Any] = {"least": least, "most": most, "eta": int(eta), "points": 1}
        method: Any = make_method(text, Space.read(["x=0.0..1.0"]), int(trials), 0, **how)
    except (UsageError, ValueError, OverflowError):
        return None
    if isinstance(method, PopulationBasedTraining):
        return len(method.members) * most, method.interval
    total, reached = 0.0, dict[int, float]()
    while not method.over:
        task = method.ask()
        total += task.amount - reached.get(task.trial, 0.0)
        reached[task.trial] = task.amount
        method.tell(task, 0.0)
    return total, 0.0


def pieces_planned(trials: Trials) -> list[tuple[int, float]] | None:
    """Of each rung how many trials come to it, and how many times as long as the one before it takes; None: unknown."""
    count, told = trials.asked, trials.settings
    method = str(told.get("method") or "").partition(":")[0]
    if count is None or method in ("hyperband", "pbt"):
        return None
    if method != "asha":
        return [(count, 1.0)]
    least, most, eta = (finite(told.get(name)) or 0.0 for name in ("least", "most", "eta"))
    if least <= 0 or eta < 2 or not least < most < 1e12 * least:
        return None
    rungs = amounts(least, most, int(eta))
    lengths = [after - before for before, after in pairwise([0.0, *rungs])]
    return [(count, 1.0), *((int(count // eta**k), lengths[k] / lengths[k - 1]) for k in range(1, len(rungs)))]
