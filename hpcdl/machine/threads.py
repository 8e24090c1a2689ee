"""BLAS threads: each rank gets its share of the cores, as oversubscribed threads would wait for each other.

Measured on 2 cores: 2 ranks with 2 threads each take 22 ms for a step that takes 0.4 ms with 1 thread each. A rank may
use the cores that it is bound to, limited by Slurm's allotment or a container's quota on a shared node. If other
processes compute on these cores, it takes fewer: a thread without a core delays all others (load.py)."""

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from hpcdl.comm.node_memory import ranks_of_node
from hpcdl.machine.load import load

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "MICROSECONDS PERIOD", or "max PERIOD", of a container
BLAS = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"  # the first one set counts
SPARE = 0.25  # of a core that may be missing for a thread
SECONDS = 1.0  # between two votes


class ThreadShare(NamedTuple):
    """A rank's share: BLAS threads, ranks on the same cores, and the user's variable that fixes the threads, if any."""

    threads: int
    ranks: int
    fixed: str = ""


def share(comm: MPI.Intracomm) -> ThreadShare:
    """Return the user's setting, or else this rank's share of its cores; collective."""
    node = ranks_of_node(comm)
    mine = os.sched_getaffinity(0)
    everyone = node.allgather(sorted(mine))
    node.Free()
    ranks = everyone.count(sorted(mine))  # ranks with the same cores
    for name in BLAS:
        if os.environ.get(name, "").isdecimal():
            return ThreadShare(max(1, int(os.environ[name])), ranks, name)
    return ThreadShare(max(1, min(len(mine) // ranks, allotted() // len(everyone))), ranks)


def allotted() -> int:
    """Return the cores of this node allotted to the job or container; sys.maxsize without a limit."""
    limits = [sys.maxsize]
    slurm = os.environ.get("SLURM_CPUS_ON_NODE", "")
    if "SLURM_JOB_ID" in os.environ and slurm.isdecimal():
        limits.append(int(slurm))
    with contextlib.suppress(OSError, ValueError):
        quota, period = QUOTA.read_text().split()
        limits.append(math.ceil(int(quota) / int(period)))  # "max" is no number
    return max(1, min(limits))


class Threads:
    """BLAS threads of the ranks of `comm`: a fraction 1, 1/2, 1/4, ... of their shares, equal on all ranks.
    Equal fractions give equal bits on ranks that compute the same product. As a context it limits the threads of its
    body. The constructor is collective; `vote` and `agreed` change the fraction later."""

    def __init__(self, comm: MPI.Intracomm):
        self.share, self.halved = share(comm), 0
        cores = None if self.share.fixed or self.share.threads == 1 else load.available(self.share.ranks)
        while cores is not None and self.now > max(1.0, cores + SPARE):
            self.halved += 1
        self.halved = comm.allreduce(self.halved, MPI.MAX)
        self.used = [self.now]  # the successive numbers of threads

    @property
    def now(self) -> int:
        """The current number of threads of this rank."""
        return max(1, self.share.threads >> self.halved)

    def vote(self) -> int:
        """Return -1 if fewer cores are available than threads, 1 if enough for twice as many, else 0; local."""
        if self.share.fixed or self.share.threads == 1:
            return int(self.halved > 0)
        cores = load.measure(self.share.ranks, SECONDS)
        if cores is None:
            return 0
        if self.now > max(1.0, cores + SPARE):
            return -1
        return int(self.halved > 0 and 2 * self.now <= cores + SPARE)

    def agreed(self, change: int) -> None:
        """Apply the minimum of all votes: -1 halves the fraction, 1 doubles it."""
        if change:
            self.halved = max(0, self.halved - change)
            self.used.append(self.now)
            threadpool_limits(self.now)  # `limits` restores the original number

    def __enter__(self) -> "Threads":
        self.limits = threadpool_limits(self.now)
        return self

    def __exit__(self, *_: object) -> None:
        self.limits.restore_original_limits()
