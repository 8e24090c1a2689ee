"""Hierarchical all-reduce: in shared memory within each node, by messages between one rank of each node.

    node 0                        node 1               the leader (L) of a node only exchanges; its other
    ranks  L ... add ... 1 2      L ... add ... 1 2    ranks add all vectors of the node into the leader's,
           │                      │                    piece by piece, and copy the result from there
           └───── exchange ───────┘

    time           1              2              3                  4                  ...
    others         add 0          add 1          copy 0, add 2      copy 1, add 3
    leader                        exchange 0     exchange 1         exchange 2

Pieces of 512 KiB are pipelined on both levels: while the leaders exchange piece i, the other ranks of a node copy the
result of piece i - 1 and add piece i + 1. On H nodes a leader sends
2 (H - 1) K / H values, in 2 ceil(log2 H) steps for each piece (recursive.py). A ring over all N ranks sends
2 (N - 1) K / N values over a node's link, in more steps, and a recursive exchange of all ranks up to N / H times as
many as here. All leaders get the same bits, which their nodes copy."""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce import shared
from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.allreduce.recursive import recursive_all_reduce
from hpcdl.comm.collective_schedule import Step, collective
from hpcdl.comm.node_memory import NodeMemory, SubsetCommunicator, call_code, node_memory
from hpcdl.comm.operations import CODES, SUM, Reduction
from hpcdl.kernels import shared as kernels

PIECE = 512 << 10  # bytes; a scratch block holds a whole number of them
AHEAD = 2  # pieces that are added before the first result is copied: the leaders exchange the one between


@collective
def hierarchical_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place, within each node and between the nodes."""
    memory = node_memory(comm)
    if memory.nodes == 1:
        yield from shared.steps(comm, vector, op)
    elif not memory.usable or memory.ranks_per_node == 1:
        yield from recursive_all_reduce.steps(comm, vector, op)
    else:
        yield from memory.turn(over_nodes(comm, memory, vector, op), vector.dtype)


def pieces(first: int, size: int, itemsize: int) -> list[slice]:
    """Return slices of at most PIECE bytes that together cover elements `first` to first + size; equal on all nodes."""
    each = PIECE // itemsize
    return [slice(start, min(start + each, first + size)) for start in range(first, first + size, each)]


def over_nodes(comm: MPI.Intracomm, memory: NodeMemory, vector: np.ndarray, op: Reduction) -> Iterator[Step]:
    """Yield the steps of an all-reduce over several nodes, at least one of which has several ranks."""
    leaders = SubsetCommunicator(comm, memory.firsts)
    if memory.size == 1:  # alone on its node: keep step with the other leaders
        for piece in pieces(0, vector.size, vector.itemsize):
            yield from recursive_all_reduce.steps(leaders, vector[piece], op)
        return
    start = 0
    memory.words[kernels.CALL] = call_code(vector, op)  # all ranks of the node compare their calls
    while start < vector.size:
        kernels.offer_from(vector, start, memory.places, memory.state)
        yield memory.arrived
        size = kernels.offered_size(vector, start, memory.places)
        block = pieces(start, size, vector.itemsize)
        if memory.rank == 0:
            total = memory.offered(vector, start)[:size]
            for piece in block:
                kernels.raise_flag(memory.places, memory.state)
                yield memory.arrived  # all ranks have added this piece
                yield from recursive_all_reduce.steps(leaders, total[piece.start - start : piece.stop - start], op)
                kernels.publish(memory.places, memory.state)
            if not np.may_share_memory(total, vector):
                kernels.copy_from_leader(vector[start : start + size], 0, memory.places, memory.state)
        else:
            for number in range(len(block) + AHEAD):
                if number >= AHEAD:
                    piece = block[number - AHEAD]
                    yield memory.published()
                    kernels.copy_from_leader(vector[piece], piece.start - start, memory.places, memory.state)
                if number < len(block):
                    first, length = block[number].start - start, block[number].stop - block[number].start
                    kernels.add_to_leader(vector, first, length, memory.places, memory.state, CODES[op.name])
        kernels.raise_flag(memory.places, memory.state)
        yield memory.arrived  # no rank reads another's vector any more
        start += size


ALGORITHM = Algorithm("hierarchical", hierarchical_all_reduce.steps, prepare=node_memory, bind=shared.bind)
