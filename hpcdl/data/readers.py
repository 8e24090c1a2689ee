"""Two ways to make the batches of an epoch: from rows in memory, and from blocks of a file as they come by.

Both offer `batches(epoch, batch_size, share, steps, buffers)`, a generator of the Batch of each of these steps of an
epoch; share is (rank, size), steps is asked for the next step when the next batch is.
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
    """The training examples of one rank, where they lie, and the number of examples of ranks before each rank."""

    examples: np.ndarray
    where: np.ndarray
    before: np.ndarray


class MemoryReader:
    """Batches from rows in memory.

    rows       where the data lie
    numbers    row of `rows` of each training example (None: the same number)
    spec       partition: `iid` shares every batch out, any other gives each rank its own rows
    local      placement partitioned: the `LocalExamples` of each share (rank, size) that has rows here; None: all do
    owners     whose each training example is, for the partition column:NAME
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
        self.spec, self.whole = spec, local is None and spec == "iid"
        self.examples = len(rows) if numbers is None else len(numbers)
        self.local = local or {}
        for some in self.local.values():
            self.examples = int(some.before[-1])
        ready(self.examples)
        # Whose order was drawn last, and the order: those who come later share it.
        self.drawn: tuple[Any, Any] = None, None

    def batches(
        self,
        epoch: int,
        batch_size: int,
        share: tuple[int, int],
        steps: Iterable[int],
        buffers: BatchBuffers,
        ahead: bool = True,
    ) -> Generator[Batch, None, None]:
        """The batches of these steps. ahead: nothing is read, so nothing is read ahead."""
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
        """This rank's order, as training examples and as rows of `rows`, and a function: step -> its share of it."""
        key = epoch if self.whole else (epoch, *share)
        drawn = self.drawn  # read and written as one: several threads may be here
        if drawn[0] != key:
            drawn = self.drawn = None, None  # the old order goes before there is a new one
            drawn = self.drawn = key, self._whole_order(epoch) if self.whole else self._own_order(epoch, *share)
        index, source = drawn[1]
        rank, size = share
        if self.whole:
            return index, source, partial(global_share, self.examples, batch_size, rank=rank, size=size)
        before, through = self._bounds(share)
        return index, source, partial(local_share, before, through, self.examples, self._steps(batch_size))

    def in_order(self, epoch: int, share: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """This rank's rows of an epoch in its order: numbers in `rows`, and in the training set."""
        index, source, _ = self._plan(epoch, 1, share)
        part = chunk(self.examples, share[1], share[0]) if self.whole else slice(None)
        return source[part], index[part]

    def part_in_order(
        self, epoch: int, step: int, batch_size: int, share: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """This rank's rows of the batch of a step: numbers in `rows`, in the training set, and all ranks' examples."""
        index, source, share_at = self._plan(epoch, batch_size, share)
        first, last, _, total = share_at(step=step)
        return source[first:last], index[first:last], total

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
        """The training examples of each of `count` parts."""
        labels = self.rows.y if self.numbers is None else self.rows.y[self.numbers]
        return partition(self.spec, labels, self.classes, count, self.seed, self.owners)

    def visit(self, order: np.ndarray, batch_size: int, buffers: BatchBuffers) -> Iterator[Batch]:
        """The training examples `order`, so many at a time."""
        source = self._source(order)
        for step, start in enumerate(range(0, len(order), batch_size)):
            index = source[start : start + batch_size]
            x, y = buffers.next(len(index))
            self.rows.gather(index, x, y)
            yield Batch(x, y, len(index), 0, step, order[start : start + batch_size])

    def _bounds(self, share: tuple[int, int]) -> tuple[int, int]:
        """The examples of ranks before this share's, and through it."""
        before, through = self._local(*share).before[share[0] :][:2]
        return int(before), int(through)

    def _steps(self, batch_size: int) -> int:
        return steps_per_epoch(self.examples, batch_size)

    def most_rows(self, batch_size: int, share: tuple[int, int]) -> int:
        """No batch of this share has more rows."""
        if self.whole:
            return most_rows(self.examples, batch_size, *share)
        before, through = self._bounds(share)
        return -(-through // self._steps(batch_size)) - before // self._steps(batch_size)


def most_rows(examples: int, batch_size: int, rank: int, size: int) -> int:
    """The rows of a rank's chunk of a whole batch."""
    first, last, _, _ = global_share(examples, batch_size, 0, rank, size)
    return last - first


def rows_before(parts: list[np.ndarray]) -> np.ndarray:
    """The rows that ranks before rank r hold, for r = 0 .. size."""
    return np.cumsum([0, *map(len, parts)])


class StreamReader:
    """Batches from a file that is read block by block, in the order of `BlockOrder`.

    A thread reads the next block while this one is used. Every rank reads the blocks of which it needs rows, so the
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
        """The batches of these steps; without `ahead` no thread reads, and `steps` need not be known before."""
        order, memory = (
            BlockOrder(self.seed, epoch, self.counts),
            [self.rows.buffers(self.rows.block) for _ in range(2)],
        )
        share_at = partial(global_share, self.examples, batch_size, rank=share[0], size=share[1])
        load = partial(self._load, order, memory)
        blocks = prefetch(map(load, touched(order, (share_at(step=step) for step in steps)))) if ahead else None
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
        """No batch of this share has more rows."""
        return most_rows(self.examples, batch_size, *share)

    def _load(self, order: BlockOrder, memory: list, block: int) -> tuple:
        """Read a block: its rows, and in the order of visiting, where its training examples lie and their numbers."""
        memory.reverse()
        start = block * self.rows.block
        stop = min(start + self.rows.block, len(self.rows))
        out = self.held_out[slice(*np.searchsorted(self.held_out, (start, stop)))]
        kept = np.delete(np.arange(stop - start), out - start)
        visit = order.rows(block)
        return self.rows.read(start, stop, memory[0], self.augment), kept[visit], self.first[block] + visit


Reader: TypeAlias = MemoryReader | StreamReader


def touched(order: BlockOrder, shares: Iterable[BatchShare]) -> Iterator[int]:
    """The blocks that these shares need, one after the other."""
    current: int | None = None
    for first, last, _, _ in shares:
        for block, _, _ in order.pieces(first, last):
            if block != current:
                current = block
                yield block
