"""The order of examples in an epoch and each rank's share of its batches: pure functions, testable without MPI.

An epoch visits every training example once, in steps = ceil(examples / batch_size) batches. Its order is one of

    global  one permutation of all examples: batch b is order[b*B : (b+1)*B], and a rank takes a chunk of the batch
    local   a permutation of the rank's own rows, cut over the steps: for `--partition` and placement partitioned
    block   blocks in random order, rows shuffled within a window of blocks: for placement streamed

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


def order_name(placement: str, partition: str, classes: int, block: int = 0, window: int = 1) -> str:
    """Return a text that identifies the order of an epoch: equal texts mean equal orders. block: rows of a block;
    window: of `WindowOrder`. `{ranks}` in the text is the number of ranks that share the rows, if the order depends on
    it."""
    if placement == "streamed":
        return f"all rows by blocks of {block}" + (f" in windows of {window}" if window > 1 else "")
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


def training_counts(starts: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Return the number of training rows of each block. starts: of the blocks, and the end; held_out: sorted rows."""
    return np.diff(starts - np.searchsorted(held_out, starts))


class WindowOrder:
    """The order of an epoch over blocks of counts[k] rows. Blocks are shuffled, and rows in each block. The rows of the
    block at place i are cut into W (`window`) pieces; piece j belongs to slot i + j. The rows of a slot are shuffled,
    and the epoch is slot 0, 1, ...; W = 3:

        place  0  1  2  3  4         a reader holds the blocks of one slot, at most W, and needs one more for the next
        slot 0 a0                    a row moves W blocks at most from where the shuffle of blocks has put it
        slot 1 a1 b0                 sizes of slots follow from the order of blocks: an epoch can start anywhere
        slot 2 a2 b1 c0              W = 1: slots are blocks, whose rows are shuffled once
        slot 3    b2 c1 d0           W >> number of blocks: nearly a shuffle of all rows

    (A shuffle buffer, as data loaders have it, mixes as well but must be refilled from the start of an epoch.)"""

    def __init__(self, seed: int, epoch: int, counts: np.ndarray, window: int = 1):
        self.random, self.epoch, self.counts, self.window = Random(seed), epoch, counts, window
        self.blocks = self.random("blocks", epoch).permutation(len(counts))
        placed, sizes = counts[self.blocks], np.zeros(len(counts) + window - 1, np.int64)
        for piece in range(window):
            sizes[piece : piece + len(counts)] += placed // window + (piece < placed % window)
        self.ends = np.cumsum(sizes)

    def rows(self, place: int) -> np.ndarray:
        """Return the permutation of the rows of the block at this place, before it is cut into pieces."""
        block = int(self.blocks[place])
        return permutation(self.random("block", self.epoch, block), int(self.counts[block]))

    def pieces(self, slot: int) -> list[tuple[int, slice]]:
        """Return the pieces of a slot before it is shuffled: (place, part of `rows(place)`), without empty ones."""
        places = range(max(0, slot - self.window + 1), min(slot + 1, len(self.blocks)))
        parts = ((each, chunk(int(self.counts[self.blocks[each]]), self.window, slot - each)) for each in places)
        return [(each, part) for each, part in parts if part.start < part.stop]

    def within(self, slot: int, rows: int) -> np.ndarray | slice:
        """Return the order of the `rows` rows of a slot, as an index into its pieces, one after the other."""
        return slice(None) if self.window == 1 else permutation(self.random("slot", self.epoch, slot), rows)

    def slots(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts (slot, first, last) of order[start:stop]: rows first to last - 1 of a slot."""
        at = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            end = int(self.ends[at])
            begin, last = int(self.ends[at - 1]) if at else 0, min(stop, end)
            if start < last:  # not an empty slot
                yield at, start - begin, last - begin
            start, at = last, at + 1

    def examples(self) -> np.ndarray:
        """Return the whole order, as numbers of training examples: those of block 0, of block 1, ..."""
        first = np.cumsum(self.counts) - self.counts
        placed = [first[block] + self.rows(place) for place, block in enumerate(self.blocks)]
        slots = []
        for slot in range(len(self.ends)):
            rows = np.concatenate([np.empty(0, np.int64), *(placed[each][part] for each, part in self.pieces(slot))])
            slots.append(rows[self.within(slot, len(rows))])
        return np.concatenate(slots)
