"""A job of a search as a training run: in a folder of its own, from its last checkpoint, with a score from its summary.

    SEARCH/trials/0007/seed-0/     what a run writes (hpcdl/runs/folder.py), and
        begun, failed.json         as of every training among many (hpcdl/launch/isolated_run.py)
        until-4.0.h5               the checkpoint after so many epochs, where others may go on from it
        piece                      the number of the last piece that has begun from another trial's checkpoint

    a job begins                   there is no checkpoint      its own is there      it has a parent
    the run                        begins                      goes on               begins from the parent's
    a job ends after `amount` epochs, paused, or at the end of the run (hpcdl/runs/stopping.py)

All trials have the same seeds, seed number 0 that of the search; the schedule of a rate is made for the whole run, also
where a piece of it is done.
"""

import contextlib
import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import link
from hpcdl.comm import refuse_together
from hpcdl.errors import AgreedError, UsageError, blamed_on, line
from hpcdl.launch.command_lines import Command
from hpcdl.launch.isolated_run import BEGUN, Outcome, attempt, begun, forget, given_up, record, write_begun
from hpcdl.launch.launch_consistency import reading
from hpcdl.runs import signals
from hpcdl.runs.folder import remove_run, summary_of
from hpcdl.search.overdue import end_search, guarded
from hpcdl.search.space import Space
from hpcdl.search.tasks import Result, SearchJob, SearchTask

KNOWN = ("steps", "epochs", "train_loss", "stopped")  # of a summary, for tables, beside the scores
PIECE = "piece"
UNTIL = re.compile(r"until-([0-9.e+-]+)\.h5")
RUNGS = 3  # pieces of a trial whose checkpoints are kept for others


@dataclass
class TrialWork:
    """Does jobs, on the ranks of a group: `work(job, comm)` is collective over them, and returns the same on all.

    objective: an entry of a run's summary. seed: of seed number 0. heirs: whether trials may begin from others'
    checkpoints. limit: seconds that a job may take, 0: any. name: of the program that runs, unlike that of any other.
    """

    command: Command
    folder: Path
    space: Space
    objective: str
    seed: int = 0
    heirs: bool = False
    limit: float = 0.0
    name: str = ""

    def __call__(self, job: SearchJob, comm: MPI.Intracomm) -> Result:
        asked = time.perf_counter()
        result = self._result(job, comm)
        return result._replace(seconds=time.perf_counter() - asked)

    def _result(self, job: SearchJob, comm: MPI.Intracomm) -> Result:
        task, path = job.task, self.path(job.task.trial, job.seed)
        how: Any = None
        try:
            with refuse_together(comm), blamed_on(f"{path} cannot be written"):
                if comm.rank == 0:
                    how = self._begin(task, job.seed, path)
            how = comm.bcast(how)
            if isinstance(how, Result):
                return how
            with reading(comm) as read:
                options = self.command.options(read, *self.words(task), f"--seed={self.seed + job.seed}", *how)
        except AgreedError as error:
            if comm.rank == 0:
                record(path, Outcome(failed=line(error)))
            return Result(failed=line(error))
        options.pause, options.heir = task.amount, task.parent is not None
        end = partial(end_search, self.folder, path, task.trial, self.limit, self.name)
        with guarded(comm, self.limit, end):
            ended = attempt(comm, self.command.training, options, path)
        found = self._end(task, path, ended.stopped, ended.failed) if comm.rank == 0 else None
        result: Result = comm.bcast(found)
        return result

    def path(self, trial: int, seed: int) -> Path:
        """The folder of the run of a trial with seed number `seed`."""
        return self.folder / "trials" / f"{trial:04d}" / f"seed-{seed}"

    def words(self, task: SearchTask) -> list[str]:
        """What a task adds to the command line."""
        found = [f"--{name}={text}" for name, text in self.space.texts(task.values).items()]
        return [*found, f"--time-limit={self.limit!r}"] if self.limit else found

    def _begin(self, task: SearchTask, seed: int, path: Path) -> list[str] | Result:
        """Where the run is, and how it begins; or how the job has ended, without it (rank 0)."""
        if signals.told():
            return Result(stopped=True)
        path.mkdir(parents=True, exist_ok=True)
        why = given_up(path)
        if why is not None:
            return Result(failed=why)
        write_begun(path, begun(path) + 1, self.name)
        last = path / "checkpoint.h5"
        if task.parent is not None and _number(path / PIECE) != task.rung:
            last.unlink(missing_ok=True)
            (path / PIECE).write_text(f"{task.rung}\n")
        if last.exists():
            return [f"--resume={path}"]
        if task.parent is None:
            return [f"--out={path}", "--force"]
        return [f"--out={path}", "--force", f"--resume={self._parent(task, seed)}"]

    def _parent(self, task: SearchTask, seed: int) -> Path:
        """The checkpoint that this piece begins from: the last of the parent's that is not beyond it.

        Raises UsageError where there is none.
        """
        folder = self.path(task.parent or 0, seed)
        before = [path for epochs, path in kept(folder) if not task.amount or epochs < task.amount]
        if not before:
            raise UsageError(f"{folder} has no checkpoint to go on from")
        return before[-1]

    def _end(self, task: SearchTask, path: Path, stopped: str | None, failed: str | None) -> Result:
        """What the job has brought (rank 0)."""
        with contextlib.suppress(OSError):
            (path / BEGUN).unlink()
        if failed is not None:
            return Result(failed=failed)
        if stopped == "signal":
            return Result(stopped=True)
        if stopped == "time limit" and self.limit:
            return Result(failed=f"it took longer than --trial-limit {self.limit:g}")
        summary = summary_of(path) or {}
        score = summary.get(self.objective)
        more = {name: summary.get(name) for name in KNOWN} | scores_of(summary)
        more["training_seconds"] = summary.get("seconds")
        more["examples"] = round((summary.get("seconds") or 0) * (summary.get("examples_per_second") or 0))
        more["folder"] = str(path.relative_to(self.folder))
        if self.heirs:
            with blamed_on(f"{path} cannot be written"):
                self._keep(task, path)
        if not isinstance(score, int | float):
            there = ", ".join(scores_of(summary)) or "none"
            return Result(failed=f"its summary has no {self.objective}; of scores there are: {there}", more=more)
        return Result(float(score), more=more)

    def _keep(self, task: SearchTask, path: Path) -> None:
        """Let others begin from where this piece has ended, whatever becomes of the trial."""
        link(path / "checkpoint.h5", path / f"until-{task.amount!r}.h5")
        for _, older in kept(path)[:-RUNGS]:
            older.unlink()

    def remove(self) -> None:
        """Remove what a search has left of its trials, and no other files (rank 0)."""
        for path in self.folder.glob("trials/[0-9]*/seed-[0-9]*"):
            remove_run(path)
            forget(path)
            for each in [path / PIECE, *(file for _, file in kept(path))]:
                each.unlink(missing_ok=True)
            for each in (path / ".lock", path / "logs", path, path.parent):
                with contextlib.suppress(OSError):  # it holds something else
                    each.unlink() if each.name == ".lock" else each.rmdir()


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def kept(folder: Path) -> list[tuple[float, Path]]:
    """The checkpoints of a run that others may go on from, with their epochs, in that order."""
    return sorted((float(name[1]), path) for path in folder.iterdir() if (name := UNTIL.fullmatch(path.name)))


def scores_of(summary: dict) -> dict[str, float]:
    """The scores of the test part and the validation part in a summary, by name."""
    parts = ("test_", "validation_")
    return {name: value for name, value in summary.items() if name.startswith(parts) and isinstance(value, int | float)}
