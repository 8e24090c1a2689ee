"""Which job is next: the method's tasks, each with all seeds, and what the journal records of them.

    method.ask() -> task -> a job for each seed -> journal: begin -> a group of ranks
    a group of ranks -> journal: end -> the mean over the seeds, once all have ended -> method.tell(task, loss)

A resumed search replays the journal into a new method and so reaches the same state: ended jobs are not repeated, begun
jobs without an end are handed out first. A method that learns nothing from scores (grid, random) has the same tasks on
any number of ranks; since these are all known in advance, the ones expected to take longest start first
(duration_model.py). An `ask` that returns None must leave the method unchanged.
"""

import math
import time
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import TrainingError, UsageError
from hpcdl.search.duration_model import DurationModel
from hpcdl.search.journal import Journal, json_value
from hpcdl.search.tasks import Method, Result, SearchJob, SearchTask, Values

Key = tuple[int, int, int]
AHEAD = 256  # the longest of so many pending jobs starts next


class TaskOutcome(NamedTuple):
    """A task that has ended with all seeds. score: mean over the seeds, None if a seed has failed; results: by seed."""

    task: SearchTask
    score: float | None
    results: list[Result]

    @property
    def failed(self) -> str | None:
        """The failure message of the first seed that failed; None if none did."""
        return next((each.failed for each in self.results if each.failed is not None), None)


class JobCounts(NamedTuple):
    """Numbers of jobs by state; `ended` includes the failed ones."""

    running: int
    ended: int
    failed: int
    interrupted: int


