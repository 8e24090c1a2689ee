"""A cache of rows for all training runs of a job: one copy in the memory of each node.

    job        open_data(name, comm=world, keep=True)     the rows stay in each node's memory until `clear`
    training   open_data(name, comm=its ranks, ...)       uses these rows; held-out rows, statistics, partition and
                                                          order are its own

The key of a file is its path, inode, size and modification time, the model's type, and the fills of missing numbers
(fills.py) that replace the file's own. Results drawn or measured from the same rows with the same options are cached,
too.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from hpcdl.data.placement import Arena, Comm

T = TypeVar("T")
MOST_RESULTS = 64  # cached per file


class CachedRows:
    """The cached arrays of a file: those of `placement.array_specs` for train, then for test."""

    def __init__(self, arena: "Arena"):
        self.arena, self.arrays = arena, arena.arrays
        self.results: dict[Any, Any] = {}

    def remember(self, key: Any, compute: Callable[[], T]) -> T:
        """Return the cached result of `compute` for this key on this rank, computing it the first time."""
        if key not in self.results:
            while len(self.results) >= MOST_RESULTS:
                del self.results[next(iter(self.results))]
            self.results[key] = compute()
        result: T = self.results[key]
        return result


cached: dict[tuple | None, CachedRows] = {}


def key_of(path: str, dtype: np.dtype, fills: tuple[float, ...] = ()) -> tuple | None:
    """Return the cache key of a file; None if the file cannot be examined."""
    try:
        now = os.stat(path)
    except OSError:
        return None
    return os.path.realpath(path), now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, dtype.name, fills


def keep(path: str, dtype: np.dtype, arena: "Arena", fills: tuple[float, ...] = ()) -> CachedRows:
    """Cache a filled arena; collective over the ranks that have made it."""
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
