"""Load of other processes on this host's cores, from two samples of /proc/stat.

    available cores = (CPU seconds of this process + idle seconds of its cores / ranks that share them) / seconds

A rank without competitors sees all its cores, however busy it is itself; beside a busy process on each core it sees the
share that the kernel gives it. $HPCDL_LOAD=ignore turns the measurement off."""

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds
SPARE = 0.25  # of a core: smaller loads are ignored
LEAST = 0.2  # seconds between two samples, as ticks are 10 ms
IDLE, IOWAIT = 4, 5  # columns of /proc/stat


class LoadSample(NamedTuple):
    """A sample in seconds: wall clock, CPU time of this process, idle time of its cores."""

    at: float
    own: float
    idle: float


def take_sample(cores: set[int]) -> LoadSample | None:
    """Return a sample; None if the kernel does not report the load."""
    names = {f"cpu{core}" for core in cores}
    try:
        rows = [row.split() for row in STAT.read_text().splitlines() if row.startswith("cpu")]
        idle = sum(int(row[IDLE]) + int(row[IOWAIT]) for row in rows if row[0] in names)
    except (OSError, ValueError, IndexError):
        return None
    return LoadSample(time.monotonic(), time.process_time(), idle * TICK)


class Load:
    """Measures how many cores other processes leave, between two samples."""

    def __init__(self) -> None:
        self.before = take_sample(os.sched_getaffinity(0))
        self.last: float | None = None  # available cores at the last sample

    def measure(self, ranks: int, min_seconds: float) -> float | None:
        """Return the cores available to one of `ranks` ranks since the last sample; None if too recent or unknown."""
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
        """Return the available cores; None if unknown. A recent value is used again; the first call waits."""
        if os.environ.get("HPCDL_LOAD") == "ignore":
            return None
        if self.last is None and self.before is not None:
            time.sleep(max(0.0, self.before.at + LEAST - time.monotonic()))
        found = self.measure(ranks, LEAST)
        return self.last if found is None else found


load = Load()  # takes the first sample now, before the process starts MPI and reads its data
