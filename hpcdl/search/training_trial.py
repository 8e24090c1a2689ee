"""A job of a search as a training run: in a folder of its own, from its last checkpoint, scored from its summary.

    SEARCH/trials/0007/seed-0/     the files of a run (hpcdl/runs/folder.py), and
        begun, failed.json         as of every training among many (hpcdl/launch/isolated_run.py)
        until-4.0.h5               the checkpoint after so many epochs, if other trials may continue from it
        piece                      the number of the last piece that has begun from another trial's checkpoint

    the trial has            no checkpoint    its own checkpoint    a parent
    the run                  begins           continues             begins from the parent's checkpoint

A job ends after `amount` epochs, paused, or at the end of the run (hpcdl/runs/stopping.py). All trials have the same
seeds, number 0 is the search's seed; a learning rate schedule spans the whole run, also if only a piece of it is done.
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
from hpcdl.runs.context import RunContext
from hpcdl.runs.folder import remove_run, summary_of
from hpcdl.search.overdue import end_search, time_limited
from hpcdl.search.space import Space
from hpcdl.search.tasks import Result, SearchJob, SearchTask

KNOWN = ("steps", "epochs", "train_loss", "stopped")  # entries of a summary that tables show
PIECE = "piece"
UNTIL = re.compile(r"until-([0-9.e+-]+)\.h5")
RUNGS = 3  # checkpoints of a trial that are kept for others


@dataclass
class TrialWork:
    """Runs jobs on the ranks of a group: `work(job, comm)` is collective and returns the same on all of them.

    objective: an entry of a run's summary. seed: of seed number 0. heirs: True if trials may begin from others'
    checkpoints. limit: seconds that a job may take, 0: any. name: unique name of this job, for counting attempts.
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
        begin = time.perf_counter()
        result = self._result(job, comm)
        return result._replace(seconds=time.perf_counter() - begin)

    def _result(self, job: SearchJob, comm: MPI.Intracomm) -> Result:
        task, path = job.task, self.path(job.task.trial, job.seed)
        arguments: Any = None
        try:
            with refuse_together(comm), blamed_on(f"{path} cannot be written"):
                if comm.rank == 0:
                    arguments = self._begin(task, job.seed, path)
            arguments = comm.bcast(arguments)
            if isinstance(arguments, Result):
                return arguments
            with reading(comm) as read:
                options = self.command.options(read, *self.words(task), f"--seed={self.seed + job.seed}", *arguments)
        except AgreedError as error:
            if comm.rank == 0:
                record(path, Outcome(failed=line(error)))
            return Result(failed=line(error))
        context = RunContext(pause=task.amount, heir=task.parent is not None)
        end = partial(end_search, self.folder, path, task.trial, self.limit, self.name)
        with time_limited(comm, self.limit, end):
            outcome = attempt(comm, self.command.training, options, path, context)
        own_result = self._end(task, path, outcome.stopped, outcome.failed) if comm.rank == 0 else None
        result: Result = comm.bcast(own_result)
        return result

    def path(self, trial: int, seed: int) -> Path:
        """Return the folder of the run of a trial with seed number `seed`."""
        return self.folder / "trials" / f"{trial:04d}" / f"seed-{seed}"

    def words(self, task: SearchTask) -> list[str]:
        """Return the options that a task adds to the command line."""
        words = [f"--{name}={text}" for name, text in self.space.texts(task.values).items()]
        return [*words, f"--time-limit={self.limit!r}"] if self.limit else words

    def _begin(self, task: SearchTask, seed: int, path: Path) -> list[str] | Result:
        """Return the options that say where the run is and how it begins, or a result if it cannot (rank 0)."""
        if signals.told():
            return Result(stopped=True)
        path.mkdir(parents=True, exist_ok=True)
        reason = given_up(path)
        if reason is not None:
            return Result(failed=reason)
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
        """Return the checkpoint that this piece continues: the parent's last one that is not beyond it.

        Raises UsageError if there is none.
        """
        folder = self.path(task.parent or 0, seed)
        before = [path for epochs, path in piece_checkpoints(folder) if not task.amount or epochs < task.amount]
        if not before:
            raise UsageError(f"{folder} has no checkpoint to go on from")
        return before[-1]

    def _end(self, task: SearchTask, path: Path, stopped: str | None, failed: str | None) -> Result:
        """Return the result of a job whose run has ended (rank 0)."""
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
                self._keep_checkpoint(task, path)
        if not isinstance(score, int | float):
            available = ", ".join(scores_of(summary)) or "none"
            return Result(failed=f"its summary has no {self.objective}; of scores there are: {available}", more=more)
        return Result(float(score), more=more)

    def _keep_checkpoint(self, task: SearchTask, path: Path) -> None:
        """Keep the checkpoint at the end of this piece for other trials."""
        link(path / "checkpoint.h5", path / f"until-{task.amount!r}.h5")
        for _, older in piece_checkpoints(path)[:-RUNGS]:
            older.unlink()

    def remove(self) -> None:
        """Remove the files of all trials of a search, and no other files (rank 0)."""
        for path in self.folder.glob("trials/[0-9]*/seed-[0-9]*"):
            remove_run(path)
            forget(path)
            for each in [path / PIECE, *(file for _, file in piece_checkpoints(path))]:
                each.unlink(missing_ok=True)
            for each in (path / ".lock", path / "logs", path, path.parent):
                with contextlib.suppress(OSError):  # not empty
                    each.unlink() if each.name == ".lock" else each.rmdir()


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def piece_checkpoints(folder: Path) -> list[tuple[float, Path]]:
    """Return (epochs, path) of the checkpoints that others may continue from, in that order."""
    return sorted((float(name[1]), path) for path in folder.iterdir() if (name := UNTIL.fullmatch(path.name)))


def scores_of(summary: dict) -> dict[str, float]:
    """Return the scores of the test and validation parts in a summary, by name."""
    parts = ("test_", "validation_")
    return {name: value for name, value in summary.items() if name.startswith(parts) and isinstance(value, int | float)}
