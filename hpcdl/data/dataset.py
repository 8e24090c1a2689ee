"""A data set as a training run sees it: shared batches for training, plain rows for scoring."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from hpcdl.csr import CSR
from hpcdl.data.batch import Batch, DeviceBuffers
from hpcdl.data.cursor import Cursor
from hpcdl.data.digest import blake
from hpcdl.data.formats.vocabulary import Vocabulary
from hpcdl.data.placement import FileRows, MemoryRows, standardized
from hpcdl.data.prefetch import prefetch
from hpcdl.data.readers import MemoryReader, Reader
from hpcdl.data.sampler import steps_per_epoch
from hpcdl.data.scale_warning import feature_scales
from hpcdl.data.schema import Schema
from hpcdl.data.standard import Standard
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Device


class Split:
    """The training, test or validation rows of a data set, all of which every rank can read.

    numbers: rows of `source` that belong to the split; None: all.
    """

    def __init__(self, source: MemoryRows | FileRows, numbers: np.ndarray | None, dtype: np.dtype):
        self.source, self.numbers, self.dtype = source, numbers, dtype
        self.examples = len(source) if numbers is None else len(numbers)

    def rows(self, start: int, stop: int) -> tuple[Any, np.ndarray]:
        """Return rows start to stop in new arrays: x (rows, features), scaled, in the model's type, and y (rows,).

        x of sparse data is a CSR (hpcdl/csr.py).
        """
        return self.take(np.arange(start, stop))

    def take(self, index: ArrayLike) -> tuple[Any, np.ndarray]:
        """Return the rows with these numbers, like `rows`; IndexError if one does not exist."""
        index = np.array(index, np.int64)
        if len(index) and (index.min() < 0 or index.max() >= self.examples):
            raise IndexError(f"row numbers go from 0 to {self.examples - 1}, not {index.min()} to {index.max()}")
        shape = len(index), self.source.width
        x: Any = CSR.empty(*shape, self.dtype) if self.source.sparse else np.empty(shape, self.dtype)
        y = np.empty((len(index), *self.source.outputs), self.source.y_kind)
        if len(index):
            self.source.gather(index if self.numbers is None else self.numbers[index], x, y)
        return x, y


class Data:
    """A data set: what `open_data` and `from_arrays` return.

    features     shape of one example                     examples    training rows, all ranks
    classes      0: regression                            outputs     shape of one target: () or (k,)
    sparse       True if x of batches is a CSR            dtype       of the model
    train, test, validation   Split, or None              digest      of all that a model sees (digest.py); lazy
    statistics   mean, deviation (features,) float64,     order       of the rows of an epoch (sampler.order_name)
                 of standardized rows                     source      name or path for `open_data`; empty for arrays
    schema       class names, scale, ... (schema.py)      vocabulary  of a text, else None
    """

    source = ""
    _reader: Any = None  # a Reader; None if other ranks read the rows
    schema: Schema
    outputs: tuple[int, ...]

    def __init__(
        self,
        *,
        name: str,
        features: tuple[int, ...],
        classes: int,
        train: Split,
        test: Split | None,
        validation: Split | None,
        reader: Reader,
        threaded: bool,
        shares: list[tuple[int, int]] | None = None,
        resources: list,
        schema: Schema,
        order: str,
        digest: Callable[[], str],
    ):
        self.name, self.features, self.classes, self.dtype = name, features, classes, train.dtype
        self.train, self.test, self.validation = train, test, validation
        self.examples, self.schema = train.examples, schema
        self.device: Device = CPU
        self.statistics = train.source.standard.statistics if train.source.standard is not None else {}
        self._reader, self._threaded, self._shares, self._resources = reader, threaded, shares, resources
        self._free: list[DeviceBuffers] = []
        self.order, self._make_digest = order, digest
        self._digest: str | None = None
        self.outputs, self.sparse = train.source.outputs, train.source.sparse

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary of a text; None for other data."""
        return self.schema.vocabulary

    @property
    def digest(self) -> str:
        """The digest of the data (digest.py). Local; the first access may read all rows."""
        if self._digest is None:
            self._digest = self._make_digest()
        return self._digest

    @property
    def unit(self) -> float:
        """The original units per unit of prediction: the deviation of a single standardized target; else 1."""
        deviation = self.statistics.get("target_deviation", np.ones(1))
        return float(deviation[0]) if len(deviation) == 1 else 1.0

    @property
    def scales(self) -> tuple[float, float, float] | None:
        """Scales of the features and the targets (scale_warning.py); None where they do not matter. Local."""
        return feature_scales(self)

    def with_rows(self, drawn: np.ndarray) -> Self:
        """Return these data with the training examples of the numbers `drawn`, some of which may repeat.

        Both data sets share the rows in memory, and `close` of one closes both. UsageError if the rows are not all in
        memory.
        """
        reader = self._reader
        if not isinstance(reader, MemoryReader) or reader.local:
            raise UsageError(
                "rows are drawn again (bagging, boosting) with --placement shared only, without data servers"
            )
        other, reader = self._copy(), reader.with_examples(drawn)
        other._reader, other.train = reader, Split(self.train.source, reader.numbers, self.dtype)
        other.examples = other.train.examples

        def digest() -> str:
            return blake(f"{self.digest} rows {blake(drawn.tobytes()).hexdigest()}".encode()).hexdigest()

        other._digest, other._make_digest = None, digest
        return other

    def with_standard(self, standard: Standard) -> Self:
        """Return these data standardized otherwise; rows and `close` are shared as by `with_rows`."""
        other, reader = self._copy(), copy.copy(self._reader)

        def split(part: Split | None) -> Any:
            return part and Split(standardized(part.source, standard), part.numbers, part.dtype)

        other.train, other.test, other.validation = map(split, (self.train, self.test, self.validation))
        reader.rows = standardized(reader.rows, standard)
        other._reader, other.statistics = reader, standard.statistics
        return other

    def _copy(self) -> Self:
        other = copy.copy(self)
        other._free = []
        return other

    def to(self, device: Device) -> None:
        """Deliver later batches on this device (hpcdl.kernels.device): gathered on the host, then copied.

        For a GPU they are gathered in pinned memory, which copies fastest. `rows` and `take` stay on the host.
        """
        if device is not self.device:
            self.device = device
            self._free = []

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the number of batches of an epoch, ceil(examples / batch_size)."""
        if batch_size < 1:
            raise UsageError(f"the batch size must be 1 or more, not {batch_size}")
        return steps_per_epoch(self.examples, batch_size)

    def batches(self, epoch: int, batch_size: int, share: tuple[int, int] = (0, 1), start: int = 0) -> Iterator[Batch]:
        """Yield the share (rank, size) of the batches of an epoch, from step `start` on.

        A batch is valid until the second next one is requested; then its arrays are reused. Steps before `start` are
        not read. With augmentation or placement streamed a background thread makes the next batch while the caller
        uses this one; an error of the thread is raised here.
        """
        steps = self.steps_per_epoch(batch_size)
        if not 0 <= start <= steps:
            raise UsageError(f"an epoch of {steps} steps cannot start at step {start}")
        self._check(share)
        return self._batches(epoch, batch_size, share, range(start, steps))

    def cursor(
        self,
        batch_size: int,
        share: tuple[int, int] = (0, 1),
        ahead: bool = True,
        buffers: Callable[[int], DeviceBuffers] | None = None,
    ) -> Cursor:
        """Return a cursor over the same batches with random access: cursor.take(epoch, step).

        ahead: use a background thread where `batches` does; without it, steps out of sequence are faster.
        buffers: makes the `DeviceBuffers` with a given number of pairs.
        """
        self._check(share)
        ahead = ahead and self._threaded
        # A thread needs two more pairs than the two valid batches: one in the making, one made in vain before a jump.
        pairs = (buffers or self._buffers)(2 + 2 * ahead)
        return Cursor(self._reader, self.steps_per_epoch(batch_size), batch_size, share, ahead, pairs)

    def divide(self, count: int) -> list[np.ndarray]:
        """Return the sorted training examples of each of `count` clients, by the partition of the data.

        count 0: one client per owner in the column of the partition column:NAME. A client may have no examples.
        Placement shared only: every rank holds every row. UsageError for too few examples or another number of owners.
        """
        owners = self._in_memory.owners
        if owners is None and not 1 <= count <= self.examples:
            raise UsageError(f"{self.examples} training examples cannot be divided among {count} clients; take fewer")
        if owners is not None:
            known = len(np.unique(owners))
            if count not in (0, known):
                raise UsageError(f"the column holds {known} owners, not {count}; take {known}, or 0 for all")
            count = known
        return self._in_memory.divide(count)

    def visit(self, order: np.ndarray, batch_size: int) -> Iterator[Batch]:
        """Yield the training examples with these numbers, in this order, in batches of this rank alone.

        Placement shared only, without augmentation. Arrays are reused as by `batches`.
        """
        buffers = self._free.pop() if self._free else self._buffers(2)
        yield from map(buffers.hand_out, self._in_memory.visit(order, batch_size, buffers.host))
        self._free = [buffers]

    def in_place(self, epoch: int, share: tuple[int, int] = (0, 1)) -> tuple[MemoryRows, np.ndarray, np.ndarray]:
        """Return this rank's examples of an epoch without a copy, for kernels that read them: (rows, source, index).

        source: row numbers in `rows`, in the order of the epoch; index: their numbers in the training set. Under the
        partition iid all ranks share one order, and a rank's part of it is `chunk(examples, size, rank)`.
        `rows` holds x unscaled: see `MemoryRows.gather`. UsageError if the rows are not in memory.
        """
        self._check_in_memory(share)
        return self._in_memory.rows, *self._in_memory.in_order(epoch, share)

    def part_in_place(
        self, epoch: int, step: int, batch_size: int, share: tuple[int, int] = (0, 1)
    ) -> tuple[MemoryRows, np.ndarray, np.ndarray, int]:
        """Return this rank's share of a batch without a copy: (rows, source, index, examples of all ranks).

        The examples are those of `batches`; rows, source and index are as in `in_place`.
        """
        self._check_in_memory(share)
        return self._in_memory.rows, *self._in_memory.part_in_order(epoch, step, batch_size, share)

    @property
    def rows_in_memory(self) -> MemoryRows:
        """The rows that `in_place` returns; UsageError if they are not in memory."""
        self._check_in_memory()
        return self._in_memory.rows

    def _check_in_memory(self, share: tuple[int, int] | None = None) -> None:
        if not isinstance(self._reader, MemoryReader):
            raise UsageError(
                "this needs its training rows in memory: --placement shared or partitioned, no data servers"
            )
        if share is not None:
            self._check(share)

    def most_rows(self, batch_size: int, share: tuple[int, int]) -> int:
        """Return the largest number of rows of a batch of this share."""
        self.steps_per_epoch(batch_size)
        self._check(share)
        return self._reader.most_rows(batch_size, share)

    @property
    def _in_memory(self) -> MemoryReader:
        assert isinstance(self._reader, MemoryReader)  # placement shared
        return self._reader

    def _check(self, share: tuple[int, int]) -> None:
        if not 0 <= share[0] < share[1]:
            raise UsageError(f"share {share} is not (rank, size)")
        if self._shares is not None and tuple(share) not in self._shares:
            shares = ", ".join(map(str, self._shares))
            raise UsageError(f"placement partitioned: this rank holds the rows of share {shares}, not {share}")

    def _buffers(self, count: int) -> DeviceBuffers:
        rows = self.train.source
        return DeviceBuffers(self.device, count, rows.width, self.dtype, rows.y_kind, rows.outputs, self.sparse)

    def _batches(self, epoch: int, batch_size: int, share: tuple[int, int], steps: range) -> Iterator[Batch]:
        # One pair of arrays for the current batch, one for the previous one; with a thread, one for the next one.
        buffers = self._free.pop() if self._free else self._buffers(2 + self._threaded)
        batches = self._reader.batches(epoch, batch_size, share, steps, buffers.host)
        yield from map(buffers.hand_out, prefetch(batches) if self._threaded else batches)
        self._free = [buffers]  # not when closed early: a thread may have gone ahead by one

    def close(self) -> None:
        """Free the memory and close the file; the data cannot be used afterwards. Collective if memory is shared.

        Without `close` both last until the program ends.
        """
        while self._resources:
            self._resources.pop().close()
