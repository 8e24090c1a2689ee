"""Bytes that a rank holds, by what they are for: counted where they are allocated and given back, and their peaks.

    parameters      the model's, also those that are gathered or received from other ranks, and copies that are sent
    gradients       those of a step, also what a server receives
    optimizer       momentum, moments, ...; what a strategy keeps beside them from step to step
    activations     what lies between forward and backward, and scratch of a layer

They are measured, not computed: an array counts from its allocation to its end. Peaks are those of the steps of a
training; what evaluation and checkpoints need (`paused`) is not counted, but is in the peak of the process as a whole.

What a user asks for is compared with what there is (`available`) before anything is allocated.
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
    """The bytes that this machine has, or that the container or the job may have of them."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups, version 2 and 1
        with contextlib.suppress(OSError, ValueError):  # there is none, or it says max
            found.append(int((groups / name).read_text()))
    return min(found)


def forget_peak() -> None:
    """Let the peak of this process's memory, as the system has it, begin anew; where that cannot be, it goes on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Memory:
    """Counts of one rank: `now` and `peak`, bytes by kind."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.counting = True

    def add(self, kind: str, count: int) -> None:
        """So many bytes more, or, where negative, less."""
        self.now[kind] += count
        if self.counting and self.now[kind] > self.peak[kind]:
            self.peak[kind] = self.now[kind]

    def hold(self, kind: str, array: np.ndarray) -> np.ndarray:
        """Count an array that was allocated and stays; returns it."""
        self.add(kind, array.nbytes)
        return array

    def hold_while_it_is_there(self, kind: str, array: np.ndarray) -> np.ndarray:
        """Count an array until nobody has it any more, as one that a message is sent from; returns it."""
        weakref.finalize(array, self.add, kind, -array.nbytes)
        return self.hold(kind, array)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is allocated inside does not count for the peaks."""
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before
