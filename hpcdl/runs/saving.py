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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import OLDER, Checkpoint, rotate
from hpcdl.checkpoint.shards import JoinedPieces, Portion, WrittenShard, name_of_piece, sweep, write_piece
from hpcdl.checkpoint.state import State
from hpcdl.comm import Communicator, refuse_together
from hpcdl.comm.progress import activity
from hpcdl.errors import TrainingError, UsageError, blamed_on, reason
from hpcdl.files import temporary_name
from hpcdl.machine.display import Display
from hpcdl.runs.folder import Folder
from hpcdl.runs.options import Options
from hpcdl.runs.ownership import Ownership
from hpcdl.runs.segments import Legs

log = logging.getLogger("hpcdl")
LAST, BEST = "checkpoint.h5", "best.h5"
TOKENS = 1 << 32
FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointJob:
    """One checkpoint on its way. names: of the files that it becomes; piece: of this rank's, where each writes one.

    final: whether the run cannot go on without it. keep: how many stay; previous: the step of the last one before it.
    """

    piece, final, keep, previous = "", True, 1, None  # type: str, bool, int, int | None

    written: WrittenShard | None = None  # this rank's piece
    problem = ""  # what is in its way, as this rank knows it
    full = False  # whether that is a full disk
    thread: threading.Thread | None = None

    def __init__(
        self, folder: Any, rank: int, names: list[str], collected: tuple[dict, dict[str, Portion]], attributes: dict
    ):
        self.folder, self.rank, self.names, self.attributes = folder, rank, names, attributes
        self.vectors, self.portions = collected
        self.step: int = attributes["step"]

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
                joined = JoinedPieces([part.written for part in parts if part.written], forms)
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
    """Writes a run's checkpoints. failed: how many could not be written. apart: whether each rank writes pieces.

    saved: the step of the last one that is written.
    """

    held: Ownership  # from `begin` on
    legs: Legs

    def __init__(self, options: Options, state: State, display: Display):
        self.options, self.state, self.display = options, state, display
        self.folder, self.failed, self.apart, self.token = Folder(None, 0), 0, False, 0
        self.saved: int | None = None
        self.job: CheckpointJob | None = None

    def begin(self, folder: Folder, held: Ownership, legs: Legs, comm: Communicator) -> None:
        """The run's folder is there: find out how it is written to; collective over all ranks."""
        self.folder, self.held, self.legs = folder, held, legs
        with activity.inside("say whether the model is cut", comm):
            cut = comm.mpi.bcast(self.state.cut)  # those who are not rank 0's peers hold nothing
        if folder.path is None or not cut or comm.size == 1:
            return
        blind, self.token = unseen(comm, folder.path)
        self.apart = not blind
        if blind:
            where = f"{folder.path} is not seen on {', '.join(blind)}"
            more = "give an --out that all hosts share, and no memory has to hold all of it"
            self._warn(f"{where}: rank 0 gathers the whole state for each checkpoint; {more}")

    def save(self, names: list[str], last: bool, attributes: Callable[[], dict]) -> None:
        """Write a checkpoint of the run as it stands, where it has a folder; collective over the ranks that agree.

        names: LAST, BEST, which has been scored just now, or both, which are then one file with two names. last:
        whether the run is over. attributes: what says where it is, as of when all is gathered. Raises TrainingError
        where that fails, and the run cannot go on without it.
        """
        if len(names) > 1 and not self.held.still:
            for name in names:
                self.save([name], last, attributes)
            return
        if names == [LAST]:
            self.held.refresh()
        if self.folder.path is None or not names:
            return
        self.settle()
        with self.legs.comm.timeline.span("checkpoint"):
            self._save(names, last, attributes)

    def _save(self, names: list[str], last: bool, attributes: Callable[[], dict]) -> None:
        peers = self.held.peers
        self.held.gather_costs(self.legs, self.folder)
        vectors, portions, good = self.state.collect(peers, self.apart)
        about = attributes()
        if not good:
            raise TrainingError(f"the parameters after step {about['step']} are not finite; {self.folder.kept()}")
        self.token = (self.token + 1) % TOKENS
        self.job = job = CheckpointJob(self.folder.path, peers.rank, names, (vectors, portions), about)
        job.piece = name_of_piece(job.step, f"{self.token:08x}", peers.rank) if self.apart else ""
        job.final, job.keep, job.previous = last or self.options.checkpoint_must, self.options.keep, self.saved
        if self.options.checkpoint_async and not last:
            job.copy()
            job.thread = threading.Thread(target=job.write, name="checkpoint", daemon=True)
            job.thread.start()
            return
        job.write()
        self.settle()

    def settle(self, wait: bool = True) -> None:
        """Let all ranks know what has become of the checkpoint on its way, if there is one; collective over them.

        wait: until it is written; else, if it is not, it stays on its way. Raises TrainingError as `save` does.
        """
        job = self.job
        if job is None:
            return
        comm = self.held.peers
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
            self.saved = job.step

    def _not_written(self, job: CheckpointJob, problem: str) -> None:
        where = " and ".join(str(job.folder / name) for name in job.names)
        text = f"the checkpoint of step {job.step}, {where}, cannot be written: {problem}"
        if job.final:
            raise TrainingError(f"{text}; {self.folder.kept()}")
        self.failed += 1
        self._warn(f"{text}; the run goes on, and {self.folder.kept()}")

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        self.display.line(f"warning: {text}")

    def abandon(self) -> None:
        """The run ends in an error: its folder is closed, when nothing is written there any more."""
        job = self.job
        if job is not None and job.thread is not None:
            job.thread.join()
            if job.rank == 0 and not job.piece and not job.problem and LAST in job.names:
                # It is there, and ranks that outlive others (hpcdl/recovery/survivor.py) go on after it.
                self.saved = job.step
        self.folder.close()


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
    mark, token = temporary_name(folder / LAST), int.from_bytes(os.urandom(4), "little")
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


def keep_legs(folder: Folder, legs: list[dict]) -> None:
    """Let the last checkpoint keep what this leg has cost all ranks, now that it is known; on rank 0.

    It is written anew, under its name when it is whole; where that fails, what others have spent stays unknown to a run
    that goes on, which the log says.
    """
    assert folder.path is not None
    path = folder.path / LAST
    try:
        found = Checkpoint.read(path, pieces=False)
        found.attributes["legs"] = legs
        found.write(path)
    except (UsageError, OSError) as error:
        log.warning("%s does not keep what the ranks have spent: %s", path, error)
