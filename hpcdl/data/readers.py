"""Readers make the batches of an epoch, from rows in memory or from blocks of a file.

Both have `batches(epoch, batch_size, share, steps, buffers)`, a generator of the Batch of each step in `steps`;
share is (rank, size). The generator takes the next step when the next batch is requested.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.data.augment import Augment, Moves
from hpcdl.data.batch import Batch, BatchBuffers
from hpcdl.data.partition import partition
from hpcdl.data.placement import FileRows, MemoryRows
from hpcdl.data.prefetch import prefetch
from hpcdl.data.sampler import (
    BatchShare,
    BlockOrder,
    global_order,
    global_share,
    local_order,
    local_share,
    steps_per_epoch,
)
from hpcdl.kernels.shuffle import ready


class LocalExamples(NamedTuple):
    """The training examples of one rank, their rows in memory, and the number of examples of ranks before each rank."""

    examples: np.ndarray
    where: np.ndarray
    before: np.ndarray


class MemoryReader:
    """Batches from rows in memory.

    rows       the data in memory
    numbers    row of `rows` of each training example (None: the same number)
    spec       partition: `iid` divides every batch among the ranks, any other gives each rank its own rows
    local      placement partitioned: the `LocalExamples` of each share (rank, size) held here; None: all rows are here
    owners     owner of each training example, for the partition column:NAME
    """

    def __init__(
        self,
        rows: MemoryRows,
        numbers: np.ndarray | None,
        classes: int,
        seed: int,
        spec: str,
        local: dict[tuple[int, int], LocalExamples] | None = None,
        owners: np.ndarray | None = None,
    ):
        self.rows, self.numbers, self.classes, self.seed, self.owners = rows, numbers, classes, seed, owners
        self.spec, self.shared_order = spec, local is None and spec == "iid"
        self.examples = len(rows) if numbers is None else len(numbers)
        self.local = local or {}
        for examples_here in self.local.values():
            self.examples = int(examples_here.before[-1])
        ready(self.examples)
        # The key of the order drawn last, and the order: later calls share it.
        self.cached_order: tuple[Any, Any] = None, None

    def batches(
        self,
        epoch: int,
        batch_size: int,
        share: tuple[int, int],
        steps: Iterable[int],
        buffers: BatchBuffers,
        ahead: bool = True,
    ) -> Generator[Batch, None, None]:
        """Yield the batches of these steps. ahead: without effect, for nothing is read."""
        index, source, share_at = self._plan(epoch, batch_size, share)
        augment = self.rows.augment
        for step in steps:
            first, last, offset, total = share_at(step=step)
            x, y = buffers.next(last - first)
            moves = augment.moves(epoch, step, total, offset, last - first) if augment else None
            self.rows.gather(source[first:last], x, y, moves)
            yield Batch(x, y, total, epoch, step, index[first:last])

    def _plan(
        self, epoch: int, batch_size: int, share: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray, Callable[..., BatchShare]]:
        """Return this rank's order, as training examples and as rows of `rows`, and a function step -> BatchShare."""
        key = epoch if self.shared_order else (epoch, *share)
        drawn = self.cached_order  # read and written as one: several threads may be here
        if drawn[0] != key:
            drawn = self.cached_order = None, None  # the old order goes before there is a new one
            drawn = self.cached_order = (
                key,
                self._whole_order(epoch) if self.shared_order else self._own_order(epoch, *share),
            )
        index, source = drawn[1]
        rank, size = share
        if self.shared_order:
            return index, source, partial(global_share, self.examples, batch_size, rank=rank, size=size)
        before, through = self._bounds(share)
        return index, source, partial(local_share, before, through, self.examples, self._steps(batch_size))

    def in_order(self, epoch: int, share: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's rows of an epoch in order: numbers in `rows`, and in the training set."""
        index, source, _ = self._plan(epoch, 1, share)
        part = chunk(self.examples, share[1], share[0]) if self.shared_order else slice(None)
        return source[part], index[part]

    def part_in_order(
        self, epoch: int, step: int, batch_size: int, share: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Return this rank's rows of a step: numbers in `rows` and in the training set; and all ranks' examples."""
        index, source, share_at = self._plan(epoch, batch_size, share)
        first, last, _, total = share_at(step=step)
        return source[first:last], index[first:last], total

    def with_examples(self, drawn: np.ndarray) -> "MemoryReader":
        """Return a reader of the training examples of these numbers."""
        numbers, owners = self._source(drawn), None if self.owners is None else self.owners[drawn]
        return MemoryReader(self.rows, numbers, self.classes, self.seed, self.spec, owners=owners)

    def _whole_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        index = global_order(self.seed, self.examples, epoch)
        return index, self._source(index)

    def _own_order(self, epoch: int, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        local = self._local(rank, size)
        order = local_order(self.seed, len(local.examples), epoch, rank)
        return local.examples[order], local.where[order]

    def _source(self, index: np.ndarray) -> np.ndarray:
        return index if self.numbers is None else self.numbers[index]

    def _local(self, rank: int, size: int) -> LocalExamples:
        if (rank, size) not in self.local:
            parts = self.divide(size)
            self.local[rank, size] = LocalExamples(parts[rank], self._source(parts[rank]), rows_before(parts))
        return self.local[rank, size]

    def divide(self, count: int) -> list[np.ndarray]:
        """Return the training examples of each of `count` parts."""
        labels = self.rows.y if self.numbers is None else self.rows.y[self.numbers]
        return partition(self.spec, labels, self.classes, count, self.seed, self.owners)

    def visit(self, order: np.ndarray, batch_size: int, buffers: BatchBuffers) -> Iterator[Batch]:
        """Yield the training examples `order` in batches."""
        source = self._source(order)
        for step, start in enumerate(range(0, len(order), batch_size)):
            index = source[start : start + batch_size]
            x, y = buffers.next(len(index))
            self.rows.gather(index, x, y)
            yield Batch(x, y, len(index), 0, step, order[start : start + batch_size])

    def _bounds(self, share: tuple[int, int]) -> tuple[int, int]:
        """Return the number of examples of the ranks before this share's, without and with its own."""
        before, through = self._local(*share).before[share[0] :][:2]
        return int(before), int(through)

    def _steps(self, batch_size: int) -> int:
        return steps_per_epoch(self.examples, batch_size)

    def most_rows(self, batch_size: int, share: tuple[int, int]) -> int:
        """Return the largest number of rows of a batch of this share."""
        if self.shared_order:
            return most_rows(self.examples, batch_size, *share)
        before, through = self._bounds(share)
        return -(-through // self._steps(batch_size)) - before // self._steps(batch_size)


def most_rows(examples: int, batch_size: int, rank: int, size: int) -> int:
    """Return the number of rows in a rank's chunk of a whole batch."""
    first, last, _, _ = global_share(examples, batch_size, 0, rank, size)
    return last - first


def rows_before(parts: list[np.ndarray]) -> np.ndarray:
    """Return the number of rows of the ranks before rank r, for r = 0 .. size."""
    return np.cumsum([0, *map(len, parts)])


class StreamReader:
    """Batches from a file that is read block by block, in the order of `BlockOrder`.

    A thread reads the next block while this one is used. Every rank reads each block from which it needs rows, so the
    order is independent of the number of ranks. held_out: sorted rows of the file that are not training examples.
    """

    def __init__(self, rows: FileRows, held_out: np.ndarray, seed: int, augment: Augment | None):
        self.rows, self.held_out, self.seed, self.augment = rows, held_out, seed, augment
        starts = np.append(np.arange(0, len(rows), rows.block), len(rows))
        out = np.searchsorted(held_out, starts)
        self.counts = np.diff(starts) - np.diff(out)
        self.first = starts - out  # number of the first training example of each block
        self.examples = int(self.first[-1])

    def batches(
        self,
        epoch: int,
        batch_size: int,
        share: tuple[int, int],
        steps: Iterable[int],
        buffers: BatchBuffers,
        ahead: bool = True,
    ) -> Generator[Batch, None, None]:
        """Yield the batches of these steps; without `ahead` no thread reads, and `steps` need not be known before."""
        order, memory = (
            BlockOrder(self.seed, epoch, self.counts),
            [self.rows.buffers(self.rows.block) for _ in range(2)],
        )
        share_at = partial(global_share, self.examples, batch_size, rank=share[0], size=share[1])
        load = partial(self._load, order, memory)
        blocks = (
            prefetch(map(load, blocks_of_shares(order, (share_at(step=step) for step in steps)))) if ahead else None
        )
        current: int | None = None
        try:
            for step in steps:
                first, last, offset, total = share_at(step=step)
                x, y = buffers.next(last - first)
                index = np.empty(last - first, np.int64)
                moves = self.augment.moves(epoch, step, total, offset, last - first) if self.augment else None
                done = 0
                for block, begin, end in order.pieces(first, last):
                    if block != current:
                        loaded, source, numbers = next(blocks) if blocks else load(block)
                        current = block
                    here = slice(done, done + end - begin)
                    part = Moves(*(move[here] for move in moves)) if moves else None
                    loaded.gather(source[begin:end], x[here], y[here], part)
                    index[here] = numbers[begin:end]
                    done = here.stop
                yield Batch(x, y, total, epoch, step, index)
        finally:
            if blocks:
                blocks.close()

    def most_rows(self, batch_size: int, share: tuple[int, int]) -> int:
        """Return the largest number of rows of a batch of this share."""
        return most_rows(self.examples, batch_size, *share)

    def _load(self, order: BlockOrder, memory: list, block: int) -> tuple:
        """Read a block; return its rows and, in visiting order, its examples' places in the block and numbers."""
        memory.reverse()
        start = block * self.rows.block
        stop = min(start + self.rows.block, len(self.rows))
        out = self.held_out[slice(*np.searchsorted(self.held_out, (start, stop)))]
        training = np.delete(np.arange(stop - start), out - start)
        visit = order.rows(block)
        return self.rows.read(start, stop, memory[0], self.augment), training[visit], self.first[block] + visit


Reader: TypeAlias = MemoryReader | StreamReader


def blocks_of_shares(order: BlockOrder, shares: Iterable[BatchShare]) -> Iterator[int]:
    """Yield the blocks that these shares need, in order."""
    current: int | None = None
    for first, last, _, _ in shares:
        for block, _, _ in order.pieces(first, last):
            if block != current:
                current = block
                yield block
