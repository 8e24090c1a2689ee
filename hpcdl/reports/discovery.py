"""Discovery of runs (by the files that a run writes), comparisons (results.json) and searches (journal.jsonl).

A run's folder holds one of config.yaml, metrics.jsonl and summary.json; a run that is not finished, was killed or is of
an older version lacks some of them. A folder with config.yaml alone may be a stopped comparison: then the runs below it
count. Folders below a run, a comparison (whose results.json names its runs) or a search (whose journal holds its
trials) are not searched. Links to folders are followed only if they are given by name.
"""

import os
from pathlib import Path
from typing import NamedTuple

from hpcdl.errors import UsageError
from hpcdl.search.search_log_reader import JOURNAL, is_search

RUN = {"metrics.jsonl", "summary.json", "started.json"}
CONFIG = "config.yaml"
COMPARISON = "results.json"


class DiscoveredFolders(NamedTuple):
    """Folders of runs, comparisons and searches, without duplicates, in natural order of their names."""

    runs: list[Path]
    comparisons: list[Path]
    searches: list[Path]


def find(folders: list[str]) -> DiscoveredFolders:
    """Return all runs, comparisons and searches in or below the folders; UsageError for a folder without any."""
    found: tuple[dict[str, Path], ...] = {}, {}, {}
    for name in folders:
        folder = Path(name)
        if not os.path.exists(folder):
            raise UsageError(f"{name}: there is no such folder")
        if not os.path.isdir(folder):
            raise UsageError(f"{name} is a file; give the folder of a run, of a comparison, or one above them")
        here = below(folder)
        for known, paths in zip(found, here, strict=True):
            for path in paths:
                known.setdefault(os.path.realpath(path), path)
        if not any(here):
            raise UsageError(
                f"{name}: there is no run in or below it: a run's folder holds config.yaml, metrics.jsonl or "
                f"summary.json, a comparison's results.json, and a search's {JOURNAL}"
            )
    return DiscoveredFolders(*([*known.values()] for known in found))


def below(folder: Path, within: bool = False) -> DiscoveredFolders:
    """Return the runs, comparisons and searches in or below a folder; UsageError if it cannot be read.

    within: True to include the runs of comparisons and searches.
    """

    def refuse(error: OSError) -> None:
        if error.filename == str(folder):
            raise UsageError(f"{folder} cannot be read: {error.strerror}") from None

    runs: list[Path] = []
    comparisons: list[Path] = []
    searches: list[Path] = []
    perhaps: list[Path] = []
    for place, folders, files in os.walk(folder, onerror=refuse):
        if COMPARISON in files and not within:
            comparisons.append(Path(place))
            folders.clear()
        elif JOURNAL in files and not within and is_search(Path(place)):
            searches.append(Path(place))
            folders.clear()
        elif not RUN.isdisjoint(files):
            runs.append(Path(place))
            folders.clear()
        elif CONFIG in files:
            perhaps.append(Path(place))
        folders[:] = sorted((each for each in folders if not each.startswith(".")), key=natural)
    runs += [
        path for path in perhaps if not any(path in run.parents for run in [*runs, *perhaps, *comparisons, *searches])
    ]
    return DiscoveredFolders(sorted(runs, key=lambda path: [*map(natural, path.parts)]), comparisons, searches)


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which 2-b comes before 10-a."""
    digits = "".join(each if each.isdecimal() else " " for each in name).split()
    rest, key = name, []
    for number in digits:
        text, _, rest = rest.partition(number)
        key += [(-1, text), (int(number), "")]
    return [*key, (-1, rest)]
