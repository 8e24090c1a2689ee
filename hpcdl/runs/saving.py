"""Checkpoints of a run while it goes on: written at once or in the background, and what happens if that fails.

    save      collect: views of what the ranks hold     write: a piece by each rank, or all by rank 0     join: rank 0
    async     collect, copy | the next steps go on      write, in a thread of each rank                   join, later

For a model that is cut each rank writes a piece (hpcdl/checkpoint/shards.py), unless ranks do not see the folder: then
rank 0 gathers the whole state in its memory. At most one checkpoint is being written: the next one, and the end of the
run, wait for it. The threads send no messages: the ranks agree at their next meeting whether all have written.

If a checkpoint cannot be written in the middle of a run, as on a full disk, the run warns and goes on. All ranks end if
it is the last, or with --checkpoint-must. On a full disk --keep 2 removes the checkpoint before the last."""

import contextlib
import errno
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint, older_of, rotate
from hpcdl.checkpoint.shards import JoinedPieces, Portion, WrittenShard, name_of_piece, sweep, write_piece
from hpcdl.checkpoint.state import State
from hpcdl.comm import Communicator, refuse_together
from hpcdl.errors import TrainingError, UsageError, blamed_on, reason
from hpcdl.files import temporary_name
from hpcdl.machine.display import Display
from hpcdl.runs.folder import Folder
from hpcdl.runs.options import Options
from hpcdl.runs.ownership import Saved
from hpcdl.runs.segments import Legs

log = logging.getLogger("hpcdl")
LAST, BEST = "checkpoint.h5", "best.h5"
TOKENS = 1 << 32
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class CheckpointJob:
    """A checkpoint that is being written."""

    folder: Path
    rank: int
    names: list[str]  # of the files to be written
    step: int
    vectors: dict[str, np.ndarray]
    portions: dict[str, Portion]
    attributes: dict
    piece: str  # name of this rank's file; "": rank 0 writes the whole checkpoint
    final: bool  # True if the run cannot go on without it
    keep: int  # how many checkpoints stay
    previous: int | None  # the step of the checkpoint before this one
    written: WrittenShard | None = None  # this rank's piece
    problem: str = ""  # why it cannot be written, as far as this rank knows; "": no problem
    full: bool = False  # True if the problem is a full disk
    thread: threading.Thread | None = None

    def copy(self) -> None:
        """Copy the collected state, as the run goes on while the copy is written."""
        self.vectors = {name: vector.copy() for name, vector in self.vectors.items()}
        self.portions = {name: portion.copied() for name, portion in self.portions.items()}
        self.attributes = json.loads(json.dumps(self.attributes))

    def write(self) -> None:
        """Write this rank's piece or, of a checkpoint that is not in pieces, on rank 0 the whole file."""
        self.written, self.problem, self.full = None, "", False
        try:
            if self.piece:
                self.written = write_piece(self.folder, self.piece, self.portions)
            elif self.rank == 0:
                self.name(Checkpoint(self.vectors, self.attributes))
        except Exception as error:  # of any type, from h5py: all ranks must learn of it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.problem, self.full = reason(error), isinstance(error, OSError) and error.errno in FULL

    def join(self, parts: "list[WrittenPart]") -> None:
        """Join the pieces of all ranks into one checkpoint, if all are written; on rank 0."""
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
        """Write the checkpoint `found` as best.h5, then as checkpoint.h5: as each of these that is in `names`."""
        best = self.folder / BEST if BEST in self.names else None
        if best is not None:
            found.write(best)
        if LAST in self.names:
            rotate(self.folder, self.keep, found, self.previous, best)

    def give_up_spare(self) -> str:
        """On a full disk, with --keep 2, remove the checkpoint before the last; return its name, or "". On rank 0."""
        last, given = self.folder / LAST, ""
        if self.full and self.keep == 2:
            with contextlib.suppress(OSError):
                for each in older_of(self.folder):
                    given = given if each.samefile(last) else each.name
                    each.unlink()
                sweep(self.folder)
        return given


class WrittenPart(NamedTuple):
    """A rank's part of a checkpoint. problem: why it is not written, or "". forms: (size, type) of its vectors."""

    written: WrittenShard | None
    problem: str
    full: bool
    forms: dict[str, tuple[int, np.dtype]]


