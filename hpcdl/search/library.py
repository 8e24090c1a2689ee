"""Search as a library: any Python function of a trial, tried at many points by all ranks of a communicator.

    found = search(MPI.COMM_WORLD, ["lr=log:0.001..0.5"], lambda trial, comm: train(trial["lr"], comm), trials=64)

The function is called on all ranks of a group with a trial; its return value on the group's first rank is the trial's
score. An exception makes a failed row with its reason, and the search continues. If one rank raises while the others of
its group wait for it, they cannot be interrupted, and the job is ended (hpcdl/launch/isolated_run.py).
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI

from hpcdl.comm import refuse_together
from hpcdl.errors import UsageError, blamed_on, line
from hpcdl.launch.isolated_run import PATIENCE, all_come, alone, told
from hpcdl.runs import signals
from hpcdl.runs.folder import Folder
from hpcdl.search import groups
from hpcdl.search.controller import Controller, TaskOutcome
from hpcdl.search.journal import Journal
from hpcdl.search.methods import make_method
from hpcdl.search.space import Space
from hpcdl.search.tasks import Result, SearchJob, Values

FREE = ("program", "ranks_per_trial")  # settings that a resumed search may change


@dataclass(frozen=True)
class Trial:
    """The argument of the objective: `trial["lr"]` is a value; `trial.values` holds the active parameters.

    number: of the trial, from 0. seed: for its random numbers, the search's seed plus the number of the repetition.
    rung: number of earlier pieces of the trial. amount: where this piece ends, in the unit of `least` and `most`; 0: at
    the end.
    """

    values: Values
    number: int
    seed: int
    rung: int = 0
    amount: float = 0.0
    path: Path | None = None
    origin: Path | None = None

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def folder(self) -> Path | None:
        """The folder of this trial, created on first access; None: the search has no folder."""
        return ensure_folder(self.path)

    @property
    def before(self) -> Path | None:
        """The folder to continue from, its own or another trial's (population based training); None: a new trial."""
        return ensure_folder(self.origin)


