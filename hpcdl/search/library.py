"""Search as a library: any Python function of a trial, tried at many points by all ranks of a communicator.

    found = search(MPI.COMM_WORLD, ["lr=log:0.001..0.5"], lambda trial, comm: train(trial["lr"], comm), trials=64)

An exception makes a failed row with its reason, and the search continues. If one rank raises while the others of its
group wait for it, they cannot be interrupted, and the job is ended (hpcdl/launch/isolated_run.py)."""

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
    """The argument of the objective: `trial["lr"]` is a value; `trial.values` holds the active parameters. number: of
    the trial, from 0. seed: for its random numbers, the search's seed plus the number of the repetition. rung: number
    of earlier pieces of the trial. amount: total training by the end of this piece, in the unit of `least` and `most`;
    0: the whole training."""

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
        return created(self.path)

    @property
    def before(self) -> Path | None:
        """The folder to continue from, this trial's or another's (population based training); None: no such folder."""
        return created(self.origin)


def created(path: Path | None) -> Path | None:
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    return path


class SearchResult(NamedTuple):
    """Result of a search. values, score: of the best trial; None: no trial has a score. rows: ended tasks in the order
    of trials, with mean score and a result per seed. stopped: True if a signal ended the search."""

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
    space: lines as --space takes them, the mapping of a YAML file, or a Space. objective(trial, comm): called on all
    `ranks_per_trial` ranks of a group, comm; returns the score, a number, on the group's first rank. method, trials,
    eta, points: see make_method (methods/). seeds: repetitions of each point; its score is the mean. maximize: True if
    the largest score is the best. least, most: amount of training by the first and the last rung. controller: "own"
    keeps rank 0 out of all groups. watch(event): called on rank 0, perhaps in a thread, when a trial begins or ends.
    folder: holds the journal and a folder per trial; None: results live as long as the process. resume: continue the
    search of the folder, on any number of ranks. force: replace it. Raises AgreedError on all ranks if the search
    cannot begin, TrainingError if it cannot continue."""
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
                program = getattr(objective, "__name__", type(objective).__name__)
                settings: dict[str, Any] = {"program": program, "options": {}, "space": space.described()}
                settings |= {"objective": "score", "method": method, "trials": trials, "seeds": seeds, "seed": seed}
                settings |= {"maximize": maximize, "ranks_per_trial": ranks_per_trial}
                settings |= {"least": least, "most": most, "eta": eta, "points": points}
                journal = Journal.open(lock.path, settings, resume, force, FREE)
                scheduler = Controller(chosen, seeds, maximize, journal)
        work = ObjectiveWork(objective, lock.path, seed)
        own = controller == "own"
        stopped = groups.run(comm, ranks_per_trial, work, scheduler, own, lambda: bool(signals.received), watch)
        outcome = None
        if scheduler is not None:
            rows = sorted(scheduler.outcomes.values(), key=lambda each: (each.task.trial, each.task.rung))
            values, score = next(((each.task.values, each.score) for each in scheduler.ranking()), (None, None))
            outcome = SearchResult(values, score, rows, stopped)
        return comm.bcast(outcome)  # type: ignore[return-value]
    finally:
        journal.close()
        lock.close()


def read(space: Space | Sequence[str] | Mapping[str, Any]) -> Space:
    """Return a Space from any form that `search` takes. Raises UsageError."""
    if isinstance(space, Space):
        return space
    if isinstance(space, Mapping):
        return Space.from_yaml(space)
    return Space.read([space] if isinstance(space, str) else space)


class ObjectiveWork:
    """Calls the objective as the work of a group (groups.py)."""

    def __init__(self, objective: Objective, folder: Path | None, seed: int):
        self.objective, self.folder, self.seed = objective, folder, seed

    def __call__(self, job: SearchJob, comm: MPI.Intracomm) -> Result:
        """Return the job's result, the same on all ranks; collective. Raises a rank's error if other ranks wait."""
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
        def place(trial: int | None) -> Path | None:
            known = self.folder is not None and trial is not None
            return self.folder / "trials" / f"{trial:04d}" / f"seed-{job.seed}" if known else None  # type: ignore

        task = job.task
        before = task.trial if task.parent is None and task.rung > 0 else task.parent
        where = place(task.trial), place(before)
        return Trial(task.values, task.trial, self.seed + job.seed, task.rung, task.amount, *where)


def number(value: Any, wanted: bool) -> float | None:
    """Return the objective's value as a float; None if `wanted` is False. Raises TypeError if it is no number."""
    if not wanted:
        return None
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        value = value.item()  # of numpy
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"the objective has returned {value!r}, which is no number")
    return float(value)
