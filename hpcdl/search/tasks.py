"""Types of a search: what it hands out, and the results.

    method     proposes values and learns from their scores                       methods/
    task       a piece of a trial: train with these values up to an amount        what a method returns
    job        a task with one seed                                               what a group of ranks runs
    result     the outcome of a job

A trial is a point of the space. Most methods train it in one task, to the end; those that stop bad trials early request
one rung after another, each of which continues the previous one.
"""

from typing import Any, NamedTuple, Protocol

Values = dict[str, Any]  # by the name of a parameter: str, int or float


class SearchTask(NamedTuple):
    """A piece of trial number `trial` (from 0): its training with `values` until `amount`.

    rung: number of earlier pieces of the trial. amount: epochs since the trial's beginning; 0: to its end. parent: the
    other trial whose last piece this one continues (population based training).
    """

    trial: int
    values: Values
    rung: int = 0
    amount: float = 0.0
    parent: int | None = None


class SearchJob(NamedTuple):
    """A task with seed number `seed`, 0 to seeds - 1; run by one group of ranks."""

    task: SearchTask
    seed: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """The key under which the job is done exactly once."""
        return self.task.trial, self.task.rung, self.seed


class Result(NamedTuple):
    """Outcome of a job.

    score: as the objective returns it; None if the job failed, with a line that says why, or was stopped by a signal or
    the time limit, to be continued. more: further results by name (steps, seconds, ...), for tables. seconds: of the
    whole job on its group.
    """

    score: float | None = None
    failed: str | None = None
    stopped: bool = False
    seconds: float = 0.0
    more: dict[str, Any] = {}  # noqa: RUF012 - never modified


class Method(Protocol):
    """Chooses the points. Knows neither ranks nor files; deterministic given its seed and the losses it receives.

    A resumed search replays asks and tells of the journal into a new method, which then returns the same tasks.
    """

    planned: bool  # True if no task depends on a loss

    def ask(self) -> SearchTask | None:
        """Return the next task; None if there is none now, or none any more."""

    def tell(self, task: SearchTask, loss: float | None) -> None:
        """Receive the loss of a task, smaller is better; None: it has failed."""

    @property
    def over(self) -> bool:
        """True if no further task can come, whatever losses arrive."""
