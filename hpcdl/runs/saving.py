"""Checkpoints of a run while it goes on: written at once or in the background, and what follows where one cannot be.

    save      collect: views of what the ranks hold     write: a piece by each rank, or all by rank 0     join: rank 0
    async     collect, copy | the next steps go on      write, in a thread of each rank                   join, later

Of a model that is cut each rank writes a piece of its own (hpcdl/checkpoint/shards.py); else rank 0 writes the one
file. With --checkpoint-async a step pays for the copy alone, and for memory of its size. One checkpoint at most is on
its way: the next one waits for it, and so does the end of the run. The threads send no messages: when the ranks meet
the next time they agree whether all have written, and rank 0 then joins the pieces; so a failure is known to all there.

One that cannot be written in the middle of a run, as on a full disk, leaves the one before and costs a warning: the
next may find room. The last one is what a run is for, and with --checkpoint-must each is: then all ranks end. With
--keep 2 the one before the last is a spare, which gives way where the disk is full.

Where the ranks do not see the same folder, rank 0 gathers the whole state, which has to fit into its memory.
"""

import contextlib
import errno
import json
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import OLDER, Checkpoint, rotate
from hpcdl.checkpoint.shards import Joined, Portion, WrittenShard, name_of_piece, sweep, write_piece
from hpcdl.comm import Communicator, refuse_together
from hpcdl.comm.progress import activity
from hpcdl.errors import TrainingError, UsageError, blamed_on, reason
from hpcdl.files import part
from hpcdl.runs.resume import position

if TYPE_CHECKING:
    from hpcdl.runs.run import Run

