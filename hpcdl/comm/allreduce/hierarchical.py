"""Hierarchical all-reduce: in shared memory within each node, by messages between one rank of each.

    node 0                        node 1               the leader (L) of a node only exchanges; its other
    ranks  L ... add ... 1 2      L ... add ... 1 2    ranks add all vectors of the node into the leader's,
           │                      │                    piece by piece, and copy the result from there
           └───── exchange ───────┘

    time           piece 0        piece 1        piece 2        ...
    others         add            add            add            copy 0, 1, 2, ... as they complete
    leader                        exchange 0     exchange 1     exchange 2

The pieces of 512 KiB are pipelined: while the leaders exchange one, the other ranks add the next. The exchange is
recursive halving and doubling for a power of two of leaders, else a ring. With H nodes a node's link carries 2 (H - 1)
K / H values each way, for any number of ranks per node. A ring over all N ranks sends 2 (N - 1) K / N over it, in more
steps, and a recursive exchange of all ranks up to N / H times as much.

    cost, H nodes, N ranks      messages of a leader        values it sends        values added in a node
    H = 2^h                     2 h for each piece          2 (H - 1) K / H        all vectors of the node, once
    else                        2 (H - 1) for each piece    2 (H - 1) K / H        the same

A node with one rank adds nothing. All leaders end with the same bits, and their nodes copy them.
"""

from collections.abc import Callable, Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce import shared
from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.allreduce.recursive import recursive_all_reduce
from hpcdl.comm.allreduce.ring import ring_all_reduce
from hpcdl.comm.collective_schedule import Collective, Step, collective
from hpcdl.comm.node_memory import NodeMemory, SubsetCommunicator, node_memory
from hpcdl.comm.operations import SUM, Reduction
from hpcdl.kernels import shared as kernels

PIECE = 512 << 10  # bytes; a scratch block holds a whole number of them


@collective
def hierarchical_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place, node by node."""
    memory = node_memory(comm)
    if memory.nodes == 1:
        yield from shared.steps(comm, vector, op)
    elif not memory.usable:
        yield from recursive_all_reduce.steps(comm, vector, op)
    elif memory.ranks_per_node == 1:
        yield from between(comm).steps(comm, vector, op)
    else:
        yield from memory.turn(over_nodes(comm, memory, vector, op), vector.dtype)


def between(comm: MPI.Intracomm | SubsetCommunicator) -> Collective:
    """Return the algorithm between the leaders."""
    size = comm.Get_size()
    return recursive_all_reduce if size & (size - 1) == 0 else ring_all_reduce


def pieces(first: int, size: int, itemsize: int) -> list[slice]:
    """Cut elements first to first + size where all nodes cut: at multiples of PIECE bytes."""
    each = PIECE // itemsize
    return [slice(start, min(start + each, first + size)) for start in range(first, first + size, each)]


def over_nodes(comm: MPI.Intracomm, memory: NodeMemory, vector: np.ndarray, op: Reduction) -> Iterator[Step]:
    """The steps on several nodes, some of them with several ranks."""
    leaders = memory.leaders(comm)
    exchange = between(leaders)
    if memory.size == 1:  # alone on its node: keep step with the other leaders
        for piece in pieces(0, vector.size, vector.itemsize):
            yield from exchange.steps(leaders, vector[piece], op)
        return
    start = 0
    memory.begin(vector, op)
    while start < vector.size:
        memory.offer(vector, start)
        yield memory.arrived
        size = kernels.offered_size(vector, start, memory.places)
        block = pieces(start, size, vector.itemsize)
        if memory.rank == 0:
            total = memory.offered(vector, start)[:size]
            for piece in block:
                memory.post()
                yield memory.arrived  # all ranks have added this piece
                yield from exchange.steps(leaders, total[piece.start - start : piece.stop - start], op)
                memory.publish()
            if not np.may_share_memory(total, vector):
                memory.copy_from_leader(vector[start : start + size], 0)
        else:
            for piece in block:
                memory.add_to_leader(vector, piece.start - start, piece.stop - piece.start, op)
            for piece in block:
                yield memory.published()
                memory.copy_from_leader(vector[piece], piece.start - start)
        memory.post()
        yield memory.arrived  # no rank reads another's vector any more
        start += size


def bind(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction) -> Callable[[np.ndarray], tuple[int, int]] | None:
    """Return the blocking form for vectors like this one if all ranks are on one node; else None."""
    return shared.bind(comm, vector, op) if node_memory(comm).nodes == 1 else None


ALGORITHM = Algorithm("hierarchical", hierarchical_all_reduce.steps, prepare=node_memory, bind=bind)
