"""Chooses the next job of a search: each task of the method makes a job per seed; the journal records the jobs.

    method.ask() -> task -> a job for each seed -> journal: begin -> a group of ranks
    a group of ranks -> journal: end -> the mean over the seeds, once all have ended -> method.tell(task, loss)

A resumed search replays the journal into a new method and so reaches the same state: ended jobs are not repeated, begun
jobs without an end come first. If `ask` returns None, it must leave the method unchanged."""

import math
import time
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import TrainingError, UsageError
from hpcdl.files import json_value
from hpcdl.search.duration_model import DurationModel
from hpcdl.search.journal import Journal
from hpcdl.search.tasks import Method, Result, SearchJob, SearchTask

Key = tuple[int, int, int]
TASK, RESULT = ("values", "amount", "parent"), ("score", "failed", "seconds", "more")  # stored in the journal
REQUIRED = {"begin": TASK, "again": (), "end": RESULT}
AHEAD = 256  # the job that is expected to be longest starts next, of this many


class TaskOutcome(NamedTuple):
    """A task that has ended with all seeds. score: mean over the seeds; None: a seed has failed. results: by seed."""

    task: SearchTask
    score: float | None
    results: list[Result]

    @property
    def failed(self) -> str | None:
        """The failure message of the first seed that failed; None if none did."""
        return next((each.failed for each in self.results if each.failed is not None), None)


