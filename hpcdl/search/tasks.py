"""Types of a search: what it hands out, and the results.

method     proposes values and learns from their scores                       methods/
trial      a point of the space, trained in one task or, rung by rung, in several
task       a piece of a trial: train with these values up to an amount        what a method returns
job        a task with one seed                                               what a group of ranks runs
result     the outcome of a job"""

from typing import Any, NamedTuple, Protocol

Values = dict[str, Any]  # by the name of a parameter: str, int or float


class SearchTask(NamedTuple):
    """A piece of trial number `trial` (from 0): training with `values` until `amount`. rung: number of earlier pieces.
    amount: epochs since the trial's beginning; 0: all. parent: other trial that this piece continues (pbt), or None."""

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
        """The key of the job in the journal and the results."""
        return self.task.trial, self.task.rung, self.seed


class Result(NamedTuple):
    """Outcome of a job. score: of the objective; None if the job failed (failed: why) or was stopped, to be continued.
    more: further results by name, such as steps, for tables. seconds: of the whole job on its group."""

    score: float | None = None
    failed: str | None = None
    stopped: bool = False
    seconds: float = 0.0
    more: dict[str, Any] = {}  # noqa: RUF012 - never modified


class Method(Protocol):
    """Chooses the points. Knows neither ranks nor files; deterministic given its seed and the losses it receives."""

    planned: bool  # True if no task depends on a loss

    def ask(self) -> SearchTask | None:
        """Return the next task; None if no task is available yet, or none will be."""

    def tell(self, task: SearchTask, loss: float | None) -> None:
        """Receive the loss of a task; smaller is better. None: the task has failed."""

    @property
    def over(self) -> bool:
        """True if no further task can come, whatever losses arrive."""
