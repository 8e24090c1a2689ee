"""Resuming from an older checkpoint in a run's folder: all that the run has written since is set aside.

    before, --resume RUN/checkpoint-000000080.h5                           after
        checkpoint.h5 (step 120, or damaged), checkpoint-000000100.h5          later/
        best.h5, if it is of a later step                                      later/
        pieces/ that only these need (shards.py)                               later/pieces/
        metrics.jsonl                                                          later/; in its place, the lines up to 80
        checkpoint-000000080.h5                                                the same, and as checkpoint.h5
        checkpoint-000000060.h5, files named by users                          unchanged

A file set aside replaces one of the same name in later/. At all times there is a checkpoint.h5 that can be resumed."""

import os
from pathlib import Path

from hpcdl.checkpoint.checkpoint_file import Checkpoint, link, move, older_of
from hpcdl.checkpoint.shards import sweep
from hpcdl.errors import UsageError

LATER = "later"  # subfolder for files set aside


def folder_of(resume: str) -> Path:
    """Return the folder of the run that --resume names: the folder itself, or the folder of the checkpoint file."""
    return Path(resume).parent if os.path.isfile(resume) else Path(resume)


def is_last(resume: str) -> bool:
    """True if --resume names a run's present state: its folder, or its checkpoint.h5."""
    last = folder_of(resume) / "checkpoint.h5"
    return not os.path.isfile(resume) or (last.exists() and last.samefile(resume))


def later_than(step: int, resume: Path) -> list[Path]:
    """Return checkpoints beside `resume` of steps after `step`; a damaged best.h5, too; [] if `resume` is the last."""
    if is_last(str(resume)):
        return []
    folder = folder_of(str(resume))
    later = [each for each in older_of(folder) if int(each.stem.rpartition("-")[2]) > step]
    best = folder / "best.h5"
    if best.exists() and not best.samefile(resume) and step_of(best) > step:
        later.append(best)
    return later


def set_aside(resume: Path, later: list[Path]) -> None:
    """Make `resume` the run's last checkpoint; move the `later` ones to the folder LATER. Raises OSError."""
    folder = folder_of(str(resume))
    aside = folder / LATER
    aside.mkdir(exist_ok=True)
    for each in (folder / "checkpoint.h5", folder / "metrics.jsonl"):
        if each.exists():
            link(each, aside / each.name)
    link(resume, folder / "checkpoint.h5")
    move(later, aside)
    for each in (folder, aside):
        sweep(each)


def older_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints beside a run's checkpoint.h5, the latest step first, without damaged ones."""
    names = [*older_of(folder), *folder.glob("best.h5")]
    steps = sorted(((step_of(each), each) for each in names), reverse=True)
    return [each for step, each in steps if step < float("inf")]


def step_of(path: Path) -> float:
    """Return the step of a checkpoint; infinity for a damaged one."""
    try:
        return Checkpoint.read(path, pieces=False).attributes["step"]
    except (UsageError, KeyError, TypeError):
        return float("inf")
