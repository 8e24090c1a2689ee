"""Which job is next: a method's tasks, each with all seeds, and what the journal knows of them.

    method.ask() -> task -> a job for each seed -> journal: begin -> a group of ranks
    a group of ranks -> journal: end -> the mean over the seeds, when all are there -> method.tell(task, loss)

A search that goes on asks and tells its method again in the order of the journal, and so comes to where it was: what
has ended is not done again; what has begun, and not ended, is handed out first. Whatever the number of ranks, a method
that needs not be told (grid, random) has the same tasks; of these, which are all known before, those that seem to take
longest come first (duration_model.py). What a method answers with None changes nothing in it.
"""

import math
import time
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import TrainingError, UsageError
from hpcdl.search.duration_model import Lengths
from hpcdl.search.journal import Journal, plain
from hpcdl.search.tasks import Method, Result, SearchJob, SearchTask, Values

Key = tuple[int, int, int]
AHEAD = 256  # jobs of which the longest is chosen


class Judged(NamedTuple):
    """A task that has ended: its mean score, None where a seed has failed, and how it ended with each seed."""

    task: SearchTask
    score: float | None
    results: list[Result]

    @property
    def failed(self) -> str | None:
        """Why, of the first seed that has."""
        return next((each.failed for each in self.results if each.failed is not None), None)


class Counts(NamedTuple):
    """Of jobs, how many run, have ended, of these failed, and were interrupted."""

    running: int
    ended: int
    failed: int
    interrupted: int