class Controller:
    """Hands out the jobs of a search. Not thread-safe. maximize: True if larger scores are better.

    only: number of the single trial that this job runs, of a planned method; other jobs run the others meanwhile.
    Raises UsageError if the journal was written by another method, or by other versions of it.
    """

    def __init__(self, method: Method, seeds: int, maximize: bool, journal: Journal, only: int | None = None):
        self.method, self.seeds, self.maximize, self.journal = method, seeds, maximize, journal
        self.todo: list[SearchJob] = []  # not begun yet
        self.only = only
        self.durations = DurationModel(method.space) if method.planned else None  # type: ignore[attr-defined]
        self.interrupted: dict[Any, SearchJob] = {}  # begun, not ended, not running
        self.running: dict[Key, int] = {}  # group by job
        self.results: dict[tuple[int, int], dict[int, Result]] = {}
        self.tasks: dict[tuple[int, int], SearchTask] = {}
        self.outcomes: dict[tuple[int, int], TaskOutcome] = {}
        for event in journal.events:
            self._replay(event)
        if only is not None:
            self._select_trial(only)

    @property
    def over(self) -> bool:
        """True if all jobs have ended and the method has no more tasks."""
        return not (self.running or self.interrupted or self.todo) and self.method.over

    @property
    def counts(self) -> JobCounts:
        """Numbers of jobs that run, have ended, failed, and were interrupted."""
        results = [result for by_seed in self.results.values() for result in by_seed.values()]
        failed = sum(result.failed is not None for result in results)
        return JobCounts(len(self.running), len(results), failed, len(self.interrupted))

    def begin(self, ranks: int, groups: int) -> None:
        """Record in the journal that a job of `ranks` ranks starts or resumes the search."""
        trial = {} if self.only is None else {"trial": self.only}
        self.journal.append(event="leg", ranks=ranks, groups=groups, **trial, time=time.time())

    def next(self, group: int = 0) -> SearchJob | None:
        """Return the next job for a group and record its begin; None: no job now, or no more at all (`over`).

        Raises TrainingError if the method has no task, is not over, and no running job could give it one.
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
            index = self._longest()
            job, task = self.todo[index], self.todo[index].task
            fields = {"values": task.values, "amount": task.amount, "parent": task.parent}
            self._append("begin", job, **fields, group=group)
            del self.todo[index]
        self.running[job.key] = group
        return job

    def ended(self, job: SearchJob, result: Result) -> None:
        """Record the end of a job. A job that was stopped counts as interrupted and is handed out again."""
        if self.running.pop(job.key, None) is None:
            raise TrainingError(f"trial {job.task.trial} has ended that nobody had begun")
        if result.stopped:
            self.interrupted[job.key] = job
            return
        result = with_score(result)
        fields = {"score": result.score, "failed": result.failed, "seconds": result.seconds, "more": result.more}
        self._append("end", job, **fields)
        self._end(job, result)

    def ranking(self, limit: int | None = None) -> list[TaskOutcome]:
        """Return the tasks with a score, one per trial (its longest), longer ones first, then by score."""
        longest: dict[int, TaskOutcome] = {}
        for outcome in self.outcomes.values():
            before = longest.get(outcome.task.trial)
            if outcome.score is not None and (before is None or outcome.task.rung > before.task.rung):
                longest[outcome.task.trial] = outcome
        sign = -1 if self.maximize else 1
        ranked = sorted(
            longest.values(), key=lambda outcome: (-(outcome.task.amount or math.inf), sign * (outcome.score or 0.0))
        )
        return ranked[:limit]

    # -- asking and telling the method

    def _ask(self) -> None:
        self._ask_once()
        while self.durations is not None and not self.method.over:
            self._ask_once()

    def _select_trial(self, only: int) -> None:
        """Drop all jobs but those of trial `only`."""
        if not self.method.over:
            self._ask()
        self.todo = [job for job in self.todo if job.task.trial == only]
        self.interrupted = {key: job for key, job in self.interrupted.items() if job.task.trial == only}

    def _longest(self) -> int:
        """Return the index in `todo` of the job expected to take longest; 0 if nothing is known."""
        values = [job.task.values for job in self.todo[:AHEAD]]
        return 0 if self.durations is None else int(np.argmax(self.durations.expected(values)))

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
        if event["event"] not in ("begin", "again", "end"):
            return
        name, key = event["event"], tuple(event.get(each) for each in ("trial", "rung", "seed"))
        required = {"begin": ("values", "amount", "parent"), "end": ("score", "failed", "seconds", "more")}.get(
            name, ()
        )
        incomplete = any(each not in event for each in required) or not all(isinstance(each, int) for each in key)
        if incomplete or (name == "end" and not is_valid_end(event)) or (name == "begin") == (key in self.interrupted):
            raise UsageError(f"{self._place()}: an event {event!r} cannot be; begin anew")
        if name == "begin":
            self._begun_before(key, event)
        elif name == "end":
            result = Result(event["score"], event["failed"], False, event["seconds"], event["more"])
            self._end(self.interrupted.pop(key), result)

    def _begun_before(self, key: Any, event: dict[str, Any]) -> None:
        if not self.todo:
            self._ask()
        matching = (
            [index for index, job in enumerate(self.todo) if job.key == key] if self.durations is not None else [0]
        )
        job = self.todo.pop(matching[0]) if matching and self.todo else None
        recorded = [event[name] for name in ("values", "amount", "parent")]
        if job is None or job.key != key or json_value(journal_fields(job.task)) != recorded:
            now = "none" if job is None else f"trial {job.task.trial} with {json_value(job.task.values)}"
            raise UsageError(
                f"{self._place()}: trial {key[0]} was begun with {event['values']}, and the method would now begin "
                f"{now}; go on with the versions of before, or begin anew"
            )
        self.interrupted[key] = job

    def _place(self) -> str:
        return str(self.journal.path or "the journal")


def journal_fields(task: SearchTask) -> tuple[Values, float, int | None]:
    """Return the fields of a task that the journal stores beside its key."""
    return task.values, task.amount, task.parent


def is_valid_end(event: dict[str, Any]) -> bool:
    """True if the end event of a job has values of the types that are written."""
    score, failed, seconds, more = (event[name] for name in ("score", "failed", "seconds", "more"))
    numbers = [seconds] if score is None else [seconds, score]
    finite = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers)
    return finite and (failed is None or isinstance(failed, str)) and isinstance(more, dict)


def with_score(result: Result) -> Result:
    """Return the result with a checked score: without a finite score, the job has failed."""
    if result.failed is not None:
        return result._replace(score=None)
    if result.score is None:
        return result._replace(failed="it has brought no score")
    score = float(result.score)
    return result._replace(score=score) if math.isfinite(score) else Result(None, f"its score is {score}", *result[2:])
