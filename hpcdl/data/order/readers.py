"""Readers make the batches of an epoch, from rows in memory or from blocks of a file.
`batches(epoch, batch_size, share, steps, buffers)` yields for each step in `steps` the share (rank, size) of its batch;
it takes the next step when the next batch is requested."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.data.augment import Augment, Moves
from hpcdl.data.batch import Batch, BatchBuffers
from hpcdl.data.hdf5 import check_memory
from hpcdl.data.order import sampler
from hpcdl.data.order.prefetch import prefetch
from hpcdl.data.order.sampler import Share
from hpcdl.data.partition import partition
from hpcdl.data.placement import FileRows, MemoryRows
from hpcdl.kernels.shuffle import ready

# take(first, last, x, y, moves=None) gathers the rows from first to last - 1 of the orders of all epochs, one after the
# other (epoch e begins at e times the examples), into x and y, and returns their numbers in the training set.
Take: TypeAlias = Callable[..., np.ndarray]


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
    blocks: tuple[np.ndarray, int] | None = None  # counts and window of a `WindowOrder`; None: one shuffle of all rows

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
                whole = self._whole(epoch)
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

    def _whole(self, epoch: int) -> np.ndarray:
        """Return an epoch's order of all training examples."""
        if self.blocks is None:
            return sampler.global_order(self.seed, self.examples, epoch)
        return sampler.WindowOrder(self.seed, epoch, *self.blocks).examples()

    @contextlib.contextmanager
    def reading(self, spans: Iterable[tuple[int, int]] | None) -> Iterator[Take]:
        """Yield a function that gathers rows of the order of all ranks, as `StreamReader.reading` does."""
        yield self._take

    def _take(self, first: int, last: int, x: Any, y: np.ndarray, moves: Moves | None = None) -> np.ndarray:
        numbers, done = np.empty(last - first, np.int64), 0
        while done < last - first:
            epoch, begin = divmod(first + done, self.examples)
            index, source, _ = self._plan(epoch, 1, (0, 1))
            end = min(self.examples, begin + last - first - done)
            here = slice(done, done + end - begin)
            self.rows.gather(
                source[begin:end], x[here], y[here], Moves(*(move[here] for move in moves)) if moves else None
            )
            numbers[here] = index[begin:end]
            done = here.stop
        return numbers

    @property
    def augment(self) -> Augment | None:
        return self.rows.augment

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
        return dataclasses.replace(self, numbers=self._source(drawn), held=None, owners=owners, blocks=None)

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


class Loaded(NamedTuple):
    """A block in memory. source: its training rows in the order of visits, as rows of `BlockMemory`; numbers: in the
    training set; position: of the block in the memory."""

    source: np.ndarray
    numbers: np.ndarray
    position: int


Place: TypeAlias = tuple[int, int]  # (epoch, place of a block in its order)


class BlockMemory:
    """Memory for a window of blocks and the next one, allocated once: one array, from which rows are gathered."""

    def __init__(self, rows: FileRows, count: int, augment: Augment | None):
        longest = int(np.diff(rows.starts).max(initial=0))
        self.stride = longest + rows.sparse  # sparse rows of a block end with the start of no row
        self.x, self.y = rows.form.empty(count * self.stride)
        if rows.sparse:  # all room at once: arrays that grow would be others than those of `rows`
            self.x.reserve(count * rows.elements)
            self.x.indptr[:: self.stride][:count] = np.arange(count) * rows.elements
        self.rows = MemoryRows(self.x, self.y, rows.scale, rows.dtype, augment, rows.standard)
        self.count, self.held = count, dict[Place, Loaded]()

    def position(self, needed: set[Place]) -> int:
        """Return a free position; the earliest block that is not needed makes room for it."""
        if len(self.held) < self.count:
            return next(each for each in range(self.count) if all(each != one.position for one in self.held.values()))
        return self.held.pop(min(place for place in self.held if place not in needed)).position

    def arrays(self, position: int, rows: int) -> tuple[Any, np.ndarray]:
        """Return the arrays x and y of the block at this position."""
        here = slice(position * self.stride, position * self.stride + rows)
        return self.x[here], self.y[here]


