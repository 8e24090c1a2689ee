"""Threads of the matrix products: ranks that take all cores each would spend their time waiting for each other.

Measured on 2 cores: 2 ranks with 2 threads each take 22 ms for a step that takes 0.4 ms with 1 thread each.

What a rank may use of a node is what it is bound to and, of a node that others use as well, what Slurm has allotted to
the job there, or a container's share of the processors.
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from hpcdl.comm.node import ranks_of_node

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "MICROSECONDS PERIOD", or "max PERIOD", of a container


def threads(comm: MPI.Intracomm) -> int:
    """BLAS threads for this rank: what the user set, or its share of the cores that it may use; collective."""
    node = ranks_of_node(comm)
    mine = os.sched_getaffinity(0)
    everyone = node.allgather(sorted(mine))
    node.Free()
    ranks = everyone.count(sorted(mine))  # those that share these very cores
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        if os.environ.get(name, "").isdecimal():
            return max(1, int(os.environ[name]))
    return max(1, min(len(mine) // ranks, allotted() // len(everyone)))


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


@contextlib.contextmanager
def limited(comm: MPI.Intracomm) -> Iterator[None]:
    """So many threads, and no more, in the body; collective."""
    with threadpool_limits(threads(comm)):
        yield