class Saver:
    """Writes checkpoints. failed: how many failed. apart: each rank writes a piece. saved: last saved step, or None."""

    held: Saved  # from `begin` on
    peers: Communicator
    legs: Legs

    def __init__(self, options: Options, state: State, display: Display):
        self.options, self.state, self.display = options, state, display
        self.folder, self.failed, self.apart, self.token = Folder(None, 0), 0, False, 0
        self.saved: int | None = None
        self.job: CheckpointJob | None = None

    def begin(self, folder: Folder, held: Saved, peers: Communicator, legs: Legs, comm: Communicator) -> None:
        """Find out how to write to the run's folder; collective over all ranks. peers: the ranks that write."""
        self.folder, self.held, self.peers, self.legs = folder, held, peers, legs
        with comm.inside("say whether the model is cut"):
            cut = comm.mpi.bcast(self.state.cut)  # those who are not rank 0's peers hold nothing
        if folder.path is None or not cut or comm.size == 1:
            return
        blind, self.token = unseen(comm, folder.path)
        self.apart = not blind
        if blind:
            where = f"{folder.path} is not seen on {', '.join(blind)}"
            more = "with an --out that all hosts see, each rank writes its own part"
            self._warn(f"{where}: rank 0 gathers the whole state for each checkpoint; {more}")

    def save(self, names: list[str], last: bool, attributes: Callable[[], dict]) -> None:
        """Write a checkpoint of the run as it stands, if it has a folder; collective over the ranks that agree. names:
        LAST, BEST (just scored), or both. last: True if the run is over. attributes: called when all is gathered;
        returns the attributes. Raises TrainingError if the run cannot go on without a checkpoint that fails."""
        if len(names) > 1 and not self.held.still:
            for name in names:
                self.save([name], last, attributes)
            return
        if names == [LAST]:
            self.held.refresh()
        if self.folder.path is None or not names:
            return
        self.settle()
        options, rank = self.options, self.peers.rank
        with self.legs.comm.timeline.span("checkpoint"):
            self.held.gather_costs(self.legs, self.folder)
            vectors, portions, good = self.state.collect(self.peers, self.apart)
            about = attributes()
            step = about["step"]
            if not good:
                raise TrainingError(f"the parameters after step {step} are not finite; {self.folder.kept()}")
            self.token = (self.token + 1) % TOKENS
            piece = name_of_piece(step, f"{self.token:08x}", rank) if self.apart else ""
            how = piece, last or options.checkpoint_must, options.keep, self.saved
            self.job = job = CheckpointJob(self.folder.path, rank, names, step, vectors, portions, about, *how)
            if options.checkpoint_async and not last:
                job.copy()
                job.thread = threading.Thread(target=job.write, name="checkpoint", daemon=True)
                job.thread.start()
                return
            job.write()
            self.settle()

    def settle(self, wait: bool = True) -> None:
        """Tell all ranks the outcome of the checkpoint being written, if any; collective. wait: True to wait until it
        is written; False to return if it is not. Raises TrainingError as `save` does."""
        job = self.job
        if job is None:
            return
        comm = self.peers
        if not wait:
            writing = np.array([float(job.thread is not None and job.thread.is_alive())])
            comm.all_reduce(writing)
            if writing[0]:
                return
        if job.thread is not None:
            job.thread.join()
        self.job = None
        problem, given = agreed(comm, job)
        if given:
            self._warn(f"the disk has no room for the checkpoint of step {job.step}: {given} is removed")
            job.write()
            problem, _ = agreed(comm, job)
        if problem:
            where = " and ".join(str(job.folder / name) for name in job.names)
            text = f"the checkpoint of step {job.step}, {where}, cannot be written: {problem}"
            if job.final:
                raise TrainingError(f"{text}; {self.folder.kept()}")
            self.failed += 1
            self._warn(f"{text}; the run goes on, and {self.folder.kept()}")
        elif LAST in job.names:
            self.saved = job.step

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        self.display.line(f"warning: {text}")

    def abandon(self) -> None:
        """Close the folder of a run that ends in an error, once nothing is being written there."""
        job = self.job
        if job is not None and job.thread is not None:
            job.thread.join()
            if job.rank == 0 and not job.piece and not job.problem and LAST in job.names:
                # It is written, and surviving ranks (hpcdl/recovery/survivor.py) continue after its step.
                self.saved = job.step
        self.folder.close()


def agreed(comm: Communicator, job: CheckpointJob) -> tuple[str, str]:
    """Join what all ranks have written. Return (problem, file removed to make room), "" for none; collective."""
    if job.piece:
        forms = {name: (portion.size, portion.dtype) for name, portion in job.portions.items()}
        with comm.inside("gather what was written"):
            parts = comm.mpi.gather(WrittenPart(job.written, job.problem, job.full, forms))
        if parts is not None:
            job.join(parts)
    with comm.inside("say what was written"):
        given = job.give_up_spare() if comm.rank == 0 else ""
        return comm.mpi.bcast((job.problem, given))  # type: ignore[no-any-return]


def unseen(comm: Communicator, folder: Path) -> tuple[list[str], int]:
    """Return the hosts that do not see a file written by rank 0 to a folder, and a unique number. Collective. Raises
    AgreedError if rank 0 cannot write there."""
    mark, token = temporary_name(folder / LAST), int.from_bytes(os.urandom(4), "little")
    with refuse_together(comm.mpi), blamed_on(f"{folder} cannot be written"):
        if comm.rank == 0:
            mark.write_text(str(token))
    with comm.inside("look for the folder"):
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
    """Rewrite the last checkpoint, on rank 0, with these legs and their costs of all ranks; a failure is logged."""
    assert folder.path is not None
    path = folder.path / LAST
    try:
        found = Checkpoint.read(path, pieces=False)
        found.attributes["legs"] = legs
        found.write(path)
    except (UsageError, OSError) as error:
        log.warning("%s does not hold the costs of all ranks: %s", path, error)
