"""Progress display of a search on rank 0: a live table on a terminal, else a line for each piece that has ended.

random, validation accuracy: 12 of 24 trials ended, 1 failed, 4 running; 3 min left, until 16:31
       validation
trial    accuracy  time  values
    7      96.10%  12 s  lr=0.0621 batch-size=64 model=mlp:64
    3      95.48%   9 s  lr=0.0954 batch-size=32 model=mlp:256,128
running: trial 12 (8 s), trial 13 (5 s), trial 14 (5 s), trial 15 (1 s)"""

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
from hpcdl.files import finite
from hpcdl.formatting import clock, counted, duration, spent
from hpcdl.machine.display import console as users_console
from hpcdl.search.importance import importance
from hpcdl.search.methods import make_method
from hpcdl.search.methods.asha import amounts
from hpcdl.search.methods.pbt import PopulationBasedTraining
from hpcdl.search.results import training_command
from hpcdl.search.search_log_reader import TrialRow, Trials, best, score_text, values_text
from hpcdl.search.space import Space

SHOWN = 10  # best trials in the table
NARROW = 60  # columns; narrower terminals cut values off and omit times
OFTEN = 0.2  # minimum seconds between updates of the live table
OPTIMISTIC = (
    "one seed per trial: the best of many scores is partly chance, and worse when repeated; train it with other "
    "seeds, or search with --seeds 3"
)


