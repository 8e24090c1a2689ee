"""A job of a search as a training run: in its own folder, it continues its last checkpoint; its summary has the score.

    SEARCH/trials/0007/seed-0/     the files of a run (hpcdl/runs/folder.py), and
        begun, failed.json         attempts and failure, as of any isolated run (hpcdl/launch/isolated_run.py)
        until-4.0.h5               the checkpoint after 4 epochs, if other trials may continue from it
        piece                      the number of the last piece that has begun from another trial's checkpoint

    the trial has            no checkpoint    its own checkpoint    a parent
    the run                  begins           continues             begins from the parent's checkpoint

A job pauses after `amount` epochs, or ends with the run (hpcdl/runs/stopping.py). All trials have the same seeds: seed
number k is the search's seed + k. A learning rate schedule spans the whole run, also if only a piece of it is done."""

import contextlib
import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import link
from hpcdl.errors import UsageError, blamed_on
from hpcdl.launch.command_lines import Command
from hpcdl.launch.isolated_run import Outcome, attempt_in, begun, forget, given_up, placed, write_begun
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
    """Runs jobs on the ranks of a group: `work(job, comm)` is collective and returns the same Result on all ranks.
    objective: the summary's entry that is the score. seed: the search's. heirs: True if trials may begin from other
    trials' checkpoints. limit: seconds a job may take; 0: no limit. name: of this launch, unique, to count attempts."""

    command: Command
    folder: Path
    space: Space
    objective: str
    seed: int = 0
    heirs: bool = False
    limit: float = 0.0
    name: str = ""

    def __call__(self, job: SearchJob, comm: MPI.Intracomm) -> Result:
        started, task, path = time.perf_counter(), job.task, self.path(job.task.trial, job.seed)
        words = [f"--{name}={text}" for name, text in self.space.texts(task.values).items()]
        words += [f"--seed={self.seed + job.seed}", *[f"--time-limit={self.limit!r}"] * bool(self.limit)]
        context = RunContext(pause=task.amount, heir=task.parent is not None)
        begin = partial(self._begin, task, job.seed, path)
        end = partial(end_search, self.folder, path, task.trial, self.limit, self.name)
        with time_limited(comm, self.limit, end):
            outcome = attempt_in(comm, self.command, path, begin, words, context)
        result: Any = comm.bcast(self._end(task, path, outcome) if comm.rank == 0 else None)
        return result._replace(seconds=time.perf_counter() - started)  # type: ignore[no-any-return]

    def path(self, trial: int, seed: int) -> Path:
        """Return the folder of the run of a trial with seed number `seed`."""
        return self.folder / "trials" / f"{trial:04d}" / f"seed-{seed}"

    def _begin(self, task: SearchTask, seed: int, path: Path) -> list[str] | Outcome:
        """Return the options of the run's folder and checkpoint, or the Outcome if the run cannot begin (rank 0)."""
        if signals.told():
            return Outcome("signal")
        path.mkdir(parents=True, exist_ok=True)
        reason = given_up(path)
        if reason is not None:
            return Outcome(failed=reason)
        write_begun(path, begun(path) + 1, self.name)
        last, piece = path / "checkpoint.h5", path / PIECE
        if task.parent is not None and not (piece.exists() and piece.read_text() == f"{task.rung}\n"):
            last.unlink(missing_ok=True)
            piece.write_text(f"{task.rung}\n")
        if last.exists() or task.parent is None:
            return placed(path)
        folder = self.path(task.parent, seed)  # its last checkpoint that is not beyond this piece
        before = [path for epochs, path in piece_checkpoints(folder) if not task.amount or epochs < task.amount]
        if not before:
            raise UsageError(f"{folder} has no checkpoint for another trial to begin from")
        return [f"--out={path}", "--force", f"--resume={before[-1]}"]

    def _end(self, task: SearchTask, path: Path, outcome: Outcome) -> Result:
        if outcome.failed is not None:
            return Result(failed=outcome.failed)
        if outcome.stopped == "signal":
            return Result(stopped=True)
        if outcome.stopped == "time limit" and self.limit:
            return Result(failed=f"it took longer than --trial-limit {self.limit:g}")
        summary = summary_of(path) or {}
        score = summary.get(self.objective)
        more = {name: summary.get(name) for name in KNOWN} | scores_of(summary)
        more["training_seconds"] = summary.get("seconds")
        more["examples"] = round((summary.get("seconds") or 0) * (summary.get("examples_per_second") or 0))
        more["folder"] = str(path.relative_to(self.folder))
        if self.heirs:
            with blamed_on(f"{path} cannot be written"):
                link(path / "checkpoint.h5", path / f"until-{task.amount!r}.h5")
                for _, older in piece_checkpoints(path)[:-RUNGS]:
                    older.unlink()
        if not isinstance(score, int | float):
            available = ", ".join(scores_of(summary)) or "none"
            return Result(failed=f"its summary has no {self.objective}; scores in the summary: {available}", more=more)
        return Result(float(score), more=more)

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


def piece_checkpoints(folder: Path) -> list[tuple[float, Path]]:
    """Return (epochs, path) of a run's checkpoints from which other trials may continue, the fewest epochs first."""
    return sorted((float(name[1]), path) for path in folder.iterdir() if (name := UNTIL.fullmatch(path.name)))


def scores_of(summary: dict) -> dict[str, float]:
    """Return the scores of the test and validation parts in a summary, by name."""
    parts = ("test_", "validation_")
    return {name: value for name, value in summary.items() if name.startswith(parts) and isinstance(value, int | float)}
