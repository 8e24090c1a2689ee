"""Who sees which example when: pure functions, so that the order can be printed and tested without MPI.

An epoch visits every training example once, in steps = ceil(examples / batch_size) batches. Every rank is told its own
share of each batch: a slice of the epoch's order, and where in the whole batch that slice lies.

    order   which rows                             who uses it
    global  one permutation of all examples;       one permutation, whatever the number of ranks
            batch b is order[b*B : (b+1)*B], a
            rank takes a chunk of the batch
    local   a permutation of the rank's own rows,  rows that belong to ranks (`--partition`, placement partitioned)
            cut over the steps of the epoch
    block   blocks in random order, rows of a      placement streamed; again whatever the number of ranks
            block in random order

Everything is keyed by (seed, purpose, epoch, ...), so an epoch can start at any step and needs no saved state.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.data.partition import parse_partition
from hpcdl.kernels.shuffle import permutation
from hpcdl.random import Random


class BatchShare(NamedTuple):
    """One rank's part of one batch: order[start:stop], which is rows [offset, offset + stop - start) of `total`."""

    start: int
    stop: int
    offset: int
    total: int


def named(placement: str, partition: str, classes: int, block: int = 0) -> str:
    """Which of the orders the rows of an epoch are visited in, as a text: two that are equal are the same order.

    `{ranks}` in it stands for the number of ranks that share the rows, where the order depends on it. block: rows.
    """
    if placement == "streamed":
        return f"all rows by blocks of {block}"
    if placement == "shared" and partition == "iid":
        return "all rows in one order"
    name, value = parse_partition(partition, classes)
    return f"rows divided {name}{'' if value is None else f':{value}'} (ranks: {{ranks}})"


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """The number of batches of an epoch, ceil(examples / batch_size); the last batch may be smaller."""
    return -(-examples // batch_size)


def global_order(seed: int, examples: int, epoch: int) -> np.ndarray:
    """The permutation (examples,) in which an epoch visits all examples."""
    return permutation(Random(seed)("order", epoch), examples)


def global_share(examples: int, batch_size: int, step: int, rank: int, size: int) -> BatchShare:
    """A rank's chunk of batch `step` of the global (or block) order; it may be empty."""
    first = step * batch_size
    total = min(batch_size, examples - first)
    mine = chunk(total, size, rank)
    return BatchShare(first + mine.start, first + mine.stop, mine.start, total)


def local_order(seed: int, examples: int, epoch: int, rank: int) -> np.ndarray:
    """The permutation (examples,) in which a rank visits its own rows."""
    return permutation(Random(seed)("local order", epoch, rank), examples)


def local_share(before: int, through: int, examples: int, steps: int, step: int) -> BatchShare:
    """A rank's part of its own order at `step`; the ranks before it hold `before` rows, with it they hold `through`.

    Each rank's n_r rows are dealt evenly over the steps, and so that the batch sizes differ by 1 at most: with P_r the
    rows of the ranks before r, rank r takes |chunk(P_(r+1), S, s)| - |chunk(P_r, S, s)| rows at step s of S. (If every
    rank took chunk(n_r, S, s), the longer chunks would all meet in the first steps and the last could be empty.)
    """
    lower, upper = chunk(before, steps, step), chunk(through, steps, step)
    whole = chunk(examples, steps, step)
    return BatchShare(
        upper.start - lower.start, upper.stop - lower.stop, lower.stop - lower.start, whole.stop - whole.start
    )


class BlockOrder:
    """The order of an epoch over blocks of counts[k] rows: shuffled blocks, and shuffled rows inside each block."""

    def __init__(self, seed: int, epoch: int, counts: np.ndarray):
        self.random, self.epoch, self.counts = Random(seed), epoch, counts
        self.blocks = self.random("blocks", epoch).permutation(len(counts))
        self.ends = np.cumsum(counts[self.blocks])

    def rows(self, block: int) -> np.ndarray:
        """The permutation (counts[block],) in which the rows of this block are visited."""
        return permutation(self.random("block", self.epoch, block), int(self.counts[block]))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """What order[start:stop] is made of: (block, first, last) stands for rows(block)[first:last]."""
        at = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            block, end = int(self.blocks[at]), int(self.ends[at])
            begin, last = end - int(self.counts[block]), min(stop, end)
            if start < last:  # not an empty block
                yield block, start - begin, last - begin
            start, at = last, at + 1