class View:
    """Display of a search. mode: auto (live on a terminal, else lines), bar (live), lines or none.
    past: the events that are in the journal already, first line included. `watch` takes new events, from any thread."""

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
        if self.mode == "bar":
            self.live = Live(self.table(), console=self.console, auto_refresh=False)
            self.live.start()

    def watch(self, event: Any) -> None:
        """Show an event: a line of the journal, or an object with kind, group, job and result."""
        with self._lock:
            ended = self.trials.take(event if isinstance(event, dict) else journal_event(event, self.now()))
            if self.live is not None and self.now() - self._drawn >= OFTEN:
                self._drawn = self.now()
                self.live.update(self.table(), refresh=True)
            elif self.mode == "lines" and ended is not None:
                self.say(self.news_line(self.trials.row(ended.trial)))

    def close(self) -> None:
        """Show the last state and stop."""
        with self._lock:
            if self.live is not None:
                self.live.update(self.table(), refresh=True)
                self.live.stop()
                self.live = None

    def end(self) -> None:
        """Print the conclusions: the best trials, how to retrain the best one longer, what each option explains."""
        self.close()
        if self.mode == "none":
            return
        rows = self.trials.rows()
        top = best(rows, SHOWN)
        if top and self.mode != "bar":
            self.console.print(self.best(top, fold=True))
        for text in conclusions(self.trials, rows, self.folder):
            self.say(text)

    def say(self, text: str) -> None:
        self.console.print(Text(printable(text, allowed="")), soft_wrap=True)

    def table(self) -> Group:
        """Return the live table: the headline, the best trials, the running trials."""
        rows = self.trials.rows()
        parts: list[Any] = [Text(printable(self.headline(rows), allowed=""), style="bold")]
        top = best(rows, max(1, min(SHOWN, self.console.height - 6)))
        parts += [self.best(top)] if top else []
        if self.trials.running:
            running = []
            for (trial, _, seed), since in self.trials.running.items():
                taken = f" ({duration(self.now() - since)})" if since is not None else ""
                running.append(f"trial {trial}{f' seed {seed}' if self.trials.seeds > 1 else ''}{taken}")
            parts.append(Text(f"running: {', '.join(running)}", style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*parts)

    def headline(self, rows: list[TrialRow]) -> str:
        """Return a line with the method, the score's name, the numbers of trials and the remaining time."""
        trials, counts = self.trials, Counter(row.status for row in rows)
        total = f" of {trials.asked}" if trials.asked is not None else ""
        parts = [f"{counts['ended']}{total} trials ended"] if total else [f"{counted(counts['ended'], 'trial')} ended"]
        parts += [f"{counts['failed']} failed"] if counts["failed"] else []
        parts += [f"{len({trial for trial, _, _ in trials.running})} running"] if trials.running else []
        title = ", ".join(filter(None, [str(trials.settings.get("method") or ""), score_name(trials)]))
        left = remaining(trials, self.now())
        time_left = f"; {duration(left)} left, until {clock(self.now() + left, self.now())}" if left is not None else ""
        return f"{title}: {', '.join(parts)}{time_left}"

    def best(self, rows: list[TrialRow], fold: bool = False) -> Table:
        """Return a table of these rows; fold: wrap long values if there is room, else cut them off."""
        narrow = self.console.width < NARROW
        rungs = any(row.amount for row in rows)
        table = Table(box=None, pad_edge=False)
        names = ["trial", score_name(self.trials).replace(" ", "\n"), *["epochs"] * rungs, *["time"] * (not narrow)]
        for name in names:
            table.add_column(Text(printable(name)), justify="right", no_wrap=True)
        table.add_column("values")
        style: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"}
        if fold and not narrow:
            style = {"overflow": "fold"}
        for row in rows:
            cells = [str(row.trial), score_text(self.trials, row.score, row.spread)]
            cells += [f"{row.amount:g}" if row.amount else "all"] if rungs else []
            cells += [spent(row.seconds)] if not narrow else []
            table.add_row(*map(Text, cells), Text(values_text(row), **style))
        return table

    def news_line(self, row: TrialRow) -> str:
        trials = self.trials
        total = f"/{trials.asked}" if trials.asked is not None and not row.amount else ""
        epochs = f", {counted(row.amount, 'epoch', 'g')}" if row.amount else ""
        score = f"{score_name(trials)} {score_text(trials, row.score, row.spread)}"
        outcome = f"failed: {row.failed}" if row.failed is not None else score
        return f"[{len(trials.ended)}{total}] trial {row.trial}{epochs}: {outcome}, {values_text(row)}"


def score_name(trials: Trials) -> str:
    return trials.objective.replace("_", " ")


def journal_event(event: Any, now: float) -> dict[str, Any]:
    """Return a groups.Event as the fields of its line in the journal. now: its time, in UNIX seconds."""
    task, result = event.job.task, event.result
    fields = {"event": event.kind, "trial": task.trial, "rung": task.rung, "seed": event.job.seed, "group": event.group}
    fields |= {"values": task.values, "amount": task.amount, "parent": task.parent, "time": now}
    return fields if result is None else fields | result._asdict()


def conclusions(trials: Trials, rows: list[TrialRow], folder: Path | None) -> list[str]:
    lines = []
    top = next(iter(best(rows, 1)), None)
    for reason, count in Counter(row.failed for row in rows if row.failed is not None).most_common(3):
        lines.append(f"{counted(count, 'trial')} failed: {reason}")
    if top is None:
        lines.append("no trial has a score")
    else:
        score = f"{score_name(trials)} {score_text(trials, top.score, top.spread)}"
        lines.append(f"the best is trial {top.trial}, {score}: {values_text(top)}")
        command = training_command(folder, trials, top) if folder is not None else None
        lines += [f"to train it longer: {command}"] if command else []
        shares = importance(rows, trials.axes())
        explained = [f"{name} {share:.0%}" for name, share in shares if share is not None]
        if explained:
            lines.append(f"differences between trials explained by each option alone: {', '.join(explained)}")
        lines += [OPTIMISTIC] if trials.seeds == 1 and len(rows) > 1 else []
    beside = beside_training(trials)
    lines += [f"a trial took {1e3 * beside:.0f} ms (median) beside its training"] if beside is not None else []
    if folder is not None:
        lines.append(f"all of it: {folder} (hpcdl report {folder} makes a page with pictures)")
    return lines


def beside_training(trials: Trials) -> float | None:
    """Return the median seconds that a group spent on a trial outside its training; None if unknown.
    Only first pieces count: the summaries of later ones include the training before them."""
    differences = []
    for each in (each for each in trials.ended if each.piece.rung == 0):
        for seed, more in each.piece.more.items():
            training, whole = finite(more.get("training_seconds")), finite(each.piece.seconds.get(seed))
            differences += [whole - training] if training is not None and whole is not None else []
    return statistics.median(differences) if differences else None


def remaining(trials: Trials, now: float) -> float | None:
    """Return the seconds until the search ends, if pieces take as long as ended pieces of their rung; None if unknown.
    A rung without results is estimated from its epochs; hyperband and pbt are estimated from epochs alone."""
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
        running = [since for (_, at, _), since in trials.running.items() if at == rung and since is not None]
        begun = math.fsum(min(mean, max(0.0, now - since)) for since in running)
        left += max(0.0, max(len(running), count * trials.seeds - len(seconds)) * mean - begun)
    return left / trials.groups


def remaining_epochs(trials: Trials, now: float) -> float | None:
    """Return the remaining seconds of hyperband or pbt, from the number of epochs of all trials; None if unknown."""
    settings = trials.settings
    numbers = [finite(settings.get(name)) or 0.0 for name in ("trials", "least", "most", "eta")]
    planned = epochs_planned(str(settings.get("method")), *numbers)
    if planned is None:
        return None
    total, interval = planned
    finished, spent = 0.0, 0.0
    for each in trials.ended:
        before = trials.pieces[each.trial].get(each.piece.rung - 1)
        epochs = interval or each.piece.amount - (before.amount if before else 0.0)
        finished += epochs * len(each.piece.seconds)
        spent += math.fsum(each.piece.seconds.values())
    if finished <= 0:
        return None
    begun = math.fsum(max(0.0, now - since) for since in trials.running.values() if since is not None)
    return max(0.0, (total * trials.seeds - finished) * spent / finished - begun) / trials.groups


@functools.cache
def epochs_planned(text: str, trials: float, least: float, most: float, eta: float) -> tuple[float, float] | None:
    """Return (epochs of all trials of method `text`, epochs of a piece if constant, else 0); None if unknown.
    Hyperband is simulated with equal losses; for a population, copies that skip pieces are neglected."""
    if text.partition(":")[0] not in ("hyperband", "pbt") or not max(trials, most / max(least, 1e-9)) < 1e5:
        return None
    try:
        arguments: dict[str, Any] = {"least": least, "most": most, "eta": int(eta), "points": 1}
        method: Any = make_method(text, Space.read(["x=0.0..1.0"]), int(trials), 0, **arguments)
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
    """Return for each rung (number of trials, duration of a piece relative to the previous rung); None if unknown."""
    count, settings = trials.asked, trials.settings
    method = str(settings.get("method") or "").partition(":")[0]
    if count is None or method in ("hyperband", "pbt"):
        return None
    if method != "asha":
        return [(count, 1.0)]
    least, most, eta = (finite(settings.get(name)) or 0.0 for name in ("least", "most", "eta"))
    if least <= 0 or eta < 2 or not least < most < 1e12 * least:
        return None
    rungs = amounts(least, most, int(eta))
    lengths = [after - before for before, after in pairwise([0.0, *rungs])]
    return [(count, 1.0), *((int(count // eta**k), lengths[k] / lengths[k - 1]) for k in range(1, len(rungs)))]