log = logging.getLogger("hpcdl")
LAST, BEST = "checkpoint.h5", "best.h5"
TOKENS = 1 << 32
FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointJob:
    """One checkpoint on its way. names: of the files that it becomes; apart: whether each rank writes a piece.

    final: whether the run cannot go on without it. previous: the step of the last one before it.
    """

    written: WrittenShard | None = None  # this rank's piece
    problem = ""  # what is in its way, as this rank knows it
    full = False  # whether that is a full disk
    thread: threading.Thread | None = None

    def __init__(self, run: "Run", names: list[str], collected: tuple[dict, dict[str, Portion]], piece: str):
        self.folder: Any = run.folder.path
        self.rank, self.step, self.names, self.piece = run.held.peers.rank, run.step, names, piece
        self.vectors, self.portions = collected
        self.attributes = position(run)
        self.final = run.over or run.options.checkpoint_must
        self.keep, self.previous = run.options.keep, run.saved

    def copy(self) -> None:
        """Let it hold what is collected by itself: the run goes on meanwhile."""
        self.vectors = {name: vector.copy() for name, vector in self.vectors.items()}
        self.portions = {name: portion.copied() for name, portion in self.portions.items()}
        self.attributes = json.loads(json.dumps(self.attributes))

    def write(self) -> None:
        """This rank's part of it: its piece, or on rank 0 the whole file."""
        self.written, self.problem, self.full = None, "", False
        try:
            if self.piece:
                self.written = write_piece(self.folder, self.piece, self.portions)
            elif self.rank == 0:
                self.name(Checkpoint(self.vectors, self.attributes))
        except Exception as error:  # whatever h5py raises: all ranks are to know
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.problem, self.full = reason(error), isinstance(error, OSError) and error.errno in FULL

    def join(self, parts: "list[WrittenPart]") -> None:
        """On rank 0: make one checkpoint of what the ranks have written, if all have."""
        self.problem = next((part.problem for part in parts if part.problem), "")
        self.full = any(part.full for part in parts)
        try:
            if not self.problem:
                forms = {name: form for part in parts for name, form in part.forms.items()}
                joined = Joined([part.written for part in parts if part.written], forms)
                self.name(Checkpoint(self.vectors, self.attributes, joined))
        except Exception as error:
            self._fail(error)
        if self.problem:
            with contextlib.suppress(OSError):
                sweep(self.folder)

    def name(self, found: Checkpoint) -> None:
        """Give it its names, the best before the last."""
        best = self.folder / BEST
        if BEST in self.names:
            found.write(best)
        if LAST in self.names:
            same = {"same": best} if BEST in self.names else {}
            rotate(self.folder, self.keep, found, self.previous, **same)

    def give_up_spare(self) -> str:
        """On rank 0: remove the checkpoint before the last one where that makes room; its name, or ""."""
        last, given = self.folder / LAST, ""
        if self.full and self.keep == 2:
            with contextlib.suppress(OSError):
                for each in [each for each in self.folder.iterdir() if OLDER.fullmatch(each.name)]:
                    given = given if each.samefile(last) else each.name
                    each.unlink()
                sweep(self.folder)
        return given

    @property
    def part(self) -> "WrittenPart":
        """What this rank has to say of it."""
        forms = {name: (portion.size, portion.dtype) for name, portion in self.portions.items()}
        return WrittenPart(self.written, self.problem, self.full, forms)

    @property
    def done(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


class WrittenPart(NamedTuple):
    """What a rank has written of a checkpoint, or why not, and the vectors (size, type) that it has a part of."""

    written: WrittenShard | None
    problem: str
    full: bool
    forms: dict[str, tuple[int, np.dtype]]


class Saver:
    """Writes a run's checkpoints. failed: how many could not be written. apart: whether each rank writes pieces."""

    def __init__(self, run: "Run"):
        self.run, self.failed, self.apart, self.token = run, 0, False, 0
        self.job: CheckpointJob | None = None

    def begin(self, folder: Path | None) -> None:
        """The run's folder is there: find out how it is written to; collective over all ranks."""
        comm = self.run.bookkeeping
        with activity.inside("say whether the model is cut", comm):
            cut = comm.mpi.bcast(self.run.state.cut)  # those who are not rank 0's peers hold nothing
        if folder is None or not cut or comm.size == 1:
            return
        blind, self.token = unseen(comm, folder)
        self.apart = not blind
        if blind:
            where = f"{folder} is not seen on {', '.join(blind)}"
            more = "give an --out that all hosts share, and no memory has to hold all of it"
            self._warn(f"{where}: rank 0 gathers the whole state for each checkpoint; {more}")

    def save(self, names: list[str]) -> None:
        """Write a checkpoint of the run as it stands, where it has a folder; collective over the ranks that agree.

        names: LAST, BEST, which has been scored just now, or both, which are then one file with two names. Raises
        TrainingError where that fails, and the run cannot go on without it.
        """
        run = self.run
        if len(names) > 1 and not run.held.still:
            for name in names:
                self.save([name])
            return
        if names == [LAST]:
            run.held.refresh()
        if run.folder.path is None or not names:
            return
        self.settle()
        with run.comm.timeline.span("checkpoint"):
            self._save(names)

    def _save(self, names: list[str]) -> None:
        run = self.run
        run.held.gather_costs(run)
        vectors, portions, good = run.state.collect(run.held.peers, self.apart)
        if not good:
            raise TrainingError(f"the parameters after step {run.step} are not finite; {run.folder.kept()}")
        self.token = (self.token + 1) % TOKENS
        piece = name_of_piece(run.step, f"{self.token:08x}", run.held.peers.rank) if self.apart else ""
        self.job = CheckpointJob(run, names, (vectors, portions), piece)
        if run.options.checkpoint_async and not run.over:
            self.job.copy()
            self.job.thread = threading.Thread(target=self.job.write, name="checkpoint", daemon=True)
            self.job.thread.start()
            return
        self.job.write()
        self.settle()

    def settle(self, wait: bool = True) -> None:
        """Let all ranks know what has become of the checkpoint on its way, if there is one; collective over them.

        wait: until it is written; else, if it is not, it stays on its way. Raises TrainingError as `save` does.
        """
        job, comm = self.job, self.run.held.peers
        if job is None:
            return
        if not wait:
            writing = np.array([0.0 if job.done else 1.0])
            comm.all_reduce(writing)
            if writing[0]:
                return
        if job.thread is not None:
            job.thread.join()
        self.job = None
        problem, given = agreed(comm, job)
        if given:
            self._warn(f"the disk has no room for the checkpoint of step {job.step}: {given} gives way to it")
            job.write()
            problem, _ = agreed(comm, job)
        if problem:
            self._not_written(job, problem)
        elif LAST in job.names:
            self.run.saved = job.step

    def _not_written(self, job: CheckpointJob, problem: str) -> None:
        where = " and ".join(str(job.folder / name) for name in job.names)
        text = f"the checkpoint of step {job.step}, {where}, cannot be written: {problem}"
        if job.final:
            raise TrainingError(f"{text}; {self.run.folder.kept()}")
        self.failed += 1
        self._warn(f"{text}; the run goes on, and {self.run.folder.kept()}")

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        self.run.display.line(f"warning: {text}")

    def abandon(self) -> None:
        """The run ends in an error: its folder is closed, when nothing is written there any more."""
        job = self.job
        if job is not None and job.thread is not None:
            job.thread.join()
            if job.rank == 0 and not job.piece and not job.problem and LAST in job.names:
                self.run.saved = (
                    job.step
                )  # it is there, and ranks that outlive others (hpcdl/recovery/survivor.py) go on after it
        self.run.folder.close()


def agreed(comm: Communicator, job: CheckpointJob) -> tuple[str, str]:
    """Join what all ranks have written: what is in the way, or "", and the file that has made room; collective."""
    if job.piece:
        with activity.inside("gather what was written", comm):
            parts = comm.mpi.gather(job.part)
        if parts is not None:
            job.join(parts)
    with activity.inside("say what was written", comm):
        given = job.give_up_spare() if comm.rank == 0 else ""
        return comm.mpi.bcast((job.problem, given))  # type: ignore[no-any-return]


def unseen(comm: Communicator, folder: Path) -> tuple[list[str], int]:
    """The hosts whose ranks do not see what rank 0 writes to a folder; and a number that no run before had. Collective.

    Raises AgreedError where rank 0 cannot write there.
    """
    mark, token = part(folder / LAST), int.from_bytes(os.urandom(4), "little")
    with refuse_together(comm.mpi), blamed_on(f"{folder} cannot be written"):
        if comm.rank == 0:
            mark.write_text(str(token))
    with activity.inside("look for the folder", comm):
        name, token = comm.mpi.bcast((mark.name, token))
        sees = False
        with contextlib.suppress(OSError):
            os.listdir(folder)  # a network's file system looks again what is there
            sees = (folder / name).read_text() == str(token)
        blind = comm.mpi.allgather(None if sees else MPI.Get_processor_name())
    if comm.rank == 0:
        mark.unlink(missing_ok=True)
    return sorted({host for host in blind if host}), token


def keep_legs(run: "Run", legs: list[dict]) -> None:
    """Let the last checkpoint keep what this leg has cost all ranks, now that it is known; on rank 0.

    Where the ranks have met at that checkpoint it keeps that already. It is written anew, under its name when it is
    whole; where that fails, what others have spent stays unknown to a run that goes on, which the log says.
    """
    if run.folder.path is None or run.saved is None or run.saved != run.step or run.legs.complete:
        return
    path = run.folder.path / LAST
    try:
        found = Checkpoint.read(path, pieces=False)
        found.attributes["legs"] = legs
        found.write(path)
    except (UsageError, OSError) as error:
        log.warning("%s does not keep what the ranks have spent: %s", path, error)
