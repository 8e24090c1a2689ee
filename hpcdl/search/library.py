"""Search as a library: any Python function of a trial, tried at many points by all ranks of a communicator.

    found = search(MPI.COMM_WORLD, ["lr=log:0.001..0.5"], lambda trial, comm: train(trial["lr"], comm), trials=64)

The function is called on all ranks of a group, each time with a trial; what it returns on the group's first rank is the
trial's score. What it raises makes a failed row, with its reason, and the search goes on; but where one rank alone
raises while the others wait for it, nobody can call them out, and the job is ended (hpcdl/launch/isolated_run.py).
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
from hpcdl.search.controller import Controller, Judged
from hpcdl.search.journal import Journal
from hpcdl.search.methods import make_method
from hpcdl.search.space import Space
from hpcdl.search.tasks import Result, SearchJob, Values

FREE = ("program", "ranks_per_trial")  # settings that may have changed where a search goes on


@dataclass(frozen=True)
class Trial:
    """What the objective is called with: `trial["lr"]` is a value, those of `trial.values` that are active.

    number: of the trial, from 0 on. seed: for its random numbers, as the search's seed and its `seeds` have it. rung:
    how many pieces of the trial were before. amount: until where it trains, in what `least` and `most` count; 0: to its
    end.
    """

    values: Values
    number: int
    seed: int
    rung: int = 0
    amount: float = 0.0
    own: Path | None = None
    origin: Path | None = None

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def folder(self) -> Path | None:
        """Its own, which is made when it is asked for; None: the search has none."""
        return made(self.own)

    @property
    def before(self) -> Path | None:
        """The folder that it goes on from, its own or another trial's (population based training); None: it begins."""
        return made(self.origin)


def made(path: Path | None) -> Path | None:
    """The folder, which is there now."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    return path


class SearchResult(NamedTuple):
    """What a search has found: the values of the best trial and its score, None where there is none yet.

    rows: all that has ended, in the order of trials, each with its task, its mean score and its results, one for each
    seed. stopped: whether a signal has ended the search, and something is left to do.
    """

    values: Values | None
    score: float | None
    rows: list[Judged]
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
    """Look for the values of the space with the smallest score; collective over `comm`. Returns the same on all ranks.

    space: lines as --space takes them, what a YAML file of them says, or a Space. objective(trial, comm): the score, a
    number, on the first rank of a group of `ranks_per_trial` ranks, with the group's communicator. method, trials, eta,
    points: as of make_method (methods/). seeds: how often each point is tried; its score is the mean. maximize: the
    largest score is the best. least, most: the first and the last amount, of methods with rungs. controller: "own"
    keeps rank 0 out of the groups. watch(event): is called on rank 0 when a trial has begun or ended, perhaps in a
    thread.

    folder: where the journal lies (hpcdl/search/journal.py), and each trial's folder; `resume` goes on with what is
    there, on any number of ranks; `force` begins anew. None: what is found lasts as long as the process.

    Raises AgreedError on all ranks where the search cannot begin, TrainingError where it cannot go on.
    """
    lock, journal, handed = Folder(None if folder is None else Path(folder), comm.rank), Journal(), None
    try:
        with refuse_together(comm):
            if controller not in ("shared", "own"):
                raise UsageError(f"controller is 'shared' or 'own', not {controller!r}")
            groups.divided(comm.size, ranks_per_trial, controller == "own")
            if seeds < 1:
                raise UsageError(f"seeds should be 1 or more, not {seeds}")
            space = read(space)
            if comm.rank == 0:
                with blamed_on(f"{folder} cannot be written"):
                    if lock.path is not None:
                        lock.path.mkdir(parents=True, exist_ok=True)
                    lock.claim()
                made = make_method(method, space, trials, seed, least=least, most=most, eta=eta, points=points)
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
                handed = Controller(made, seeds, maximize, journal)
        work = ObjectiveWork(objective, lock.path, seed)
        stopped = groups.run(comm, ranks_per_trial, work, handed, controller == "own", told_to_stop, watch)
        found = None
        if handed is not None:
            best = handed.found(1)
            rows = sorted(handed.judged.values(), key=lambda each: (each.task.trial, each.task.rung))
            found = SearchResult(best[0].task.values if best else None, best[0].score if best else None, rows, stopped)
        return comm.bcast(found)  # type: ignore[return-value]
    finally:
        journal.close()
        lock.close()


def read(space: Space | Sequence[str] | Mapping[str, Any]) -> Space:
    """The space in whatever form it is given. Raises UsageError."""
    if isinstance(space, Space):
        return space
    if isinstance(space, str):
        return Space.read([space])
    return Space.from_yaml(space) if isinstance(space, Mapping) else Space.read(space)


def told_to_stop() -> bool:
    """Whether this process has had a signal that ends runs in good order, where the program takes these over."""
    return bool(signals.received)


class ObjectiveWork:
    """The objective as the work of a group (groups.py)."""

    def __init__(self, objective: Objective, folder: Path | None, seed: int):
        self.objective, self.folder, self.seed = objective, folder, seed

    def __call__(self, job: SearchJob, comm: MPI.Intracomm) -> Result:
        """The result, the same on all ranks; collective. Raises what a rank alone has come upon."""
        error: BaseException | None = None
        score, failed = None, None
        try:
            score = number(self.objective(self.trial(job), comm), comm.rank == 0)
        except (Exception, SystemExit) as found:
            error, failed = found, line(told(found))
        if not all_come(comm, PATIENCE if error else math.inf):
            assert error is not None
            raise alone(error)
        everyone = comm.allgather((score, failed))
        failures = [why for _, why in everyone if why is not None]
        return Result(None, failures[0]) if failures else Result(everyone[0][0])

    def trial(self, job: SearchJob) -> Trial:
        """What the objective is to know of a job."""
        task, before = job.task, None
        own = self.place(task.trial, job.seed)
        if task.parent is not None:
            before = self.place(task.parent, job.seed)
        elif task.rung > 0:
            before = own
        return Trial(task.values, task.trial, self.seed + job.seed, task.rung, task.amount, own, before)

    def place(self, trial: int, seed: int) -> Path | None:
        """The folder of a trial with a seed."""
        return None if self.folder is None else self.folder / "trials" / f"{trial:04d}" / f"seed-{seed}"


def number(value: Any, wanted: bool) -> float | None:
    """What an objective has returned, as a score; None from a rank whose value is not wanted. Raises TypeError."""
    if not wanted:
        return None
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        value = value.item()  # of numpy
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"the objective has returned {value!r}, which is no number")
    return float(value)