def ensure_folder(path: Path | None) -> Path | None:
    """Create the folder and return it."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    return path


class SearchResult(NamedTuple):
    """Result of a search: values and score of the best trial, None if no trial has a score.

    rows: every task that has ended, in the order of trials, with its mean score and one result per seed. stopped: True
    if a signal ended the search before all trials were done.
    """

    values: Values | None
    score: float | None
    rows: list[TaskOutcome]
    stopped: bool = False


Objective = Callable[[Trial, MPI.Intracomm], Any]


def search(
    comm: MPI.Intracomm,
    space: Space | Sequence[str] | Mapping[str, Any],
    objective: Objective,
    method: str = "random",
    *,
    trials: int = 0,
    ranks_per_trial: int = 1,
    seed: int = 0,
    seeds: int = 1,
    maximize: bool = False,
    folder: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    least: float = 0.0,
    most: float = 0.0,
    eta: int = 3,
    points: int = 5,
    controller: str = "shared",
    watch: Callable[[groups.Event], None] = lambda event: None,
) -> SearchResult:
    """Find the values of the space with the smallest score; collective over `comm`. Returns the same on all ranks.

    space: lines as --space takes them, the mapping of a YAML file, or a Space. objective(trial, comm): returns the
    score, a number, on the first rank of a group of `ranks_per_trial` ranks; comm: the group's communicator. method,
    trials, eta, points: see make_method (methods/). seeds: repetitions of each point; its score is the mean. maximize:
    True if the largest score is the best. least, most: first and last amount of methods with rungs. controller: "own"
    keeps rank 0 out of the groups. watch(event): called on rank 0, perhaps in a thread, when a trial has begun or
    ended.

    folder: holds the journal (hpcdl/search/journal.py) and a folder per trial; None: results live as long as the
    process. resume: continue the search of the folder, on any number of ranks. force: replace it.

    Raises AgreedError on all ranks if the search cannot begin, TrainingError if it cannot go on.
    """
    lock, journal, scheduler = Folder(None if folder is None else Path(folder), comm.rank), Journal(), None
    try:
        with refuse_together(comm):
            if controller not in ("shared", "own"):
                raise UsageError(f"controller is 'shared' or 'own', not {controller!r}")
            groups.divide_ranks(comm.size, ranks_per_trial, controller == "own")
            if seeds < 1:
                raise UsageError(f"seeds should be 1 or more, not {seeds}")
            space = read(space)
            if comm.rank == 0:
                with blamed_on(f"{folder} cannot be written"):
                    if lock.path is not None:
                        lock.path.mkdir(parents=True, exist_ok=True)
                    lock.claim()
                chosen = make_method(method, space, trials, seed, least=least, most=most, eta=eta, points=points)
                settings: dict[str, Any] = {
                    "program": getattr(objective, "__name__", type(objective).__name__),
                    "options": {},
                    "space": space.described(),
                    "objective": "score",
                }
                settings |= {"method": method, "trials": trials, "seeds": seeds, "seed": seed, "maximize": maximize}
                settings |= {"ranks_per_trial": ranks_per_trial, "least": least, "most": most}
                settings |= {"eta": eta, "points": points}
                journal = Journal.open(lock.path, settings, resume, force, FREE)
                scheduler = Controller(chosen, seeds, maximize, journal)
        work = ObjectiveWork(objective, lock.path, seed)
        stopped = groups.run(comm, ranks_per_trial, work, scheduler, controller == "own", signal_received, watch)
        outcome = None
        if scheduler is not None:
            best = scheduler.ranking(1)
            rows = sorted(scheduler.outcomes.values(), key=lambda each: (each.task.trial, each.task.rung))
            outcome = SearchResult(
                best[0].task.values if best else None, best[0].score if best else None, rows, stopped
            )
        return comm.bcast(outcome)  # type: ignore[return-value]
    finally:
        journal.close()
        lock.close()


def read(space: Space | Sequence[str] | Mapping[str, Any]) -> Space:
    """Return the space, whatever form it is given in. Raises UsageError."""
    if isinstance(space, Space):
        return space
    if isinstance(space, str):
        return Space.read([space])
    return Space.from_yaml(space) if isinstance(space, Mapping) else Space.read(space)


def signal_received() -> bool:
    """True if this process has received a signal that ends runs in good order, if the program handles it."""
    return bool(signals.received)


class ObjectiveWork:
    """The objective as the work of a group (groups.py)."""

    def __init__(self, objective: Objective, folder: Path | None, seed: int):
        self.objective, self.folder, self.seed = objective, folder, seed

    def __call__(self, job: SearchJob, comm: MPI.Intracomm) -> Result:
        """Return the result, the same on all ranks; collective. Raises an error that one rank alone has."""
        error: BaseException | None = None
        score, failed = None, None
        try:
            score = number(self.objective(self.trial(job), comm), comm.rank == 0)
        except (Exception, SystemExit) as raised:
            error, failed = raised, line(told(raised))
        if not all_come(comm, PATIENCE if error else math.inf):
            assert error is not None
            raise alone(error)
        outcomes = comm.allgather((score, failed))
        failures = [reason for _, reason in outcomes if reason is not None]
        return Result(None, failures[0]) if failures else Result(outcomes[0][0])

    def trial(self, job: SearchJob) -> Trial:
        """Return the objective's argument for a job."""
        task, origin = job.task, None
        folder = self.place(task.trial, job.seed)
        if task.parent is not None:
            origin = self.place(task.parent, job.seed)
        elif task.rung > 0:
            origin = folder
        return Trial(task.values, task.trial, self.seed + job.seed, task.rung, task.amount, folder, origin)

    def place(self, trial: int, seed: int) -> Path | None:
        """Return the folder of a trial with a seed."""
        return None if self.folder is None else self.folder / "trials" / f"{trial:04d}" / f"seed-{seed}"


def number(value: Any, wanted: bool) -> float | None:
    """Return the objective's value as a score; None if `wanted` is False. Raises TypeError."""
    if not wanted:
        return None
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        value = value.item()  # of numpy
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"the objective has returned {value!r}, which is no number")
    return float(value)