class Controller:
    """Hands out the jobs of a search. Not thread-safe. maximize: True if larger scores are better.
    only: number of the single trial that this launch runs, if each launch runs one (planned methods); None: all trials.
    Raises UsageError if another method, or another version of the method, has written the journal."""

    def __init__(self, method: Method, seeds: int, maximize: bool, journal: Journal, only: int | None = None):
        self.method, self.seeds, self.maximize, self.journal = method, seeds, maximize, journal
        self.todo: list[SearchJob] = []  # not begun yet
        self.only = only
        self.durations = DurationModel(method.space) if method.planned else None  # type: ignore[attr-defined]
        self.interrupted: dict[Any, SearchJob] = {}  # begun, but neither ended nor running
        self.running: dict[Key, int] = {}  # group by job
        self.results: dict[tuple[int, int], dict[int, Result]] = {}
        self.tasks: dict[tuple[int, int], SearchTask] = {}
        self.outcomes: dict[tuple[int, int], TaskOutcome] = {}
        for event in journal.events:
            self._replay(event)
        if only is not None:
            if not method.over:
                self._ask()
            self.todo = [job for job in self.todo if job.task.trial == only]
            self.interrupted = {key: job for key, job in self.interrupted.items() if job.task.trial == only}

    @property
    def over(self) -> bool:
        """True if all jobs have ended and the method has no more tasks."""
        return not (self.running or self.interrupted or self.todo) and self.method.over

    def begin(self, ranks: int, groups: int) -> None:
        """Record in the journal that a launch with `ranks` ranks starts or resumes the search."""
        trial = {} if self.only is None else {"trial": self.only}
        self.journal.append(event="leg", ranks=ranks, groups=groups, **trial, time=time.time())

    def next(self, group: int = 0) -> SearchJob | None:
        """Return the next job for a group and record that it begins; None: no job now, or no more jobs (`over`).
        Raises TrainingError if the method is not over, but has neither a task nor a running job to wait for."""
        if self.interrupted:
            job = self.interrupted[min(self.interrupted)]
            self._append("again", job, group=group)
            del self.interrupted[job.key]
        else:
            if not self.todo:
                self._ask()
            if not self.todo:
                return None
            index = 0
            if self.durations is not None:  # the job that is expected to take longest
                index = int(np.argmax(self.durations.expected([job.task.values for job in self.todo[:AHEAD]])))
            job, task = self.todo[index], self.todo[index].task
            self._append("begin", job, **{name: getattr(task, name) for name in TASK}, group=group)
            del self.todo[index]
        self.running[job.key] = group
        return job

    def ended(self, job: SearchJob, result: Result) -> None:
        """Record the end of a job. A job that was stopped counts as interrupted and is handed out again."""
        if self.running.pop(job.key, None) is None:
            raise TrainingError(f"trial {job.task.trial} has ended, but had not begun")
        if result.stopped:
            self.interrupted[job.key] = job
            return
        if result.failed is not None:
            result = result._replace(score=None)
        elif result.score is None:
            result = result._replace(failed="it has returned no score")
        elif math.isfinite(score := float(result.score)):
            result = result._replace(score=score)
        else:
            result = Result(None, f"its score is {score}", *result[2:])
        self._append("end", job, **{name: getattr(result, name) for name in RESULT})
        self._end(job, result)

    def ranking(self) -> list[TaskOutcome]:
        """Return each trial's longest task with a score; tasks with more training come first, then better scores."""
        longest: dict[int, TaskOutcome] = {}
        for outcome in self.outcomes.values():
            before = longest.get(outcome.task.trial)
            if outcome.score is not None and (before is None or outcome.task.rung > before.task.rung):
                longest[outcome.task.trial] = outcome
        sign = -1 if self.maximize else 1
        return sorted(longest.values(), key=lambda each: (-(each.task.amount or math.inf), sign * (each.score or 0.0)))

    # -- asking and telling the method

    def _ask(self) -> None:
        while True:
            task = self.method.ask()
            if task is not None:
                if (task.trial, task.rung) in self.tasks:
                    raise TrainingError(f"the search method has asked for rung {task.rung} of trial {task.trial} twice")
                self.tasks[task.trial, task.rung] = task
                self.todo.extend(SearchJob(task, seed) for seed in range(self.seeds))
            elif not self.running and not self.interrupted and not self.method.over:
                raise TrainingError("the search method is not over, but has no task and no running trial to wait for")
            if self.durations is None or self.method.over:
                return

    def _end(self, job: SearchJob, result: Result) -> None:
        task = job.task
        by_seed = self.results.setdefault((task.trial, task.rung), {})
        by_seed[job.seed] = result
        if self.durations is not None and result.failed is None:
            self.durations.add(task.values, result.seconds)
        if len(by_seed) == self.seeds:
            results = [by_seed[seed] for seed in range(self.seeds)]
            scores = [result.score for result in results if result.score is not None]
            mean = math.fsum(scores) / self.seeds if len(scores) == self.seeds else None
            self.outcomes[task.trial, task.rung] = TaskOutcome(task, mean, results)
            self.method.tell(task, mean if mean is None or not self.maximize else -mean)

    def _append(self, event: str, job: SearchJob, **more: Any) -> None:
        trial, rung, seed = job.key
        self.journal.append(event=event, trial=trial, rung=rung, seed=seed, **more, time=time.time())

    # -- replay of the journal

    def _replay(self, event: dict[str, Any]) -> None:
        if event["event"] not in REQUIRED:
            return
        name, key = event["event"], tuple(event.get(each) for each in ("trial", "rung", "seed"))
        complete = all(each in event for each in REQUIRED[name]) and all(isinstance(each, int) for each in key)
        if name == "end" and complete:
            score, failed, seconds, more = (event[each] for each in RESULT)
            numbers = [seconds] if score is None else [seconds, score]
            finite = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers)
            complete = finite and (failed is None or isinstance(failed, str)) and isinstance(more, dict)
        if not complete or (name == "begin") == (key in self.interrupted):
            raise UsageError(f"{self.place}: the event {event!r} is incomplete or out of order; begin anew")
        if name == "begin":
            self._begun_before(key, event)
        elif name == "end":
            self._end(self.interrupted.pop(key), Result(score, failed, False, seconds, more))

    def _begun_before(self, key: Any, event: dict[str, Any]) -> None:
        if not self.todo:
            self._ask()
        matching = [0] if self.durations is None else [i for i, job in enumerate(self.todo) if job.key == key]
        job = self.todo.pop(matching[0]) if matching and self.todo else None
        recorded = [event[name] for name in TASK]
        if job is None or job.key != key or json_value([getattr(job.task, name) for name in TASK]) != recorded:
            now = "none" if job is None else f"trial {job.task.trial} with {json_value(job.task.values)}"
            raise UsageError(
                f"{self.place}: trial {key[0]} was begun with {event['values']}, and the method would now begin "
                f"{now}; go on with the software versions of before, or begin the search anew"
            )
        self.interrupted[key] = job

    @property
    def place(self) -> str:
        return str(self.journal.path or "the journal")
