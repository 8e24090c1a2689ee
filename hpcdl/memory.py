"""Memory accounting of a rank: current and peak bytes by purpose, counted at allocation and release.

    parameters      of the model, with gathered, received and sent copies
    gradients       of a step, also those that a server receives
    optimizer       momentum, moments, ...; other state that a strategy keeps between steps
    activations     saved between forward and backward, and scratch of layers

Bytes are measured, not computed: an array counts from its allocation to its release. Peaks are those of training
steps; evaluation and checkpoints (`paused`) are excluded, but contribute to the peak of the process.

The needs of a run are compared with the available memory (`available`) before anything is allocated.
"""

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
    """Return the bytes of memory of this machine, or the limit of the container or job."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups versions 2 and 1
        with contextlib.suppress(OSError, ValueError):  # no limit
            found.append(int((groups / name).read_text()))
    return min(found)


def forget_peak() -> None:
    """Reset the system's peak memory of this process, if the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Memory:
    """Counts of one rank: `now` and `peak`, bytes by kind."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.counting = True

    def add(self, kind: str, count: int) -> None:
        """Add `count` bytes of this kind; negative: remove them."""
        self.now[kind] += count
        if self.counting and self.now[kind] > self.peak[kind]:
            self.peak[kind] = self.now[kind]

    def hold(self, kind: str, array: np.ndarray) -> np.ndarray:
        """Count an array that is never released; return it."""
        self.add(kind, array.nbytes)
        return array

    def hold_until_freed(self, kind: str, array: np.ndarray) -> np.ndarray:
        """Count an array until it is garbage-collected, such as a send buffer; return it."""
        weakref.finalize(array, self.add, kind, -array.nbytes)
        return self.hold(kind, array)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose allocations do not count for the peaks."""
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before
