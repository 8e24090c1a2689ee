"""Readers make the batches of an epoch, from rows in memory or from blocks of a file.
`batches(epoch, batch_size, share, steps, buffers)` yields for each step in `steps` the share (rank, size) of its batch;
it takes the next step when the next batch is requested."""

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.data import sampler
from hpcdl.data.augment import Augment, Moves
from hpcdl.data.batch import Batch, BatchBuffers
from hpcdl.data.partition import partition
from hpcdl.data.placement import FileRows, MemoryRows
from hpcdl.data.prefetch import prefetch
from hpcdl.data.sampler import Share
from hpcdl.kernels.shuffle import ready


class LocalExamples(NamedTuple):
    """A rank's training examples, their row numbers in memory, and `rows_before` of the examples of all ranks."""

    examples: np.ndarray
    where: np.ndarray
    before: np.ndarray


@dataclasses.dataclass(eq=False)
class MemoryReader:
    """Batches from rows in memory."""

    rows: MemoryRows
    numbers: np.ndarray | None  # the row of each training example in `rows`; None: example k is row k
    classes: int
    seed: int
    spec: str  # the partition: `iid` divides every batch among the ranks, any other gives each rank its own rows
    held: dict[Share, LocalExamples] | None = None  # placement partitioned: the examples held here; None: all
    owners: np.ndarray | None = None  # the owner of each training example; None: the partition is not column:NAME

    def __post_init__(self) -> None:
        self.shared_order, self.local = self.held is None and self.spec == "iid", self.held or {}
        self.examples = len(self.rows) if self.numbers is None else len(self.numbers)
        for examples_here in self.local.values():
            self.examples = int(examples_here.before[-1])
        ready(self.examples)
        # The key of the order drawn last, and the order: later calls share it.
        self.cached_order: tuple[Any, Any] = None, None

    def batches(
        self, epoch: int, batch_size: int, share: Share, steps: Iterable[int], buffers: BatchBuffers, ahead: bool = True
    ) -> Generator[Batch, None, None]:
        """Yield the batches of these steps. ahead: without effect, for nothing is read from a file."""
        index, source, share_at = self._plan(epoch, batch_size, share)
        augment = self.rows.augment
        for step in steps:
            first, last, offset, total = share_at(step=step)
            x, y = buffers.next(last - first)
            moves = augment.moves(epoch, step, total, offset, last - first) if augment else None
            self.rows.gather(source[first:last], x, y, moves)
            yield Batch(x, y, total, epoch, step, index[first:last])

    def _plan(
        self, epoch: int, batch_size: int, share: Share
    ) -> tuple[np.ndarray, np.ndarray, Callable[..., sampler.BatchShare]]:
        """Return an epoch's order, as training examples and as rows of `rows`, and a function step -> BatchShare."""
        key = epoch if self.shared_order else (epoch, *share)
        drawn = self.cached_order  # read and written as one: several threads may be here
        if drawn[0] != key:
            drawn = self.cached_order = None, None  # free the old order before the new one is drawn
            if self.shared_order:
                whole = sampler.global_order(self.seed, self.examples, epoch)
                order = whole, self._source(whole)
            else:
                local = self._local(share)
                own = sampler.local_order(self.seed, len(local.examples), epoch, share[0])
                order = local.examples[own], local.where[own]
            drawn = self.cached_order = key, order
        index, source = drawn[1]
        rank, size = share
        if self.shared_order:
            return index, source, partial(sampler.global_share, self.examples, batch_size, rank=rank, size=size)
        steps = sampler.steps_per_epoch(self.examples, batch_size)
        return index, source, partial(sampler.local_share, *self._bounds(share), self.examples, steps)

    def in_order(self, epoch: int, share: Share) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's examples of an epoch in order: their numbers in `rows`, and in the training set."""
        index, source, _ = self._plan(epoch, 1, share)
        part = chunk(self.examples, share[1], share[0]) if self.shared_order else slice(None)
        return source[part], index[part]

    def part_in_order(self, epoch: int, step: int, batch_size: int, share: Share) -> tuple[np.ndarray, np.ndarray, int]:
        """Return this rank's examples of a step, as numbers in `rows` and in the training set; and the batch's size."""
        index, source, share_at = self._plan(epoch, batch_size, share)
        first, last, _, total = share_at(step=step)
        return source[first:last], index[first:last], total

    def with_examples(self, drawn: np.ndarray) -> "MemoryReader":
        owners = None if self.owners is None else self.owners[drawn]
        return dataclasses.replace(self, numbers=self._source(drawn), held=None, owners=owners)

    def _source(self, index: np.ndarray) -> np.ndarray:
        return index if self.numbers is None else self.numbers[index]

    def _local(self, share: Share) -> LocalExamples:
        if share not in self.local:
            parts = self.divide(share[1])
            own = parts[share[0]]
            self.local[share] = LocalExamples(own, self._source(own), rows_before(parts))
        return self.local[share]

    def divide(self, count: int) -> list[np.ndarray]:
        labels = self.rows.y if self.numbers is None else self.rows.y[self.numbers]
        return partition(self.spec, labels, self.classes, count, self.seed, self.owners)

    def visit(self, order: np.ndarray, batch_size: int, buffers: BatchBuffers) -> Iterator[Batch]:
        source = self._source(order)
        for step, start in enumerate(range(0, len(order), batch_size)):
            index = source[start : start + batch_size]
            x, y = buffers.next(len(index))
            self.rows.gather(index, x, y)
            yield Batch(x, y, len(index), 0, step, order[start : start + batch_size])

    def _bounds(self, share: Share) -> tuple[int, int]:
        """Return the number of examples of the ranks before that of this share, and of the ranks up to it."""
        before, through = self._local(share).before[share[0] :][:2]
        return int(before), int(through)

    def most_rows(self, batch_size: int, share: Share) -> int:
        if self.shared_order:
            return most_rows(self.examples, batch_size, *share)
        steps, (before, through) = sampler.steps_per_epoch(self.examples, batch_size), self._bounds(share)
        return -(-through // steps) - before // steps


def most_rows(examples: int, batch_size: int, rank: int, size: int) -> int:
    """Return the number of rows in a rank's chunk of a whole batch."""
    first, last, _, _ = sampler.global_share(examples, batch_size, 0, rank, size)
    return last - first


def training_numbers(rows: int, held_out: np.ndarray) -> np.ndarray | None:
    """Return the numbers of the rows that are not held out; None: all."""
    return np.delete(np.arange(rows), held_out) if len(held_out) else None


def rows_before(parts: list[np.ndarray]) -> np.ndarray:
    """Return the number of rows of the ranks before rank r, for r = 0 .. size."""
    return np.cumsum([0, *map(len, parts)])


class StreamReader:
    """Batches from a file that is read block by block, in the order of `BlockOrder`; a thread may read one block ahead.
    Every rank reads each block from which it needs rows, so the order is independent of the number of ranks. held_out:
    sorted rows of the file that are not training examples."""

    def __init__(self, rows: FileRows, held_out: np.ndarray, seed: int, augment: Augment | None):
        self.rows, self.held_out, self.seed, self.augment = rows, held_out, seed, augment
        starts = rows.starts
        out = np.searchsorted(held_out, starts)
        self.counts = np.diff(starts) - np.diff(out)
        self.first = starts - out  # number of the first training example of each block
        self.examples = int(self.first[-1])

    def batches(
        self, epoch: int, batch_size: int, share: Share, steps: Iterable[int], buffers: BatchBuffers, ahead: bool = True
    ) -> Generator[Batch, None, None]:
        """Yield the batches of these steps. ahead: a thread reads, and `steps` is iterated twice; else once."""
        order = sampler.BlockOrder(self.seed, epoch, self.counts)
        memory = [self.rows.form.empty(self.rows.block) for _ in range(2)]
        share_at = partial(sampler.global_share, self.examples, batch_size, rank=share[0], size=share[1])
        load = partial(self._load, order, memory)
        needed = (block for step in steps for block, _, _ in order.pieces(*share_at(step=step)[:2]))
        blocks = prefetch(load(block) for block, _ in itertools.groupby(needed)) if ahead else None
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

    def most_rows(self, batch_size: int, share: Share) -> int:
        return most_rows(self.examples, batch_size, *share)

    def _load(self, order: sampler.BlockOrder, memory: list, block: int) -> tuple:
        """Read a block; return its rows, and its examples in the order of visits: places in it, and example numbers."""
        memory.reverse()
        start, stop = map(int, self.rows.starts[block : block + 2])
        out = self.held_out[slice(*np.searchsorted(self.held_out, (start, stop)))]
        training = np.delete(np.arange(stop - start), out - start)
        visit = order.rows(block)
        return self.rows.read(start, stop, memory[0], self.augment), training[visit], self.first[block] + visit


Reader: TypeAlias = MemoryReader | StreamReader
