"""Double binary tree all-reduce: each half of the vector goes up and down a binary tree of its own, in segments.

    tree of the first half, 8 ranks            tree of the second half: ranks counted from the other end

                      7                                  0
              3                                                    4
          1       5                                            2       6
        0   2   4   6                                        1   3   5   7

A binary tree alone uses half of the links: its leaves only send while vectors go up, and only receive while they come
down. Here a leaf of one tree is an inner rank of the other: no rank has children in both. So each rank sends and
receives about K values on the way up, and again on the way down, all links are busy, and the depth is that of a tree.
Segments follow each other through the trees: while one is added, the next arrives. With 1-based numbers v the trees are
those of an in-order walk: odd numbers are leaves, and v has the parent v +- its lowest set bit. Rank r is number r + 1
in the first tree; in the second N - r if N is even, else r + 2 modulo N. (Sanders, Speck and Traeff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 2009)

    cost, N ranks        messages                             values sent             steps
    all ranks together   4 (N - 1) s                          2 (N - 1) K             2 (floor(log2 N) + s)
    rank r               s (parents + children, both trees)   K / 2 to each of them

where s is the number of segments of a half: one for each 32 KiB, 32 at most. A rank sends its segment as a leaf as many
segments ahead as it lies above the leaves in the other tree: so neither tree waits for the other. Each half is summed
along its tree in one order, and the root's sum goes to all ranks, so that all get the same bits."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.collective_schedule import Step, collective
from hpcdl.comm.operations import SUM, Reduction

SEGMENT = 32 << 10  # bytes of a segment
SEGMENTS = 32  # of a half, at most


class Neighbours(NamedTuple):
    """A rank's place in a tree. parent: an empty list for the root. children: at most two. height: above the leaves."""

    parent: list[int]
    children: list[int]
    height: int


@collective
def double_tree_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place, up and down two binary trees."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return
    halves = [vector[each] for each in chunks(vector.size, 2)]
    count = segment_count(halves[0].nbytes)
    segments = [[half[each] for each in chunks(half.size, count)] for half in halves]
    first, second = zip(double_tree(rank, size), segments, strict=True)
    (inner, added), (leaf, passed) = (first, second) if first[0].children else (second, first)  # leaf: no children
    inbox = np.empty((2, len(inner.children), segments[0][0].size), vector.dtype)

    def receive(number: int) -> "list[MPI.Request]":
        if number == count:
            return []
        rows = inbox[number % 2, :, : added[number].size]  # while those of the segment before are added
        return [comm.Irecv(row, child) for row, child in zip(rows, inner.children, strict=True)]

    coming, sent = receive(0), [comm.Isend(segment, to) for to in leaf.parent for segment in passed[: inner.height]]
    for number in range(count):
        sent += [comm.Isend(segment, to) for to in leaf.parent for segment in passed[number + inner.height :][:1]]
        yield coming
        coming = receive(number + 1)
        for row in inbox[number % 2, :, : added[number].size]:
            op(added[number], row)
        sent += [comm.Isend(added[number], parent) for parent in inner.parent]
    yield sent  # before the sums replace what they send
    last = [comm.Irecv(segment, parent) for parent in leaf.parent for segment in passed]
    coming, sent = [comm.Irecv(segment, parent) for parent in inner.parent for segment in added], []
    for number in range(count):
        yield coming[number : number + 1]
        sent += [comm.Isend(added[number], child) for child in inner.children]
    yield sent + last


def segment_count(bytes: float) -> int:
    """Return the number of segments of a half of so many bytes."""
    return min(SEGMENTS, max(1, math.ceil(bytes / SEGMENT)))


def double_tree(rank: int, size: int) -> tuple[Neighbours, Neighbours]:
    """Return the neighbours of a rank in both trees; it has children in one of them at most."""
    if size % 2:
        return (
            neighbours(rank + 1, size, lambda number: number - 1),
            neighbours((rank + 1) % size + 1, size, lambda number: (number - 2) % size),
        )
    return neighbours(rank + 1, size, lambda number: number - 1), neighbours(size - rank, size, lambda n: size - n)


def neighbours(number: int, size: int, rank_of: Callable[[int], int]) -> Neighbours:
    """Return the neighbours of a number from 1 to `size` in the in-order tree, as ranks by rank_of(number)."""
    bit = number & -number
    parent = (number ^ bit) | 2 * bit
    parent = parent if parent <= size else number ^ bit
    steps = [bit >> level for level in range(1, bit.bit_length())]
    children = [number - step for step in steps[:1]] + [number + step for step in steps if number + step <= size][:1]
    return Neighbours([rank_of(parent)] if parent else [], [rank_of(child) for child in children], len(steps))


ALGORITHM = Algorithm("double_tree", double_tree_all_reduce.steps, fixed=True)
