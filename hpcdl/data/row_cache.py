"""A cache of rows for all training runs of a job: one copy in the memory of each node.

    job        open_data(name, comm=world, keep=True)     the rows stay in each node's memory until `clear`
    training   open_data(name, comm=its ranks, ...)       uses the rows, with statistics, partition and order of its own

A file's key: path, inode, size and modification time, the model's type, and fills that replace the file's own
(fills.py). Results drawn or measured from the same rows with the same options are cached, too."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdl.data.shards import file_that_changes

if TYPE_CHECKING:
    from hpcdl.data.placement import Arena, Comm

MOST_RESULTS = 64  # cached per file


class CachedRows:
    """The cached arrays of a file, first of the training rows, then of the test rows; and cached results."""

    def __init__(self, arena: "Arena"):
        self.arena, self.arrays = arena, arena.arrays
        self.results: dict[Any, Any] = {}

    def remember(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returned for this key on this rank; call it the first time."""
        if key not in self.results:
            while len(self.results) >= MOST_RESULTS:
                del self.results[next(iter(self.results))]
            self.results[key] = compute()
        return self.results[key]


cached: dict[tuple | None, CachedRows] = {}


def key_of(path: str, dtype: np.dtype, fills: tuple[float, ...] = ()) -> tuple | None:
    """Return the cache key of a file, or of a folder by its index; None if the file cannot be examined."""
    try:
        now = os.stat(file_that_changes(path))
    except OSError:
        return None
    return os.path.realpath(path), now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, dtype.name, fills


def keep(path: str, dtype: np.dtype, arena: "Arena", fills: tuple[float, ...] = ()) -> CachedRows:
    """Cache a filled arena, and return its `CachedRows`; collective over the ranks that have made it."""
    key = key_of(path, dtype, fills) or (path, dtype.name, fills)
    before = cached.pop(key, None)
    if before is not None:
        before.arena.close()
    cached[key] = CachedRows(arena)
    return cached[key]


def find(path: str, dtype: np.dtype, comm: "Comm", fills: tuple[float, ...] = ()) -> CachedRows | None:
    """Return the cached rows of a file if all ranks of `comm` have them, else None; collective."""
    if not cached and (comm is None or comm.size == 1):
        return None
    # Respawned ranks (hpcdl/recovery/respawn.py) have an empty cache.
    rows = cached.get(key_of(path, dtype, fills))
    if comm is not None and not all(comm.allgather(rows is not None)):
        return None
    return rows


def clear() -> None:
    """Empty the cache; collective over the ranks that have filled it."""
    for each in cached.values():
        each.arena.close()
    cached.clear()