class Controller:
    """Hands out the jobs of a search. maximize: the larger a score, the better. One thread at a time uses it.

    only: the one trial that it hands out, of a planned method; others hand out the others at the same time.
    Raises UsageError where the journal is of another method, or other versions of it.
    """

    def __init__(self, method: Method, seeds: int, maximize: bool, journal: Journal, only: int | None = None):
        self.method, self.seeds, self.maximize, self.journal = method, seeds, maximize, journal
        self.todo: list[SearchJob] = []  # never begun
        self.only = only
        self.lengths = Lengths(method.space) if method.planned else None  # type: ignore[attr-defined]
        self.interrupted: dict[Any, SearchJob] = {}  # begun and not ended, and nobody has it
        self.running: dict[Key, int] = {}  # by whom
        self.results: dict[tuple[int, int], dict[int, Result]] = {}
        self.tasks: dict[tuple[int, int], SearchTask] = {}
        self.judged: dict[tuple[int, int], Judged] = {}
        for event in journal.events:
            self._replay(event)
        if only is not None:
            self._keep(only)

    @property
    def over(self) -> bool:
        """Whether all has ended, and nothing is to come."""
        return not (self.running or self.interrupted or self.todo) and self.method.over

    @property
    def counts(self) -> Counts:
        """How many jobs are where."""
        ends = [result for found in self.results.values() for result in found.values()]
        failed = sum(result.failed is not None for result in ends)
        return Counts(len(self.running), len(ends), failed, len(self.interrupted))

    def begin(self, ranks: int, groups: int) -> None:
        """A job goes on with the search, on so many ranks."""
        own = {} if self.only is None else {"trial": self.only}
        self.journal.append(event="leg", ranks=ranks, groups=groups, **own, time=time.time())

    def next(self, group: int = 0) -> SearchJob | None:
        """A job for a group, begun when this returns; None: there is none now, or none any more (`over`).

        Raises TrainingError where the method waits for nothing.
        """
        if self.interrupted:
            job = self.interrupted[min(self.interrupted)]
            self._append("again", job, group=group)
            del self.interrupted[job.key]
        else:
            if not self.todo:
                self._ask()
            if not self.todo:
                return None
            number = self._longest()
            job, task = self.todo[number], self.todo[number].task
            known = {"values": task.values, "amount": task.amount, "parent": task.parent}
            self._append("begin", job, **known, group=group)
            del self.todo[number]
        self.running[job.key] = group
        return job

    def ended(self, job: SearchJob, result: Result) -> None:
        """A job has ended, or was stopped: that one is interrupted, and goes on another time."""
        if self.running.pop(job.key, None) is None:
            raise TrainingError(f"trial {job.task.trial} has ended that nobody had begun")
        if result.stopped:
            self.interrupted[job.key] = job
            return
        result = with_score(result)
        known = {"score": result.score, "failed": result.failed, "seconds": result.seconds, "more": result.more}
        self._append("end", job, **known)
        self._end(job, result)

    def found(self, limit: int | None = None) -> list[Judged]:
        """The tasks that have a score, of each trial the longest, the best first: a longer one before a shorter one."""
        last: dict[int, Judged] = {}
        for each in self.judged.values():
            before = last.get(each.task.trial)
            if each.score is not None and (before is None or each.task.rung > before.task.rung):
                last[each.task.trial] = each
        sign = -1 if self.maximize else 1
        order = sorted(last.values(), key=lambda each: (-(each.task.amount or math.inf), sign * (each.score or 0.0)))
        return order[:limit]

    # -- how it comes to a task, and what becomes of it

    def _ask(self) -> None:
        self._ask_once()
        while self.lengths is not None and not self.method.over:
            self._ask_once()

    def _keep(self, only: int) -> None:
        """Of what is to do that of one trial alone."""
        if not self.method.over:
            self._ask()
        self.todo = [job for job in self.todo if job.task.trial == only]
        self.interrupted = {key: job for key, job in self.interrupted.items() if job.task.trial == only}

    def _longest(self) -> int:
        """Which of what is to do seems to take longest; of equals, and where nothing is known, the first."""
        ahead = [job.task.values for job in self.todo[:AHEAD]]
        return 0 if self.lengths is None else int(np.argmax(self.lengths.expected(ahead)))

    def _ask_once(self) -> None:
        task = self.method.ask()
        if task is not None:
            if (task.trial, task.rung) in self.tasks:
                raise TrainingError(f"the method asks for rung {task.rung} of trial {task.trial} twice")
            self.tasks[task.trial, task.rung] = task
            self.todo.extend(SearchJob(task, seed) for seed in range(self.seeds))
        elif not self.running and not self.interrupted and not self.method.over:
            raise TrainingError("the method has no task, is not over, and waits for nobody")

    def _end(self, job: SearchJob, result: Result) -> None:
        task = job.task
        found = self.results.setdefault((task.trial, task.rung), {})
        found[job.seed] = result
        if self.lengths is not None and result.failed is None:
            self.lengths.add(task.values, result.seconds)
        if len(found) == self.seeds:
            results = [found[seed] for seed in range(self.seeds)]
            scores = [each.score for each in results if each.score is not None]
            mean = math.fsum(scores) / self.seeds if len(scores) == self.seeds else None
            self.judged[task.trial, task.rung] = Judged(task, mean, results)
            self.method.tell(task, mean if mean is None or not self.maximize else -mean)

    def _append(self, event: str, job: SearchJob, **more: Any) -> None:
        trial, rung, seed = job.key
        self.journal.append(event=event, trial=trial, rung=rung, seed=seed, **more, time=time.time())

    # -- the journal once more

    def _replay(self, event: dict[str, Any]) -> None:
        if event["event"] not in ("begin", "again", "end"):
            return
        name, key = event["event"], tuple(event.get(each) for each in ("trial", "rung", "seed"))
        needs = {"begin": ("values", "amount", "parent"), "end": ("score", "failed", "seconds", "more")}.get(name, ())
        lacks = any(each not in event for each in needs) or not all(isinstance(each, int) for each in key)
        if lacks or (name == "end" and not sound(event)) or (name == "begin") == (key in self.interrupted):
            raise UsageError(f"{self._place()}: an event {event!r} cannot be; begin anew")
        if name == "begin":
            self._begun_before(key, event)
        elif name == "end":
            found = Result(event["score"], event["failed"], False, event["seconds"], event["more"])
            self._end(self.interrupted.pop(key), found)

    def _begun_before(self, key: Any, event: dict[str, Any]) -> None:
        if not self.todo:
            self._ask()
        places = [place for place, job in enumerate(self.todo) if job.key == key] if self.lengths is not None else [0]
        job = self.todo.pop(places[0]) if places and self.todo else None
        said = [event[name] for name in ("values", "amount", "parent")]
        if job is None or job.key != key or plain(told(job.task)) != said:
            now = "none" if job is None else f"trial {job.task.trial} with {plain(job.task.values)}"
            raise UsageError(
                f"{self._place()}: trial {key[0]} was begun with {event['values']}, and the method would now begin "
                f"{now}; go on with the versions of before, or begin anew"
            )
        self.interrupted[key] = job

    def _place(self) -> str:
        return str(self.journal.path or "the journal")


def told(task: SearchTask) -> tuple[Values, float, int | None]:
    """What the journal says of a task beside its key."""
    return task.values, task.amount, task.parent


def sound(event: dict[str, Any]) -> bool:
    """Whether the end of a job has values of the kinds that it is written with."""
    score, failed, seconds, more = (event[name] for name in ("score", "failed", "seconds", "more"))
    numbers = [seconds] if score is None else [seconds, score]
    real = all(isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each) for each in numbers)
    return real and (failed is None or isinstance(failed, str)) and isinstance(more, dict)


def with_score(result: Result) -> Result:
    """The result as it counts: one whose score is no finite number has failed."""
    if result.failed is not None:
        return result._replace(score=None)
    if result.score is None:
        return result._replace(failed="it has brought no score")
    score = float(result.score)
    return result._replace(score=score) if math.isfinite(score) else Result(None, f"its score is {score}", *result[2:])
