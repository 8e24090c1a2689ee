"""Going on from an older checkpoint of a run, in its folder: what the run has written since is set aside.

    before, --resume RUN/checkpoint-000000080.h5                           after
        checkpoint.h5 (step 120, or damaged), checkpoint-000000100.h5          later/
        best.h5, where it is of a later step                                   later/
        pieces/ that only these need (shards.py)                               later/pieces/
        metrics.jsonl                                                          later/; in its place, the lines up to 80
        checkpoint-000000080.h5                                                the same, and as checkpoint.h5
        checkpoint-000000060.h5, what users have named                         as they were

So nothing that is newer is taken for the present, neither by a run that goes on from the folder nor by the rotation,
and nothing is lost; what is set aside another time replaces what bears its name there. At each moment there is a
checkpoint.h5 from which the run can go on.
"""

import os
from pathlib import Path

from hpcdl.checkpoint.checkpoint_file import OLDER, Checkpoint, link, move
from hpcdl.checkpoint.shards import sweep
from hpcdl.errors import UsageError

LATER = "later"  # the folder for it, in the run's


def folder_of(resume: str) -> Path:
    """The folder of the run that --resume names: itself, or that of the checkpoint file that it names."""
    return Path(resume).parent if os.path.isfile(resume) else Path(resume)


def is_last(resume: str) -> bool:
    """Whether --resume names a run as it stands: its folder, or its checkpoint.h5."""
    last = folder_of(resume) / "checkpoint.h5"
    return not os.path.isfile(resume) or (last.exists() and last.samefile(resume))


def later_than(step: int, resume: Path) -> list[Path]:
    """Of the files in the folder of this checkpoint, those that the run has written after this step; or are damaged."""
    if is_last(str(resume)):
        return []
    folder = folder_of(str(resume))
    found = [each for each in folder.iterdir() if (name := OLDER.fullmatch(each.name)) and int(name[1]) > step]
    best = folder / "best.h5"
    if best.exists() and not best.samefile(resume) and step_of(best) > step:
        found.append(best)
    return found


def set_aside(resume: Path, later: list[Path]) -> None:
    """Make this checkpoint the run's last one; what came after it goes to the folder LATER. Raises OSError."""
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


def before(folder: Path) -> list[Path]:
    """The checkpoints of a run beside its last one, the latest first; those that say no step are left out."""
    names = [each for each in folder.iterdir() if OLDER.fullmatch(each.name) or each.name == "best.h5"]
    steps = sorted(((step_of(each), each) for each in names), reverse=True)
    return [each for step, each in steps if step < float("inf")]


def step_of(path: Path) -> float:
    """The step of a checkpoint; one that is damaged is later than all."""
    try:
        return Checkpoint.read(path, pieces=False).attributes["step"]
    except (UsageError, KeyError, TypeError):
        return float("inf")
