"""Resuming from an older checkpoint in a run's folder: everything the run has written since is set aside.

    before, --resume RUN/checkpoint-000000080.h5                           after
        checkpoint.h5 (step 120, or damaged), checkpoint-000000100.h5          later/
        best.h5, if it is of a later step                                      later/
        pieces/ that only these need (shards.py)                               later/pieces/
        metrics.jsonl                                                          later/; in its place, the lines up to 80
        checkpoint-000000080.h5                                                the same, and as checkpoint.h5
        checkpoint-000000060.h5, files named by users                          unchanged

So neither a resumed run nor the rotation mistakes newer files for the present, and nothing is lost; files set aside
again replace those of the same name. At all times there is a checkpoint.h5 that can be resumed.
"""

import os
from pathlib import Path

from hpcdl.checkpoint.checkpoint_file import OLDER, Checkpoint, link, move
from hpcdl.checkpoint.shards import sweep
from hpcdl.errors import UsageError

LATER = "later"  # subfolder for files set aside


def folder_of(resume: str) -> Path:
    """Return the folder of the run that --resume names: itself, or that of the checkpoint file."""
    return Path(resume).parent if os.path.isfile(resume) else Path(resume)


def is_last(resume: str) -> bool:
    """True if --resume names a run's present state: its folder, or its checkpoint.h5."""
    last = folder_of(resume) / "checkpoint.h5"
    return not os.path.isfile(resume) or (last.exists() and last.samefile(resume))


def later_than(step: int, resume: Path) -> list[Path]:
    """Return the checkpoints beside this one that are of a later step, or damaged."""
    if is_last(str(resume)):
        return []
    folder = folder_of(str(resume))
    later = [each for each in folder.iterdir() if (name := OLDER.fullmatch(each.name)) and int(name[1]) > step]
    best = folder / "best.h5"
    if best.exists() and not best.samefile(resume) and step_of(best) > step:
        later.append(best)
    return later


def set_aside(resume: Path, later: list[Path]) -> None:
    """Make this checkpoint the run's last one; move later ones to the folder LATER. Raises OSError."""
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
    """Return the older checkpoints of a run, the latest first; those without a step are left out."""
    names = [each for each in folder.iterdir() if OLDER.fullmatch(each.name) or each.name == "best.h5"]
    steps = sorted(((step_of(each), each) for each in names), reverse=True)
    return [each for step, each in steps if step < float("inf")]


def step_of(path: Path) -> float:
    """Return the step of a checkpoint; infinity for a damaged one."""
    try:
        return Checkpoint.read(path, pieces=False).attributes["step"]
    except (UsageError, KeyError, TypeError):
        return float("inf")
