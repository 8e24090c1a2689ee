"""Rows that stay in memory for all trainings of a job: one copy on each node, whoever opens them, and how often.

    job        open_data(name, comm=world, keep=True)     the rows lie in the memory of each node, until `let_go`
    training   open_data(name, comm=its ranks, ...)       takes these rows, and has numbers of its own for what it holds
                                                          out, standardizes, cuts into parts and puts into order

A file is known by its path, inode, size and time of change, the type of the model, and what missing numbers become
(fills.py), where that is not what the file says. What is drawn or measured from the same rows with the same options is
remembered, too.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from hpcdl.data.placement import Arena, Comm

T = TypeVar("T")
MOST = 64  # things that are remembered of a file


class CachedRows:
    """The arrays of a file's rows, as `placement.specs` has them for train, then for test."""

    def __init__(self, arena: "Arena"):
        self.arena, self.arrays = arena, arena.arrays
        self.remembered: dict[Any, Any] = {}

    def remember(self, key: Any, compute: Callable[[], T]) -> T:
        """What `compute` has returned for this key on this rank, or returns now."""
        if key not in self.remembered:
            while len(self.remembered) >= MOST:
                del self.remembered[next(iter(self.remembered))]
            self.remembered[key] = compute()
        found: T = self.remembered[key]
        return found


everything: dict[tuple | None, CachedRows] = {}


def key_of(path: str, dtype: np.dtype, fills: tuple[float, ...] = ()) -> tuple | None:
    """By what the rows of a file are known to be the same still; None where it cannot be told."""
    try:
        now = os.stat(path)
    except OSError:
        return None
    return os.path.realpath(path), now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, dtype.name, fills


def keep(path: str, dtype: np.dtype, arena: "Arena", fills: tuple[float, ...] = ()) -> CachedRows:
    """Let the arena, which is filled, stay, on all ranks that call this; collective over those that have made it."""
    key = key_of(path, dtype, fills) or (path, dtype.name, fills)
    before = everything.pop(key, None)
    if before is not None:
        before.arena.close()
    everything[key] = CachedRows(arena)
    return everything[key]


def find(path: str, dtype: np.dtype, comm: "Comm", fills: tuple[float, ...] = ()) -> CachedRows | None:
    """What is kept of this file, where all ranks of `comm` have it; collective over them."""
    if not everything and (comm is None or comm.size == 1):
        return None
    found = everything.get(
        key_of(path, dtype, fills)
    )  # ranks that were started anew (hpcdl/recovery/respawn.py) have nothing
    if comm is not None and not all(comm.allgather(found is not None)):
        return None
    return found


def let_go() -> None:
    """Nothing is kept any more; collective over the ranks that have kept it, which keep nothing else."""
    for each in everything.values():
        each.arena.close()
    everything.clear()
