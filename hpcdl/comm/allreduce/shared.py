"""Shared-memory all-reduce within a node: every rank adds its part of all vectors and writes the sum to all.

    rank 0   | a0 | a1 | a2 |       rank r adds part r of all vectors         | S0 | S1 | S2 |
    rank 1   | b0 | b1 | b2 |       and writes the sum where each vector  ->  | S0 | S1 | S2 |
    rank 2   | c0 | c1 | c2 |       has its part r                            | S0 | S1 | S2 |

Vectors from `comm.empty` lie in shared memory: nothing is copied in or out. Any other vector goes through a scratch
block of its rank, a MiB at a time. All ranks synchronize before and after the additions by flags in shared memory
(kernels/shared.py), in less than a microsecond between two cores. Vectors of up to 4 KiB are copied to a buffer beside
the flags, where every rank adds them all: one wait.

    cost, N ranks        messages      values read     values written by a rank      waits
    in windows           0             K               K                             2
    elsewhere            0             3 K             3 K                           2 for each MiB

N K reads and N K writes by all ranks together are the minimum; the bandwidth of memory, or of the caches between cores,
bounds the time. Where ranks share a core, a waiting rank yields it. Each element is added by one rank, in one
order: all ranks get the same bits. `hierarchical` extends the algorithm to several nodes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.allreduce.recursive import recursive_all_reduce
from hpcdl.comm.collective_schedule import Step, complete
from hpcdl.comm.node_memory import NodeMemory, known_memory, node_memory
from hpcdl.comm.operations import SUM, Reduction
from hpcdl.errors import AgreedError


def shared_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> None:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, which are on one node, in place."""
    memory: Any = known_memory(comm) or prepare(comm)
    if memory.shared:
        memory.all_reduce(vector, op)
    else:
        for step in steps(comm, vector, op):
            complete(step)


def steps(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Yield the steps of the all-reduce; by messages if there is no room for shared memory."""
    memory = prepare(comm)
    if not memory.usable:
        yield from recursive_all_reduce.steps(comm, vector, op)
    elif memory.size > 1:
        yield from memory.turn(memory.steps(vector, op), vector.dtype)


def prepare(comm: MPI.Intracomm) -> NodeMemory:
    """Allocate the shared memory of the node and return it; collective. AgreedError if `comm` spans several nodes."""
    memory = node_memory(comm)
    if memory.nodes > 1:
        where = f"and these ranks are on {memory.nodes} nodes"
        raise AgreedError(f"--allreduce shared works within one node, {where}; take hierarchical or auto")
    return memory


def bind(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction) -> Callable[[np.ndarray], tuple[int, int]] | None:
    """Return the blocking all-reduce for vectors like this one; None unless all ranks share memory on one node."""
    memory = node_memory(comm)
    return memory.reducer(vector, op) if memory.shared else None


ALGORITHM = Algorithm("shared", steps, shared_all_reduce, prepare, bind=bind)
