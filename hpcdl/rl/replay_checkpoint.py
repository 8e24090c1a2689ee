"""Replay memories that are kept beside the checkpoints of a run whose ranks each have one: replay/RANK.h5.

A memory may be as large as a machine's: it is written by the rank that has it, into the run's folder, when that rank
comes to a step whose checkpoint is due, and at the end. So it is of about that step, for the ranks do not wait for each
other; a run that is gone on with takes what is there, if it is of as many ranks and environments, and else says that
it fills its memories anew. The environments begin new episodes.
"""

import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdl.checkpoint.rollback import folder_of
from hpcdl.data.format import dataset
from hpcdl.errors import LoneError, UsageError, blamed_on
from hpcdl.files import atomic_path
from hpcdl.rl.replay import Replay
from hpcdl.runs.run import Run

log = logging.getLogger("hpcdl")
FOLDER = "replay"


def place(folder: Path, rank: int) -> Path:
    """Where the memory of a rank is kept."""
    return folder / FOLDER / f"{rank:04d}.h5"


def keep(run: Run, replay: Replay, rank: int, step: int | None = None, saved: int = 0) -> int:
    """With --save-replay: write the memory, where a checkpoint is due between `saved` and `step`, or without a step.

    Returns the step of the last checkpoint that is due so far.
    """
    options: Any = run.options
    every = options.checkpoint_every // options.per_step
    due = saved if step is None or not every else step // every * every
    if options.save_replay and run.folder.path is not None and (step is None or due > saved):
        write(replay, place(run.folder.path, rank))
    return max(saved, due)


def write(replay: Replay, path: Path) -> None:
    """All that is in the memory, in one file."""
    with blamed_on(f"{path} cannot be written", LoneError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{path.name}.*.part"):  # by a process that was killed
            left.unlink()
        with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
            for name, array in replay.state().items():
                file[name] = array


def take_back(run: Run, replay: Replay | None, rank: int) -> None:
    """Fill the memory with what the run that is gone on with has kept of it, where it has."""
    options: Any = run.options
    if replay is None or not (options.save_replay and options.resume):
        return
    path = place(folder_of(options.resume), rank)
    if not path.exists():
        log.warning("%s is not there: the replay memory is filled anew", path)
        return
    with blamed_on(f"--resume {options.resume}: {path} cannot be read"), h5py.File(path) as file:
        state = {name: np.asarray(dataset(file, name)) for name in file}
    try:
        replay.load(state)
    except UsageError as error:
        log.warning("%s: %s; it is filled anew", path, error)
    else:
        replay.cut()  # new episodes begin
