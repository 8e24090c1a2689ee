"""Memory accounting of a rank: current and peak bytes by purpose, counted at allocation and release.

    parameters      of the model, with gathered, received and sent copies
    gradients       of a step, also those that a server receives
    optimizer       momentum, moments, ...; other state that a strategy keeps between steps
    activations     saved between forward and backward, and scratch of layers

Bytes are measured, not computed. Peaks are those of training steps, without evaluation and checkpoints (`paused`)."""

import contextlib
import functools
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

KINDS = ("parameters", "gradients", "optimizer", "activations")


@functools.cache
def available(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory of this machine, or the lower limit of its container or job."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups versions 2 and 1
        with contextlib.suppress(OSError, ValueError):  # no limit
            found.append(int((groups / name).read_text()))
    return min(found)


def forget_peak() -> None:
    """Reset the peak memory that the system records for this process, if the system allows this."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Memory:
    """The memory of one rank, in bytes by kind. now: held at present. peak: the most that was held at once."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.counting = True

    def add(self, kind: str, count: int) -> None:
        """Add `count` bytes of this kind; a negative count removes bytes."""
        self.now[kind] += count
        if self.counting and self.now[kind] > self.peak[kind]:
            self.peak[kind] = self.now[kind]

    def hold(self, kind: str, array: np.ndarray) -> np.ndarray:
        """Count an array that is never released; return it."""
        self.add(kind, array.nbytes)
        return array

    def hold_until_freed(self, kind: str, array: np.ndarray) -> np.ndarray:
        """Count an array, such as a send buffer, until it is garbage-collected; return it."""
        weakref.finalize(array, self.add, kind, -array.nbytes)
        return self.hold(kind, array)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose allocations do not count for `peak`."""
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before
