"""A data set as a training run sees it: shared batches for training, plain rows for scoring."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from hpcdl.chunks import chunks
from hpcdl.data.batch import Batch, DeviceBuffers, RowForm
from hpcdl.data.cursor import Cursor
from hpcdl.data.digest import blake
from hpcdl.data.placement import FileRows, MemoryRows
from hpcdl.data.prefetch import prefetch
from hpcdl.data.readers import MemoryReader, Reader, training_numbers
from hpcdl.data.sampler import Share, order_name, steps_per_epoch
from hpcdl.data.scale_warning import feature_scales
from hpcdl.data.schema import Schema
from hpcdl.data.standard import Standard, unit_of_targets
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Device

LABELS = 2**20  # labels that are read at once to count classes


class Split:
    """Training, test or validation rows, which every rank can read. numbers: of these rows in `source`; None: all."""

    def __init__(self, source: MemoryRows | FileRows, numbers: np.ndarray | None, dtype: np.dtype):
        self.source, self.numbers, self.dtype = source, numbers, dtype
        self.examples = len(source) if numbers is None else len(numbers)
        self.form = RowForm(source.width, dtype, source.y_kind, source.outputs, source.sparse)

    def rows(self, start: int, stop: int) -> tuple[Any, np.ndarray]:
        """Return new arrays of rows [start, stop): x (rows, features) or a CSR, scaled, in the model's type, and y."""
        return self.take(np.arange(start, stop))

    def take(self, index: ArrayLike) -> tuple[Any, np.ndarray]:
        """Return x and y of the rows with these numbers, as `rows` does; IndexError if a row does not exist."""
        index = np.array(index, np.int64)
        if len(index) and (index.min() < 0 or index.max() >= self.examples):
            raise IndexError(f"row numbers go from 0 to {self.examples - 1}, not {index.min()} to {index.max()}")
        x, y = self.form.empty(len(index))
        if len(index):
            self.source.gather(index if self.numbers is None else self.numbers[index], x, y)
        return x, y

    @property
    def labels(self) -> np.ndarray:
        """The labels of these rows. Local; it reads all of them."""
        y = self.source.y[()]  # type: ignore[index]
        return y if self.numbers is None else y[self.numbers]

    def class_counts(self, classes: int) -> np.ndarray:
        """Return the number of rows of each class. Local; it reads all labels. A label that is no class counts as the
        nearest one: training refuses it."""
        counts, source = np.zeros(classes, np.int64), self.source
        times = None if self.numbers is None else np.bincount(self.numbers, minlength=len(source))
        for part in chunks(len(source), -(-len(source) // LABELS)):
            y = np.clip(source.y[part], 0, classes - 1)  # type: ignore[index]
            counts += np.bincount(y, None if times is None else times[part], classes).astype(np.int64)
        return counts


class Data:
    """A data set, as `open_data` and `from_arrays` return it.

    features     shape of one example                     examples    training rows, all ranks
    classes      their number; 0: regression              outputs     shape of one target: () or (k,)
    sparse       True if x of batches is a CSR            dtype       of the model
    train, test, validation   Split, or None              digest      of all that a model sees (digest.py); lazy
    statistics   mean, deviation (features,) float64,     order       of the rows of an epoch (sampler.order_name)
                 of standardized rows                     source      name or path for `open_data`; empty for arrays
    schema       class names, scale, ... (schema.py)      vocabulary  of a text, else None"""

    source = ""
    mixture: Any = None  # a Mixture (mixture.py), if the rows are of several sources
    _reader: Any = None  # a Reader; None if other ranks read the rows
    device: Device

    def __init__(
        self,
        *,
        name: str,
        features: tuple[int, ...],
        classes: int,
        schema: Schema,
        dtype: np.dtype,
        train: Any,
        test: Any,
        held_out: np.ndarray,
        validation: Any = None,
        reader: Reader,
        threaded: bool | None = None,
        shares: list[Share] | None = None,
        resources: Sequence[Any] = (),
        order: str,
        digest: Callable[[], str],
    ):
        """train, test: rows (placement.py), test maybe None. held_out: numbers of the validation rows in `train`.
        validation: these rows; None: read from `train`. threaded: True to make batches in a thread; None: if rows are
        augmented or read from a file. shares: that this rank can take; None: all. resources: closed with the rows."""
        self.name, self.features, self.classes, self.dtype = name, features, classes, dtype
        self.schema, self.vocabulary = schema, schema.vocabulary
        self.train = Split(train, training_numbers(len(train), held_out), dtype)
        self.test = None if test is None else Split(test, None, dtype)
        self.validation = None
        if len(held_out):
            self.validation = Split(train, held_out, dtype) if validation is None else Split(validation, None, dtype)
        self.examples, self.device = self.train.examples, CPU
        self.statistics = train.standard.statistics if train.standard is not None else {}
        self.outputs, self.sparse = train.outputs, train.sparse
        self._reader, self._shares = reader, shares
        in_memory = isinstance(reader, MemoryReader) and reader.rows.augment is None
        self._threaded = not in_memory if threaded is None else threaded
        self._resources = [*resources, *(rows for rows in (train, test, validation) if rows is not None)]
        self._free: list[DeviceBuffers] = []
        self.order, self._make_digest = order, functools.cache(digest)

    @property
    def digest(self) -> str:
        """The digest of the data (digest.py). Local; the first access may read all rows."""
        return self._make_digest()

    def order_under(self, placement: str, partition: str, window: int) -> str:
        """Return the order of rows of ranks that read these data under a placement and with a --shuffle-window."""
        return order_name(placement, partition, self.classes, getattr(self.train.source, "block", 1), window)

    @property
    def unit(self) -> float | None:
        """As `unit_of_targets` gives it."""
        return unit_of_targets(self.statistics)

    @property
    def output_names(self) -> list[str]:
        """As `Schema.output_names` gives them."""
        return self.schema.output_names(self.outputs)

    @property
    def scales(self) -> tuple[float, float, float] | None:
        """Scales of features and targets (scale_warning.py); None for data that need no warning. Local."""
        return feature_scales(self)

    @property
    def class_counts(self) -> np.ndarray | None:
        """The number of training examples of each class; None for values and text. Local; it reads all labels."""
        return self.train.class_counts(self.classes) if self.classes and self.vocabulary is None else None

    def with_rows(self, drawn: np.ndarray) -> Self:
        """Return these data with the training examples `drawn` (numbers, which may repeat). Both data sets share the
        rows in memory, and `close` of one closes both. UsageError if the rows are not all in memory."""
        reader = self._reader
        if not isinstance(reader, MemoryReader) or reader.local:
            raise UsageError("bagging and boosting draw rows again: take --placement shared, without data servers")
        other, reader = self._copy(), reader.with_examples(drawn)
        other._reader, other.train = reader, Split(self.train.source, reader.numbers, self.dtype)
        other.examples = other.train.examples
        rows = blake(drawn.tobytes()).hexdigest()
        other._make_digest = functools.cache(lambda: blake(f"{self.digest} rows {rows}".encode()).hexdigest())
        return other

    def with_standard(self, standard: Standard) -> Self:
        """Return these data standardized by `standard`; rows and `close` are shared as by `with_rows`."""
        other, reader = self._copy(), copy.copy(self._reader)

        def standardized(rows: Any) -> Any:
            changed = copy.copy(rows)
            changed.standard = standard
            return changed

        parts = self.train, self.test, self.validation
        splits: Any = (part and Split(standardized(part.source), part.numbers, part.dtype) for part in parts)
        other.train, other.test, other.validation = splits
        reader.rows = standardized(reader.rows)
        other._reader, other.statistics = reader, standard.statistics
        return other

    def _copy(self) -> Self:
        other = copy.copy(self)
        other._free = []
        return other

    def to(self, device: Device) -> None:
        """Gather later batches on the host, and copy them to this device. Splits still return arrays of the host."""
        if device is not self.device:
            self.device = device
            self._free = []

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the number of batches of an epoch, ceil(examples / batch_size)."""
        if batch_size < 1:
            raise UsageError(f"the batch size must be 1 or more, not {batch_size}")
        return steps_per_epoch(self.examples, batch_size)

    def batches(self, epoch: int, batch_size: int, share: Share = (0, 1), start: int = 0) -> Iterator[Batch]:
        """Yield the share (rank, size) of the batches of an epoch, from step `start` on; earlier steps are not read.
        A batch is valid until the second next one is requested: its arrays are reused. With augmentation or placement
        streamed a thread makes the next batch while the caller uses this one; an error of the thread is raised here."""
        steps = self.steps_per_epoch(batch_size)
        if not 0 <= start <= steps:
            raise UsageError(f"an epoch of {steps} steps cannot start at step {start}")
        self._check(share)
        return self._batches(epoch, batch_size, share, range(start, steps))

    def cursor(
        self, batch_size: int, share: Share = (0, 1), ahead: bool = True, buffers: Callable[[int], Any] | None = None
    ) -> Cursor:
        """Return a cursor for the batches of `batches` in any order: cursor.take(epoch, step). ahead: use a thread as
        `batches` does; without it, steps out of sequence are faster. buffers(count) makes the `DeviceBuffers`."""
        self._check(share)
        ahead = ahead and self._threaded
        # A thread needs two more pairs than the two valid batches: one in the making, one made in vain before a jump.
        pairs = (buffers or self._buffers)(2 + 2 * ahead)
        return Cursor(self._reader, self.steps_per_epoch(batch_size), batch_size, share, ahead, pairs)

    def divide(self, count: int) -> list[np.ndarray]:
        """Return the sorted training examples of each of `count` clients, by the partition; a client may have none.
        count 0: one client per owner (column:NAME). Placement shared only. UsageError: too few examples or owners."""
        owners = self._reader.owners
        if owners is None and not 1 <= count <= self.examples:
            raise UsageError(f"{self.examples} training examples cannot be divided among {count} clients; take fewer")
        if owners is not None:
            known = len(np.unique(owners))
            if count not in (0, known):
                raise UsageError(f"the column holds {known} owners, not {count}; take {known} clients, or 0 for all")
            count = known
        return self._reader.divide(count)  # type: ignore[no-any-return]

    def visit(self, order: np.ndarray, batch_size: int) -> Iterator[Batch]:
        """Yield the training examples with these numbers, in this order, in batches of this rank alone.
        Placement shared only, without augmentation. Arrays are reused as by `batches`."""
        buffers = self._free.pop() if self._free else self._buffers(2)
        yield from map(buffers.hand_out, self._reader.visit(order, batch_size, buffers.host))
        self._free = [buffers]

    def in_place(self, epoch: int, share: Share = (0, 1)) -> tuple[MemoryRows, np.ndarray, np.ndarray]:
        """Return this rank's examples of an epoch without a copy, for kernels that read them: (rows, source, index).
        source: their numbers in `rows`, in the epoch's order (iid: chunk(examples, size, rank) of all ranks' order);
        index: numbers in the training set. `rows` holds x unscaled (`MemoryRows.gather`). UsageError: not in memory."""
        reader = self._check_in_memory(share)
        return reader.rows, *reader.in_order(epoch, share)

    def part_in_place(
        self, epoch: int, step: int, batch_size: int, share: Share = (0, 1)
    ) -> tuple[MemoryRows, np.ndarray, np.ndarray, int]:
        """Return (rows, source, index) for this rank's share of a batch, as `in_place`, and the whole batch's size."""
        reader = self._check_in_memory(share)
        return reader.rows, *reader.part_in_order(epoch, step, batch_size, share)

    @property
    def rows_in_memory(self) -> MemoryRows:
        """The rows that `in_place` returns; UsageError if they are not in memory."""
        return self._check_in_memory().rows

    def _check_in_memory(self, share: Share | None = None) -> MemoryReader:
        if not isinstance(self._reader, MemoryReader):
            todo = "take --placement shared or partitioned, without data servers"
            raise UsageError(f"this strategy needs its training rows in memory: {todo}")
        if share is not None:
            self._check(share)
        return self._reader

    def most_rows(self, batch_size: int, share: Share) -> int:
        """Return the largest number of rows that this share of a batch has."""
        self.steps_per_epoch(batch_size)
        self._check(share)
        return self._reader.most_rows(batch_size, share)

    def _check(self, share: Share) -> None:
        if not 0 <= share[0] < share[1]:
            raise UsageError(f"share {share} must be (rank, size), with a rank from 0 to size - 1")
        if self._shares is not None and tuple(share) not in self._shares:
            shares = ", ".join(map(str, self._shares))
            raise UsageError(f"placement partitioned: this rank holds the rows of share {shares}, not {share}")

    def _buffers(self, count: int) -> DeviceBuffers:
        return DeviceBuffers(self.device, count, self.train.form)

    def _batches(self, epoch: int, batch_size: int, share: Share, steps: range) -> Iterator[Batch]:
        # One pair of arrays for the current batch, one for the previous one; with a thread, one for the next one.
        buffers = self._free.pop() if self._free else self._buffers(2 + self._threaded)
        batches = self._reader.batches(epoch, batch_size, share, steps, buffers.host)
        yield from map(buffers.hand_out, prefetch(batches) if self._threaded else batches)
        self._free = [buffers]  # not when closed early: a thread may have gone ahead by one

    def close(self) -> None:
        """Free the memory and close the file: the data cannot be used afterwards. Collective if memory is shared."""
        while self._resources:
            self._resources.pop().close()
