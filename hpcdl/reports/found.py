"""What lies below some folders: runs, by the files that a run writes, and comparisons, by their results.json.

A folder is a run's if it holds one of config.yaml, metrics.jsonl and summary.json: a run that goes on, was killed or
comes from an older version lacks some of them. With config.yaml alone it may be that of a comparison that was stopped:
then the runs below it count. Below a run no other is looked for, nor below a comparison, whose runs
are those that its results.json names. Links to folders are not followed, except where they are named.
"""

import os
from pathlib import Path
from typing import NamedTuple

from hpcdl.errors import UsageError

RUN = {"metrics.jsonl", "summary.json", "started.json"}
CONFIG = "config.yaml"
COMPARISON = "results.json"


class Found(NamedTuple):
    """Folders of runs and of comparisons, each once, in the order of their names, of numbers in them by size."""

    runs: list[Path]
    comparisons: list[Path]


def find(folders: list[str]) -> Found:
    """All runs and comparisons in or below the folders; UsageError for a folder in which there are none."""
    runs: dict[str, Path] = {}
    comparisons: dict[str, Path] = {}
    for name in folders:
        folder = Path(name)
        if not os.path.exists(folder):
            raise UsageError(f"{name}: there is no such folder")
        if not os.path.isdir(folder):
            raise UsageError(f"{name} is a file; give the folder of a run, of a comparison, or one above them")
        before = len(runs) + len(comparisons)
        here = below(folder)
        for path in here.runs:
            runs.setdefault(os.path.realpath(path), path)
        for path in here.comparisons:
            comparisons.setdefault(os.path.realpath(path), path)
        if len(runs) + len(comparisons) == before and not (here.runs or here.comparisons):
            raise UsageError(
                f"{name}: there is no run in or below it: a run's folder holds config.yaml, metrics.jsonl or "
                "summary.json, and a comparison's results.json"
            )
    return Found([*runs.values()], [*comparisons.values()])


def below(folder: Path, within: bool = False) -> Found:
    """What is in or below one folder; UsageError where that cannot be read. within: runs of comparisons, too."""

    def refuse(error: OSError) -> None:
        if error.filename == str(folder):
            raise UsageError(f"{folder} cannot be read: {error.strerror}") from None

    runs: list[Path] = []
    comparisons: list[Path] = []
    perhaps: list[Path] = []
    for place, folders, files in os.walk(folder, onerror=refuse):
        if COMPARISON in files and not within:
            comparisons.append(Path(place))
            folders.clear()
        elif not RUN.isdisjoint(files):
            runs.append(Path(place))
            folders.clear()
        elif CONFIG in files:
            perhaps.append(Path(place))
        folders[:] = sorted((each for each in folders if not each.startswith(".")), key=natural)
    runs += [path for path in perhaps if not any(path in run.parents for run in [*runs, *perhaps, *comparisons])]
    return Found(sorted(runs, key=lambda path: [*map(natural, path.parts)]), comparisons)


def natural(name: str) -> list[tuple[int, str]]:
    """A key for sorting in which 2-b comes before 10-a."""
    digits = "".join(each if each.isdecimal() else " " for each in name).split()
    rest, key = name, []
    for number in digits:
        text, _, rest = rest.partition(number)
        key += [(-1, text), (int(number), "")]
    return [*key, (-1, rest)]