class StreamReader:
    """Batches from a file, read block by block in the order of `WindowOrder`; a thread may read one block ahead.
    Every rank reads each block from which it needs rows, so the order is independent of the number of ranks. held_out:
    sorted rows of the file that are not training examples.

    Memory: `window` blocks and one, or all blocks of a small file, for each sequence of batches that is read."""

    def __init__(self, rows: FileRows, held_out: np.ndarray, seed: int, augment: Augment | None, window: int = 1):
        self.rows, self.held_out, self.seed, self.augment, self.window = rows, held_out, seed, augment, window
        self.counts = sampler.training_counts(rows.starts, held_out)
        self.first = np.cumsum(self.counts) - self.counts  # number of the first training example of each block
        self.examples = int(self.counts.sum())
        self.held = min(window, len(self.counts)) + 1  # blocks in memory
        what = f"{rows.source.where}: {self.held} blocks of {rows.block} rows, by --shuffle-window {window},"
        check_memory(self.held * rows.block_bytes, what)
        self.free: list[BlockMemory] = []  # of sequences that have ended
        # Two epochs: where one passes into the next, the thread is ahead.
        self.order_of = functools.lru_cache(2)(lambda epoch: sampler.WindowOrder(seed, epoch, self.counts, window))

    def batches(
        self, epoch: int, batch_size: int, share: Share, steps: Iterable[int], buffers: BatchBuffers, ahead: bool = True
    ) -> Generator[Batch, None, None]:
        """Yield the batches of these steps. ahead: a thread reads, and `steps` is iterated twice; else once."""
        share_at, begin = partial(sampler.global_share, self.examples, batch_size), epoch * self.examples
        shares = (share_at(step, *share) for step in steps) if ahead else ()
        spans = ((begin + each.start, begin + each.stop) for each in shares)
        with self.reading(spans if ahead else None) as take:
            for step in steps:
                first, last, offset, total = share_at(step, *share)
                x, y = buffers.next(last - first)
                moves = self.augment.moves(epoch, step, total, offset, last - first) if self.augment else None
                yield Batch(x, y, total, epoch, step, take(begin + first, begin + last, x, y, moves))

    @contextlib.contextmanager
    def reading(self, spans: Iterable[tuple[int, int]] | None) -> Iterator[Take]:
        """Yield a function that gathers rows (`Take`); blocks that it leaves in memory serve later calls. spans: the
        (first, last) of all its calls, ascending, for a thread that reads a block ahead; None: without a thread."""
        memory = self.free.pop() if self.free else BlockMemory(self.rows, self.held, self.augment)
        run = _Reading(self, memory, spans)
        try:
            yield run.take
        finally:
            run.close()
            self.free.append(memory)

    def most_rows(self, batch_size: int, share: Share) -> int:
        return most_rows(self.examples, batch_size, *share)


