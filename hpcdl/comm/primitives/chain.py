"""Broadcast and reduce: long vectors between nodes in segments along a chain of ranks, others along a binomial tree.

    4 ranks, 3 segments       step 1      step 2      step 3      step 4      step 5
    root -> rank 1            a           b           c
    rank 1 -> rank 2                      a           b           c
    rank 2 -> rank 3                                  a           b           c

A rank passes a segment on as soon as it has arrived, while the next one arrives: all links are busy at once. The reduce
runs the chain backwards: a rank adds its own segment to the one that arrives, and passes the sum on to the root.

    cost, N ranks        messages of a rank     values it sends      steps           seconds
    chain                s; the last rank 0     K; the last rank 0   N - 2 + s       (N - 2 + s) (L + K / s / B)
    tree                 1 for each child       K for each child     ceil(log2 N)    ceil(log2 N) (L + K / B)

L is the latency, B the bandwidth of a link, and s = sqrt((N - 2) K / (L B)) the number of segments that takes the least
time, (sqrt((N - 2) L) + sqrt(K / B))^2: for long vectors that of one message. The faster schedule by this model is
taken, with `LATENCY_BYTES` for L B. On one node the tree is always taken: all messages share the memory there, both
schedules copy as many bytes, and the tree takes fewer steps. The root is the last of a reduce's chain, and sends
nothing. Partial sums follow the order of the ranks, so sums have the same bits in every run. (Watts and van de Geijn,
"A pipelined broadcast for multidimensional meshes", Parallel Processing Letters 1995)"""

import math
from collections.abc import Callable, Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm.allreduce.tree import tree_broadcast, tree_reduce
from hpcdl.comm.collective_schedule import Step, collective
from hpcdl.comm.operations import SUM, Reduction
from hpcdl.comm.primitives import LATENCY_BYTES


def fastest(size: int, bytes: float, apart: bool) -> tuple[int, int]:
    """Return (steps, segments) of the faster schedule for `size` ranks and a vector of so many bytes. The chain has
    several segments, the tree one. apart: True if the ranks are on several nodes."""
    tree = math.ceil(math.log2(size)), 1
    if not apart:
        return tree
    segments = max(1, round(math.sqrt(max(0, size - 2) * bytes / LATENCY_BYTES)))
    return min(tree, (size - 2 + segments, segments), key=lambda each: each[0] * (LATENCY_BYTES + bytes / each[1]))


@collective
def broadcast(comm: MPI.Intracomm, vector: np.ndarray, apart: bool, root: int = 0, met: bool = False) -> Iterator[Step]:
    """Copy the vector of `root` to all ranks by the `fastest` schedule. met: sends are synchronous, as in
    `tree_reduce`."""
    _, segments = fastest(comm.Get_size(), vector.nbytes, apart)
    if segments == 1:
        yield from tree_broadcast.steps(comm, vector, root, met)
    else:
        yield from chain_broadcast.steps(comm, vector, segments, root, met)


@collective
def reduce(
    comm: MPI.Intracomm, vector: np.ndarray, apart: bool, op: Reduction = SUM, root: int = 0, met: bool = False
) -> Iterator[Step]:
    """Combine all vectors into that of rank `root` by the `fastest` schedule; other vectors get partial sums."""
    _, segments = fastest(comm.Get_size(), vector.nbytes, apart)
    if segments == 1:
        yield from tree_reduce.steps(comm, vector, op, root, met)
    else:
        yield from chain_reduce.steps(comm, vector, segments, op, root, met)


@collective
def chain_broadcast(
    comm: MPI.Intracomm, vector: np.ndarray, segments: int, root: int = 0, met: bool = False
) -> Iterator[Step]:
    """Copy the vector of `root` to all ranks along the chain root, root + 1, ..., in so many segments."""
    yield from pass_on(comm, vector, segments, root, 1, met)


@collective
def chain_reduce(
    comm: MPI.Intracomm, vector: np.ndarray, segments: int, op: Reduction = SUM, root: int = 0, met: bool = False
) -> Iterator[Step]:
    """Combine all vectors into that of `root` along root - 1, root - 2, ..., root; other vectors get partial sums."""
    yield from pass_on(comm, vector, segments, root - 1, -1, met, op)


def pass_on(
    comm: MPI.Intracomm,
    vector: np.ndarray,
    segments: int,
    first: int,
    way: int,
    met: bool,
    op: Callable[[np.ndarray, np.ndarray], None] | None = None,
) -> Iterator[Step]:
    """Yield the steps along the chain from rank `first`, by 1 rank to the right (way 1) or to the left (way -1).
    op: combines a segment that arrives into the vector's own; None: the segment replaces it."""
    rank, size = comm.Get_rank(), comm.Get_size()
    place, send, parts = (rank - first) * way % size, comm.Issend if met else comm.Isend, chunks(vector.size, segments)
    inbox = vector if op is None or place == 0 else np.empty_like(vector)
    receiving = [comm.Irecv(inbox[part], (rank - way) % size) for part in parts] if place > 0 else []
    sending = []
    for number, part in enumerate(parts):
        if place > 0:
            yield [receiving[number]]
            if op is not None:
                op(vector[part], inbox[part])
        if place < size - 1:
            sending.append(send(vector[part], (rank + way) % size))
    yield sending
