"""What a search hands out, and what comes back.

    method     asks for values, and is told what they have brought                methods/
    task       a piece of a trial: so much training with these values             what a method asks for
    job        a task with one seed                                               what a group of ranks does
    result     how a job has ended

A trial is a point of the space. Most methods ask for it in one task, of all that the options say; those that stop bad
trials early ask for one rung of it after another, each of which goes on from where the one before it has ended.
"""

from typing import Any, NamedTuple, Protocol

Values = dict[str, Any]  # by the name of a parameter: str, int or float


class SearchTask(NamedTuple):
    """A piece of trial number `trial`, of those from 0 on: its training with `values` until `amount`.

    rung: how many pieces of the trial were before. amount: until where, in epochs from the trial's beginning; 0: to its
    end. parent: the trial from whose last piece this one begins, where that is another one (population based training).
    """

    trial: int
    values: Values
    rung: int = 0
    amount: float = 0.0
    parent: int | None = None


class SearchJob(NamedTuple):
    """A task with seed number `seed`, 0 to seeds - 1, of the search; what a group of ranks does at a time."""

    task: SearchTask
    seed: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """It is done exactly once."""
        return self.task.trial, self.task.rung, self.seed


class Result(NamedTuple):
    """How a job has ended.

    score: as the objective says it, larger or smaller is better; None where it has failed, with a line that says why,
    and where it was stopped by a signal or the job's time limit, to be gone on with. more: what else is known of it, by
    name (steps, seconds, ...), for tables. seconds: of the whole job, as its group saw them.
    """

    score: float | None = None
    failed: str | None = None
    stopped: bool = False
    seconds: float = 0.0
    more: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


class Method(Protocol):
    """Chooses what is tried. It knows neither ranks nor files; what it does follows from its seed and what it is told.

    So a search that goes on makes the method anew, asks and tells again in the order of the journal, and gets the same
    tasks.
    """

    planned: bool  # whether all its tasks are known before any has been told of

    def ask(self) -> SearchTask | None:
        """The next task; None where there is none now, or none any more."""

    def tell(self, task: SearchTask, loss: float | None) -> None:
        """What a task has brought, the smaller the better; None: it has failed."""

    @property
    def over(self) -> bool:
        """Whether no task is to come, whatever is still told."""
