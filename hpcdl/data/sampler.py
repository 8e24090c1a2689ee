"""The order of examples in an epoch and each rank's share of its batches: pure functions, testable without MPI.

An epoch visits every training example once, in steps = ceil(examples / batch_size) batches. A rank's share of a batch
is a slice of the epoch's order, and the offset of that slice in the whole batch.

    order   rows                                   used by
    global  one permutation of all examples;       one permutation, whatever the number of ranks
            batch b is order[b*B : (b+1)*B], a
            rank takes a chunk of the batch
    local   a permutation of the rank's own rows,  rows that belong to ranks (`--partition`, placement partitioned)
            cut over the steps of the epoch
    block   blocks in random order, rows of a      placement streamed, whatever the number of ranks
            block in random order

Random streams are keyed by (seed, purpose, epoch, ...), so an epoch can start at any step without saved state.
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


def order_name(placement: str, partition: str, classes: int, block: int = 0) -> str:
    """Return a text that identifies the order of an epoch: equal texts mean equal orders.

    `{ranks}` in it stands for the number of ranks that share the rows, if the order depends on it. block: rows of one.
    """
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

    before, through: rows of the ranks before it, without and with its own. The n_r rows of each rank are spread evenly
    over the S steps, so that batch sizes differ by 1 at most: with P_r rows of the ranks before r, rank r takes
    |chunk(P_(r+1), S, s)| - |chunk(P_r, S, s)| rows at step s. (If every rank took chunk(n_r, S, s), the longer chunks
    would all meet in the first steps, and the last step could be empty.)
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
