"""All-reduce in the memory of a node: no messages; every rank adds its part of all vectors and writes it to all.

    rank 0   | a0 | a1 | a2 |       rank r adds part r of all vectors         | S0 | S1 | S2 |
    rank 1   | b0 | b1 | b2 |       and writes the sum where each vector  ->  | S0 | S1 | S2 |
    rank 2   | c0 | c1 | c2 |       has its part r                            | S0 | S1 | S2 |

Vectors from `comm.empty` lie in memory that all ranks of the node reach: nothing is copied in or out. Any other vector
goes through a scratch block of its rank, a MiB at a time. Before and after the adding all wait for all, by flags of our
own in shared memory (kernels/shared.py), which take less than a microsecond between two cores. Vectors of 8 KiB and
less are copied to a buffer beside the flags, where every rank adds them all: one wait.

    cost, N ranks        messages      values read     values written by a rank      waits
    in windows           0             K               K                             2
    elsewhere            0             3 K             3 K                           2 for each MiB

The N K reads and N K writes of all ranks together are the least that leaves the sum in every vector; the time is that
of the memory, or of the caches between the cores. Where ranks outnumber cores, a rank that waits gives its core away.
Each element is added by one rank, in one order: all ranks get the same bits. Only within one node; `hierarchical`
goes on between nodes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.allreduce.recursive import recursive_all_reduce
from hpcdl.comm.collective_schedule import Step, complete
from hpcdl.comm.node_memory import KEY, NodeMemory, node_memory
from hpcdl.comm.operations import SUM, Reduction
from hpcdl.errors import AgreedError


def shared_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> None:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, which are on one node, in place."""
    memory: Any = comm.Get_attr(KEY) or prepare(comm)
    if memory.shared:
        memory.all_reduce(vector, op)
    else:
        for step in steps(comm, vector, op):
            complete(step)


def steps(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """The asynchronous form."""
    memory = prepare(comm)
    if not memory.usable:
        yield from recursive_all_reduce.steps(comm, vector, op)
    elif memory.size > 1:
        yield from memory.turn(memory.steps(vector, op), vector.dtype)


def prepare(comm: MPI.Intracomm) -> NodeMemory:
    """Make the memory of the node; collective. Raises AgreedError where `comm` is on several nodes."""
    memory = node_memory(comm)
    if memory.nodes > 1:
        raise AgreedError(
            f"--allreduce shared works within one node, these ranks are on {memory.nodes}; use hierarchical or auto"
        )
    return memory


def bind(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction) -> Callable[[np.ndarray], tuple[int, int]] | None:
    """The blocking form for vectors as this one, where all ranks share memory."""
    memory = prepare(comm)
    return memory.reducer(vector, op) if memory.shared else None


ALGORITHM = Algorithm("shared", steps, shared_all_reduce, prepare, bind=bind)
