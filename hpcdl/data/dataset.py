"""A data set as a training run sees it: shared batches for training, plain rows for scoring."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hpcdl.csr import CSR
from hpcdl.data.batch import Batch, DeviceBuffers
from hpcdl.data.cursor import Cursor
from hpcdl.data.formats.vocabulary import Vocabulary
from hpcdl.data.placement import FileRows, MemoryRows
from hpcdl.data.prefetch import prefetch
from hpcdl.data.readers import MemoryReader, Reader
from hpcdl.data.sampler import steps_per_epoch
from hpcdl.data.scale_warning import scales
from hpcdl.data.schema import Meaning
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Device


class Split:
    """Some rows of a data set (training, test or validation), all of which every rank can read."""

    def __init__(self, source: MemoryRows | FileRows, numbers: np.ndarray | None, dtype: np.dtype):
        self.source, self.numbers, self.dtype = source, numbers, dtype
        self.examples = len(source) if numbers is None else len(numbers)

    def rows(self, start: int, stop: int) -> tuple[Any, np.ndarray]:
        """Rows start to stop: new arrays x (rows, features), scaled and in the model's type, and y (rows,).

        Of sparse data, x is a CSR (hpcdl/csr.py).
        """
        return self.take(np.arange(start, stop))

    def take(self, index: ArrayLike) -> tuple[Any, np.ndarray]:
        """The rows with these numbers, as `rows`; IndexError if one does not exist."""
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

    name, features (shape of one example), sparse (whether x of batches is a CSR), classes (0: regression), outputs
    (shape of what is to be predicted for a row: () or (k,)), dtype, examples (training rows, all ranks), train, test,
    validation (Split, or None where there is none), statistics (mean and deviation by name (features,), float64, where
    rows are standardized), meaning (names of classes, scale and more: schema.py), vocabulary (of a text: `encode` and
    `decode`; else None), digest (of all that a model sees; computed when it is asked for, see digest.py), order (of the
    rows of an epoch: see order.named), source (by what `open_data` finds them again; empty where they are arrays of a
    program)
    """

    source = ""
    meaning: Meaning
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
        meaning: Meaning,
        order: str,
        digest: Callable[[], str],
    ):
        self.name, self.features, self.classes, self.dtype = name, features, classes, train.dtype
        self.train, self.test, self.validation = train, test, validation
        self.examples, self.meaning = train.examples, meaning
        self.device: Device = CPU
        self.statistics = train.source.standard.statistics if train.source.standard is not None else {}
        self._reader, self._threaded, self._shares, self._resources = reader, threaded, shares, resources
        self._free: list[DeviceBuffers] = []
        self.order, self._make_digest = order, digest
        self._digest: str | None = None
        self.outputs, self.sparse = train.source.outputs, train.source.sparse

    @property
    def vocabulary(self) -> Vocabulary | None:
        """What tokens stand for, of a text; else None."""
        return self.meaning.vocabulary

    @property
    def digest(self) -> str:
        """What tells these data from others of the same name and shape; local, and a pass over them the first time."""
        if self._digest is None:
            self._digest = self._make_digest()
        return self._digest

    @property
    def unit(self) -> float:
        """What a difference of 1 between predictions means, where one value is predicted and standardized; else 1."""
        deviation = self.statistics.get("target_deviation", np.ones(1))
        return float(deviation[0]) if len(deviation) == 1 else 1.0

    @property
    def scales(self) -> tuple[float, float, float] | None:
        """Scales of features and values, where they matter (scale_warning.py); local."""
        return scales(self)

    def to(self, device: Device) -> None:
        """From now on batches come on this device (hpcdl.kernels.device): gathered on the host, then copied there.

        On a GPU they are gathered in pinned memory, from which copies are fastest. `rows` and `take` stay on the host.
        """
        if device is not self.device:
            self.device = device
            self._free = []

    def steps_per_epoch(self, batch_size: int) -> int:
        """The number of batches of an epoch, ceil(examples / batch_size)."""
        if batch_size < 1:
            raise UsageError(f"the batch size must be 1 or more, not {batch_size}")
        return steps_per_epoch(self.examples, batch_size)

    def batches(self, epoch: int, batch_size: int, share: tuple[int, int] = (0, 1), start: int = 0) -> Iterator[Batch]:
        """This rank's share (rank, size) of the batches of an epoch, from step `start` on.

        A batch is valid until the next but one is asked for: its arrays are then used again. Steps that are left out
        by `start` are not read. With augmentation or placement streamed the next batch is made by a background
        thread while this one is used; an error there is raised here.
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
        """The same batches one by one: cursor.take(epoch, step), any step after any other.

        ahead: by a background thread where `batches` has one. Without, steps that are not in sequence are faster.
        buffers: a function that makes the `DeviceBuffers` to use, so many.
        """
        self._check(share)
        ahead = ahead and self._threaded
        # With a thread, two more than those that are valid: one is being made, one was made before a jump for nothing.
        made = (buffers or self._buffers)(2 + 2 * ahead)
        return Cursor(self._reader, self.steps_per_epoch(batch_size), batch_size, share, ahead, made)

    def divide(self, count: int) -> list[np.ndarray]:
        """The training examples of each of `count` clients, sorted numbers, by the partition the data were opened with.

        count 0: as many as there are owners in the column of the partition column:NAME. A client may have none. Every
        rank holds every row: placement shared only. UsageError where there are too few examples, or other owners.
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
        """The training examples with these numbers in this order, in batches that no other rank has a part of.

        Placement shared only, and without augmentation. Arrays are used again as by `batches`.
        """
        buffers = self._free.pop() if self._free else self._buffers(2)
        yield from map(buffers.hand_out, self._in_memory.visit(order, batch_size, buffers.host))
        self._free = [buffers]

    def in_place(self, epoch: int, share: tuple[int, int] = (0, 1)) -> tuple[MemoryRows, np.ndarray, np.ndarray]:
        """This rank's examples of an epoch where they lie, for kernels that read them there: (rows, source, index).

        source: the rows of `rows` in the order of the epoch; index: their numbers in the training set. Of the partition
        iid, whose epochs are in one order for all ranks, this rank's is the part `chunk(examples, size, rank)` of it.
        `rows` has x as it is held, not scaled: see `MemoryRows.gather`. UsageError where no rows are in memory.
        """
        self._check_in_memory(share)
        return self._in_memory.rows, *self._in_memory.in_order(epoch, share)

    def part_in_place(
        self, epoch: int, step: int, batch_size: int, share: tuple[int, int] = (0, 1)
    ) -> tuple[MemoryRows, np.ndarray, np.ndarray, int]:
        """The examples of this rank's share of a batch where they lie: (rows, source, index, examples of all ranks).

        They are those that `batches` gives; the rest as in `in_place`.
        """
        self._check_in_memory(share)
        return self._in_memory.rows, *self._in_memory.part_in_order(epoch, step, batch_size, share)

    @property
    def rows_in_memory(self) -> MemoryRows:
        """The rows that `in_place` speaks of; UsageError where there are none."""
        self._check_in_memory()
        return self._in_memory.rows

    def _check_in_memory(self, share: tuple[int, int] | None = None) -> None:
        if not isinstance(getattr(self, "_reader", None), MemoryReader):
            raise UsageError(
                "this needs its training rows in memory: --placement shared or partitioned, no data servers"
            )
        if share is not None:
            self._check(share)

    def most_rows(self, batch_size: int, share: tuple[int, int]) -> int:
        """No batch of this share has more rows."""
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
            held = ", ".join(map(str, self._shares))
            raise UsageError(f"placement partitioned: this rank holds the rows of share {held}, not {share}")

    def _buffers(self, count: int) -> DeviceBuffers:
        rows = self.train.source
        return DeviceBuffers(self.device, count, rows.width, self.dtype, rows.y_kind, rows.outputs, self.sparse)

    def _batches(self, epoch: int, batch_size: int, share: tuple[int, int], steps: range) -> Iterator[Batch]:
        # One pair of arrays for the batch in use, one for the batch before it; with a thread, one for the batch ahead.
        buffers = self._free.pop() if self._free else self._buffers(2 + self._threaded)
        made = self._reader.batches(epoch, batch_size, share, steps, buffers.host)
        yield from map(buffers.hand_out, prefetch(made) if self._threaded else made)
        self._free = [buffers]  # not when closed early: a thread may have gone ahead by one

    def close(self) -> None:
        """Collective where memory is shared: let it go, and close the file. The data cannot be used afterwards.

        Without it both last until the program ends.
        """
        while self._resources:
            self._resources.pop().close()