class _Reading:
    """A sequence of calls of `take`, with the memory that it reads blocks into."""

    def __init__(self, reader: StreamReader, memory: BlockMemory, spans: Iterable[tuple[int, int]] | None):
        self.reader, self.memory, self.examples = reader, memory, reader.examples
        self.slot: tuple[Place, np.ndarray, np.ndarray] | None = None  # the slot in use: its rows, and their numbers
        self.ahead: Generator[tuple[Place, Loaded], None, None] | None = None
        self.here = memory.held
        if spans is not None:
            slots = itertools.chain.from_iterable(itertools.starmap(self.slots, spans))
            places = (key for key, _ in itertools.groupby(slot[:2] for slot in slots))
            first = next(places, None)
            if first is not None:
                # The thread makes room one block before the caller leaves a slot: of older blocks only those may stay
                # that the first slot needs, as if they had been read for it.
                needed = self.needed(*first)
                memory.held = {each: memory.held[each] for each in needed if each in memory.held}
                self.here = dict(memory.held)
                self.ahead = prefetch(self.loads(itertools.chain([first], places)))

    def slots(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (epoch, slot, first, last) for the rows from `first` to last - 1 of all epochs."""
        while first < last:
            epoch, begin = divmod(first, self.examples)
            end = min(self.examples, begin + last - first)
            for part in self.reader.order_of(epoch).slots(begin, end):
                yield epoch, *part
            first += end - begin

    def needed(self, epoch: int, slot: int) -> list[Place]:
        return [(epoch, place) for place, _ in self.reader.order_of(epoch).pieces(slot)]

    def loads(self, slots: Iterable[tuple[int, int]]) -> Iterator[tuple[Place, Loaded]]:
        """Yield the blocks that these slots need and that are not in memory."""
        for slot in slots:
            needed = self.needed(*slot)
            for place in needed:
                if place not in self.memory.held:
                    yield place, self.load(place, needed)

    def load(self, place: Place, needed: list[Place]) -> Loaded:
        """Read a block into memory; blocks that are `needed` stay."""
        reader, order = self.reader, self.reader.order_of(place[0])
        block, position = int(order.blocks[place[1]]), self.memory.position({*needed})
        start, stop = map(int, reader.rows.starts[block : block + 2])
        reader.rows.read(start, stop, self.memory.arrays(position, stop - start))
        assert not reader.rows.sparse or len(self.memory.x.data) == len(self.memory.rows.x.data)  # it has not grown
        out = reader.held_out[slice(*np.searchsorted(reader.held_out, (start, stop)))]
        training, visit = np.delete(np.arange(stop - start), out - start), order.rows(place[1])
        source = position * self.memory.stride + training[visit]
        loaded = self.memory.held[place] = Loaded(source, reader.first[block] + visit, position)
        return loaded

    def enter(self, epoch: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a slot in the epoch's order, as rows of the memory, and their numbers."""
        if self.slot is None or self.slot[0] != (epoch, slot):
            needed = self.needed(epoch, slot)
            for place in needed:
                if place in self.here:
                    continue
                if self.ahead is None:
                    self.load(place, needed)
                else:
                    read, loaded = next(self.ahead)
                    assert read == place
                    self.here = {each: one for each, one in self.here.items() if one.position != loaded.position}
                    self.here[place] = loaded
            order = self.reader.order_of(epoch)
            pieces = [(self.here[epoch, place], part) for place, part in order.pieces(slot)]
            source = np.concatenate([block.source[part] for block, part in pieces])
            numbers = np.concatenate([block.numbers[part] for block, part in pieces])
            visit = order.within(slot, len(source))
            self.slot = (epoch, slot), source[visit], numbers[visit]
        return self.slot[1:]

    def take(self, first: int, last: int, x: Any, y: np.ndarray, moves: Moves | None = None) -> np.ndarray:
        """Gather rows as `Take` says."""
        numbers, done = np.empty(last - first, np.int64), 0
        for epoch, slot, begin, end in self.slots(first, last):
            source, index = self.enter(epoch, slot)
            here = slice(done, done + end - begin)
            part = Moves(*(move[here] for move in moves)) if moves else None
            self.memory.rows.gather(source[begin:end], x[here], y[here], part)
            numbers[here] = index[begin:end]
            done = here.stop
        return numbers

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()


class Reader(Protocol):
    """What makes the batches of an epoch: a `MemoryReader`, a `StreamReader`, or that of a mixture (mixture.py)."""

    def batches(
        self, epoch: int, batch_size: int, share: Share, steps: Iterable[int], buffers: BatchBuffers, ahead: bool = True
    ) -> Generator[Batch, None, None]:
        """Yield the batches of these steps."""

    def most_rows(self, batch_size: int, share: Share) -> int:
        """Return the most rows of a share of a batch."""
