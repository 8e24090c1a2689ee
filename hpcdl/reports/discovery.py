"""Discovery of runs (by the files that a run writes), comparisons (results.json) and searches (journal.jsonl).

A run's folder holds config.yaml, started.json, metrics.jsonl or summary.json. A folder with config.yaml alone may be a
stopped comparison: it is no run if runs are below it. Folders below a run, a comparison (whose results.json names its
runs) or a search (whose journal holds its trials) are not searched. Links are followed only if given by name."""

import os
import re
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
    found: tuple[dict[str, Path], ...] = {}, {}, {}  # by real path
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
    """Return the folders in or below this one. within: only runs, also those in comparisons, searches. UsageError."""

    def refuse(error: OSError) -> None:
        if error.filename == str(folder):
            raise UsageError(f"{folder} cannot be read: {error.strerror}") from None

    runs, comparisons, searches, perhaps = list[Path](), list[Path](), list[Path](), list[Path]()
    for place, folders, files in os.walk(folder, onerror=refuse):
        into = None
        if COMPARISON in files and not within:
            into = comparisons
        elif JOURNAL in files and not within and is_search(Path(place)):
            into = searches
        elif not RUN.isdisjoint(files):
            into = runs
        elif CONFIG in files:
            perhaps.append(Path(place))
        if into is not None:
            into.append(Path(place))
            folders.clear()
        folders[:] = sorted((each for each in folders if not each.startswith(".")), key=natural)
    known = [*runs, *perhaps, *comparisons, *searches]
    runs += [path for path in perhaps if not any(path in run.parents for run in known)]
    return DiscoveredFolders(sorted(runs, key=lambda path: [*map(natural, path.parts)]), comparisons, searches)


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which 2-b comes before 10-a."""
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(re.split(r"(\d+)", name))]
