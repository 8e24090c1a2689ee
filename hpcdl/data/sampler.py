"""The order of examples in an epoch and each rank's share of its batches: pure functions, testable without MPI.

An epoch visits every training example once, in steps = ceil(examples / batch_size) batches. Its order is one of

    global  one permutation of all examples: batch b is order[b*B : (b+1)*B], and a rank takes a chunk of the batch
    local   a permutation of the rank's own rows, cut over the steps: for `--partition` and placement partitioned
    block   blocks in random order, rows of a block in random order: for placement streamed

Global and block orders are the same for any number of ranks. Random streams are keyed by (seed, purpose, epoch, ...),
so an epoch can start at any step without saved state."""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.data.partition import parse_partition
from hpcdl.kernels.shuffle import permutation
from hpcdl.random import Random

Share: TypeAlias = tuple[int, int]  # (rank, size)


class BatchShare(NamedTuple):
    """One rank's part of a batch: order[start:stop], rows [offset, offset + stop - start) of the batch's `total`."""

    start: int
    stop: int
    offset: int
    total: int


def order_name(placement: str, partition: str, classes: int, block: int = 0) -> str:
    """Return a text that identifies the order of an epoch: equal texts mean equal orders. block: rows of a block.
    `{ranks}` in the text stands for the number of ranks that share the rows, if the order depends on it."""
    if placement == "streamed":
        return f"all rows by blocks of {block}"
    if placement == "shared" and partition == "iid":
        return "all rows in one order"
    name, value = parse_partition(partition, classes)
    return f"rows divided {name}{'' if value is None else f':{value}'} (ranks: {{ranks}})"


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """Return the number of batches of an epoch, ceil(examples / batch_size); the last batch may be smaller."""
    return -(-examples // batch_size)


def global_order(seed: int, examples: int, epoch: int) -> np.ndarray:
    """Return the permutation (examples,) in which an epoch visits all examples."""
    return permutation(Random(seed)("order", epoch), examples)


def global_share(examples: int, batch_size: int, step: int, rank: int, size: int) -> BatchShare:
    """Return a rank's chunk of batch `step` of the global (or block) order; it may be empty."""
    first = step * batch_size
    total = min(batch_size, examples - first)
    mine = chunk(total, size, rank)
    return BatchShare(first + mine.start, first + mine.stop, mine.start, total)


def local_order(seed: int, examples: int, epoch: int, rank: int) -> np.ndarray:
    """Return the permutation (examples,) in which a rank visits its own rows."""
    return permutation(Random(seed)("local order", epoch, rank), examples)


def local_share(before: int, through: int, examples: int, steps: int, step: int) -> BatchShare:
    """Return a rank's part of its own order at `step`.

    before: number of rows of the ranks before it; through: with its own. With P_r rows of the ranks before r, rank r
    takes |chunk(P_(r+1), S, s)| - |chunk(P_r, S, s)| rows at step s of S: batch sizes differ by 1 at most. (If every
    rank took chunk(n_r, S, s), the longer chunks would meet in the first steps, and the last could be empty.)"""
    lower, upper, whole = (chunk(rows, steps, step) for rows in (before, through, examples))
    start, stop = upper.start - lower.start, upper.stop - lower.stop
    return BatchShare(start, stop, lower.stop - lower.start, whole.stop - whole.start)


class BlockOrder:
    """The order of an epoch over blocks of counts[k] rows: shuffled blocks, and shuffled rows inside each block."""

    def __init__(self, seed: int, epoch: int, counts: np.ndarray):
        self.random, self.epoch, self.counts = Random(seed), epoch, counts
        self.blocks = self.random("blocks", epoch).permutation(len(counts))
        self.ends = np.cumsum(counts[self.blocks])

    def rows(self, block: int) -> np.ndarray:
        """Return the permutation (counts[block],) in which the rows of this block are visited."""
        return permutation(self.random("block", self.epoch, block), int(self.counts[block]))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces (block, first, last) of order[start:stop]; each stands for rows(block)[first:last]."""
        at = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            block, end = int(self.blocks[at]), int(self.ends[at])
            begin, last = end - int(self.counts[block]), min(stop, end)
            if start < last:  # not an empty block
                yield block, start - begin, last - begin
            start, at = last, at + 1
