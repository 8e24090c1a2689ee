"""What others leave of this host's cores: from two looks at /proc/stat, what this process took and what lay idle.

    left = (its own seconds of processors + the idle seconds of its cores / the ranks that share them) / seconds

A rank that is alone sees all its cores, however busy it is itself; beside a busy process on each core it sees the share
that the kernel gives it. $HPCDL_LOAD=ignore: nobody looks, and all is as on a quiet machine.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds
LEAST = 0.2  # seconds between two looks, for ticks of a hundredth
IDLE, IOWAIT = 4, 5  # columns


class LoadSample(NamedTuple):
    """Seconds: of the clock, of processors that this process has taken, in which its cores were idle."""

    at: float
    own: float
    idle: float


def take_sample(cores: set[int]) -> LoadSample | None:
    """One look; None where the kernel does not tell."""
    names = {f"cpu{core}" for core in cores}
    try:
        rows = [row.split() for row in STAT.read_text().splitlines() if row.startswith("cpu")]
        idle = sum(int(row[IDLE]) + int(row[IOWAIT]) for row in rows if row[0] in names)
    except (OSError, ValueError, IndexError):
        return None
    return LoadSample(time.monotonic(), time.process_time(), idle * TICK)


class Load:
    """What others have left since the last look."""

    def __init__(self) -> None:
        self.before = take_sample(os.sched_getaffinity(0))
        self.last: float | None = None  # cores, as of the last look

    def measure(self, ranks: int, min_seconds: float) -> float | None:
        """Cores that this rank could have had since the last look, one of `ranks` on the same ones.

        None: it is less than `min_seconds` seconds ago, or nobody knows, or wants to know.
        """
        early = self.before is not None and time.monotonic() - self.before.at < min_seconds
        if early or os.environ.get("HPCDL_LOAD") == "ignore":
            return None
        before, self.before = self.before, take_sample(os.sched_getaffinity(0))
        if before is None or self.before is None:
            return None
        at, own, idle = (now - then for now, then in zip(self.before, before, strict=True))
        self.last = (own + idle / ranks) / at
        return self.last

    def available(self, ranks: int) -> float | None:
        """The same, or what the last look has found, where that was just now; of the first it is waited for."""
        ignored = os.environ.get("HPCDL_LOAD") == "ignore"
        if self.last is None and self.before is not None and not ignored:
            time.sleep(max(0.0, self.before.at + LEAST - time.monotonic()))
        found = self.measure(ranks, LEAST)
        return self.last if found is None and not ignored else found


load = Load()  # the first look: by the time a run asks, the process has started MPI and read its data
