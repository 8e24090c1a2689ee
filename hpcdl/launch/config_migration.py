"""What a program takes over from a run of another strategy: the options in a file, and the run that it continues.

Any program that trains takes a run's file of options: the common options and the program's own. Options of other
programs are left out; an option that no program has is an error.

    program of the file     `schedule` is               `lr_schedule` is
    train-pipeline, -grid   the pipeline's              the learning rate's
    all others              the learning rate's         not in the file

A run of a version without --shuffle-window goes on with window 1, its order of rows."""

import contextlib
import os
from pathlib import Path
from typing import Any

from hpcdl.errors import UsageError, nearest
from hpcdl.files import parse_json
from hpcdl.programs import files, of_strategy, own_options


def with_schedules(texts: dict[str, Any], kinds: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a file's values, with the rate's schedule under its name in the program, and texts of options left out."""
    if ("lr_schedule" in texts) == ("lr_schedule" in kinds):
        return texts, []
    texts = dict(texts)
    if "lr_schedule" in texts:
        left = [f"schedule {texts['schedule']}"] if "schedule" in texts else []
        return texts | {"schedule": texts.pop("lr_schedule")}, left
    from hpcdl.optim.schedules import SETTINGS  # here, since reading options needs no kernels

    schedule = texts.get("schedule")
    if isinstance(schedule, str) and schedule.partition(":")[0] in SETTINGS:
        texts["lr_schedule"] = texts.pop("schedule")
    return texts, []


def taken(
    texts: dict[str, Any], kinds: dict[str, Any], common: dict[str, Any], told: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a file that a program takes, and the names of values that belong to other programs. kinds:
    options of the program; common: options of all programs that train; told: the option that names the file. Raises
    UsageError for a name that no program has, unless `told` is "": a run's own file may be of another version."""
    texts, left = with_schedules(texts, kinds)
    if not told and "shuffle_window" in kinds:
        texts.setdefault("shuffle_window", "1")  # a run of a version without it shuffled within blocks
    foreign = [name for name in texts if name not in kinds]
    if not foreign:
        return texts, left
    others = own_options()
    for name in foreign:
        if told and name not in common and not any(name in options for options in others.values()):
            raise UsageError(f"{told}: there is no option {name!r}{nearest(name, [*kinds, *common])}")
    writers = [options for options in others.values() if {*foreign} - {*common} <= {*options}]
    for name in texts:  # the same name, but another thing: gossip's --draw is a file, a pipeline's a switch
        if name in kinds and name not in common:
            mine = {str: str, int: int, bool: bool}.get(kinds[name], object)
            if any(options.get(name, mine) is not mine for options in writers if mine is not object):
                foreign.append(name)
    return {name: text for name, text in texts.items() if name not in foreign}, left + foreign


def config_of(run: str) -> Path:
    """Return the options file of a run. run: the run's folder, or a checkpoint file in it."""
    return Path(os.path.dirname(run) or "." if os.path.isfile(run) else run, "config.yaml")


def predecessor(resume: str, program: str) -> str:
    """Return "PROGRAM (step N)" if another program trained the run of --resume; else, or if that is unknown, ""."""
    path = Path(resume, "checkpoint.h5") if os.path.isdir(resume) else Path(resume)
    found: Any = {}
    with contextlib.suppress(Exception):
        import h5py  # here, since reading options needs no HDF5

        from hpcdl.checkpoint.shards import joins_pieces

        joins_pieces(path)  # raises for a broken file, before HDF5 opens it
        with h5py.File(path, "r") as file:
            found = parse_json(file.attrs["attributes"])
    strategy, step = (found.get(name) for name in ("strategy", "step")) if isinstance(found, dict) else (None, None)
    if program not in files() or not isinstance(strategy, str) or not isinstance(step, int):
        return ""
    return f"{before} (step {step})" if (before := of_strategy(strategy)) not in (None, program) else ""
