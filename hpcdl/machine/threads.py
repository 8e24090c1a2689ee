"""Threads of the matrix products: ranks that take all cores each would spend their time waiting for each other.

Measured on 2 cores: 2 ranks with 2 threads each take 22 ms for a step that takes 0.4 ms with 1 thread each.

What a rank may use of a node is what it is bound to and, of a node that others use as well, what Slurm has allotted to
the job there, or a container's share of the processors. Where others compute on these very cores it is less: a thread
that has no core is waited for by those that have one (load.py).
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from hpcdl.comm.node_memory import ranks_of_node
from hpcdl.machine.load import load

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "MICROSECONDS PERIOD", or "max PERIOD", of a container
SPARE = 0.25  # of a core, which a thread can do without
SECONDS = 1.0  # between two votes


class ThreadShare(NamedTuple):
    """The BLAS threads that a rank's share of the cores is good for, and how many ranks have the same cores.

    fixed: the user has said how many, whatever else goes on.
    """

    threads: int
    ranks: int
    fixed: bool


def share(comm: MPI.Intracomm) -> ThreadShare:
    """What the user set, or this rank's share of the cores that it may use; collective."""
    node = ranks_of_node(comm)
    mine = os.sched_getaffinity(0)
    everyone = node.allgather(sorted(mine))
    node.Free()
    ranks = everyone.count(sorted(mine))  # those that share these very cores
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        if os.environ.get(name, "").isdecimal():
            return ThreadShare(max(1, int(os.environ[name])), ranks, True)
    return ThreadShare(max(1, min(len(mine) // ranks, allotted() // len(everyone))), ranks, False)


def threads(comm: MPI.Intracomm) -> int:
    """BLAS threads for this rank: its share, of which others leave something; collective."""
    return Threads(comm).now


def allotted() -> int:
    """Cores of this node that are the job's, or the container's; very many where nobody says."""
    found = [sys.maxsize]
    said = os.environ.get("SLURM_CPUS_ON_NODE", "")
    if "SLURM_JOB_ID" in os.environ and said.isdecimal():
        found.append(int(said))
    with contextlib.suppress(OSError, ValueError):
        quota, period = QUOTA.read_text().split()
        found.append(math.ceil(int(quota) / int(period)))  # "max" is no number
    return max(1, min(found))


class Threads:
    """BLAS threads of the ranks of `comm`: of each one's share all, a half, a quarter, ..., the same part on all ranks.

    The same, for ranks that compute the same product have to find the same bits. A context: so many, and no more, in
    its body. Collective to make; `vote` and `agreed` change the part later.
    """

    def __init__(self, comm: MPI.Intracomm):
        self.share, self.halved = share(comm), 0
        left = None if self.share.fixed or self.share.threads == 1 else load.available(self.share.ranks)
        while left is not None and self.now > max(1.0, left + SPARE):
            self.halved += 1
        self.halved = comm.allreduce(self.halved, MPI.MAX)
        self.used = [self.now]  # one after the other

    @property
    def now(self) -> int:
        """Threads of this rank."""
        return max(1, self.share.threads >> self.halved)

    def vote(self) -> int:
        """-1: others leave this rank fewer cores than it has threads; 1: enough for twice as many; local."""
        if self.share.fixed or self.share.threads == 1:
            return int(self.halved > 0)
        left = load.measure(self.share.ranks, SECONDS)
        if left is None:
            return 0
        if self.now > max(1.0, left + SPARE):
            return -1
        return int(self.halved > 0 and 2 * self.now <= left + SPARE)

    def agreed(self, change: int) -> None:
        """What all ranks have found of their votes: -1 where one has fewer cores, 1 where all have more."""
        if change:
            self.halved = max(0, self.halved - change)
            self.used.append(self.now)
            threadpool_limits(self.now)  # what was before, `limits` knows

    def __enter__(self) -> "Threads":
        self.limits = threadpool_limits(self.now)
        return self

    def __exit__(self, *_: object) -> None:
        self.limits.restore_original_limits()


@contextlib.contextmanager
def limited(comm: MPI.Intracomm) -> Iterator[None]:
    """So many threads, and no more, in the body; collective."""
    with Threads(comm):
        yield
