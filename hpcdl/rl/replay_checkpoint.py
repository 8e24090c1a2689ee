"""Replay memories beside the checkpoints of a distributed run: one file replay/RANK.h5 per memory.

A memory may be as large as a machine's, so its rank writes it into the run's folder itself: at the end, and at about
each step with a checkpoint, since ranks do not wait for each other. A resumed run loads the memories if it has as many
ranks and environments; else it logs that it fills new memories. The environments begin new episodes."""

import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdl.checkpoint.rollback import folder_of
from hpcdl.data.hdf5 import dataset
from hpcdl.errors import LoneError, UsageError, blamed_on
from hpcdl.files import atomic_path
from hpcdl.rl.replay import Replay

log = logging.getLogger("hpcdl")
FOLDER = "replay"


def replay_path(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"{rank:04d}.h5"


def save_if_due(
    options: Any, per_step: int, folder: Path | None, replay: Replay, rank: int, step: int | None = None, saved: int = 0
) -> int:
    """With --save-replay, write the memory if a checkpoint was due after step `saved`, up to `step` (None: always).
    per_step: environment steps of a run's step. folder: of the run. Returns the step of the last checkpoint due."""
    every = options.checkpoint_every // per_step
    due = saved if step is None or not every else step // every * every
    if options.save_replay and (step is None or due > saved):
        write_replay(replay, folder, rank)
    return max(saved, due)


def write_replay(replay: Replay, folder: Path | None, rank: int) -> None:
    """Write the memory of a rank into the folder of a run; None: do nothing. Raises LoneError."""
    if folder is None:
        return
    path = replay_path(folder, rank)
    with blamed_on(f"{path} cannot be written", LoneError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{path.name}.*.part"):  # of a killed process
            left.unlink()
        with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
            for name, array in replay.state().items():
                file[name] = array


def restore_replay(options: Any, replay: Replay | None, rank: int) -> None:
    """Load this rank's memory of the run to resume, if it was saved and fits. UsageError if it cannot be read."""
    if replay is None or not (options.save_replay and options.resume):
        return
    path = replay_path(folder_of(options.resume), rank)
    if not path.exists():
        log.warning("%s does not exist: the replay memory is filled anew", path)
        return
    with blamed_on(f"--resume {options.resume}: {path} cannot be read"), h5py.File(path) as file:
        state = {name: np.asarray(dataset(file, name)) for name in file}
    try:
        replay.load(state)
    except UsageError as error:
        log.warning("%s: %s; the replay memory is filled anew", path, error)
    else:
        replay.cut()  # new episodes begin
