"""A batch, a block of rows to predict, and the rotating buffers that batches are gathered into."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdl.chunks import chunks
from hpcdl.csr import CSR
from hpcdl.kernels.device import CPU, Array, Device


@dataclasses.dataclass(slots=True)
class Batch:
    """One rank's share of a batch; it may have no rows.

    x      (rows, features) in the model's type, C-contiguous, scaled; a CSR (hpcdl/csr.py) for sparse data
    y      (rows,) int64 class numbers, or targets (rows,) or (rows, outputs) in the model's type
    total  examples of the whole batch, over all ranks
    epoch, step (in the epoch), index (rows,): row numbers in the training set
    """

    x: Any
    y: Array
    total: int
    epoch: int
    step: int
    index: np.ndarray

    def split(self, parts: int) -> list["Batch"]:
        """Return the micro-batches chunks(rows, parts): views with the same total; some may have no rows."""
        return [
            Batch(self.x[part], self.y[part], self.total, self.epoch, self.step, self.index[part])
            for part in chunks(len(self.x), parts)
        ]


class RowBlock(NamedTuple):
    """Rows of a source that are to be predicted, encoded as features or in the model's form.

    x: (rows, features), maybe a CSR; numbers: (rows,) int64, in the source, from 0; y: class numbers of the model, or
    targets; ids: names of the rows. dropped: rows left out for missing values; filled: missing values filled in (texts
    by zeros); unseen: texts that the recipe does not know (zeros, too).
    """

    x: Any
    numbers: np.ndarray
    y: np.ndarray | None = None
    ids: list[str] | None = None
    dropped: int = 0
    filled: int = 0
    unseen: int = 0

    @property
    def examples(self) -> int:
        """The number of rows, by the name that a split uses."""
        return len(self.x)

    def rows(self, start: int, stop: int) -> tuple[Any, np.ndarray]:
        """Return x and y of rows start to stop, like a split."""
        assert self.y is not None
        return self.x[start:stop], self.y[start:stop]


class BatchBuffers:
    """`count` pairs of arrays (x, y), used in turn, so that an epoch allocates nothing after its first batches.

    empty(shape, dtype) allocates an array, on the host or a device. sparse: x is a CSR; its views share one element
    store, so that room that `gather` makes stays.
    """

    def __init__(
        self,
        count: int,
        width: int,
        dtype: np.dtype,
        y_dtype: np.dtype,
        empty: Callable[..., Array] = CPU.empty,
        outputs: tuple[int, ...] = (),
        sparse: bool = False,
    ):
        self.empty, self.sparse = empty, sparse
        self.turn, self.pairs = 0, [self._pair(0, width, dtype, outputs, y_dtype) for _ in range(count)]

    def _pair(self, rows: int, width: int, dtype: np.dtype, outputs: tuple[int, ...], y_dtype: np.dtype) -> tuple:
        x = CSR.empty(rows, width, dtype, empty=self.empty) if self.sparse else self.empty((rows, width), dtype)
        return x, self.empty((rows, *outputs), y_dtype)

    def next(self, rows: int) -> tuple[Any, Array]:
        """Return the first `rows` rows of the next pair, the least recently used one."""
        self.turn = (self.turn + 1) % len(self.pairs)
        x, y = self.pairs[self.turn]
        if len(y) < rows:
            x, y = self.pairs[self.turn] = self._pair(rows, x.shape[1], x.dtype, y.shape[1:], y.dtype)
        return x[:rows], y[:rows]


class DeviceBuffers:
    """Buffers for batches that are gathered on the host (`host`) and used on a device, which may be the host itself.

    count: pairs on the host; a GPU has two, one for the current batch and one for the previous one.
    """

    def __init__(
        self,
        device: Device,
        count: int,
        width: int,
        dtype: np.dtype,
        y_dtype: np.dtype,
        outputs: tuple[int, ...] = (),
        sparse: bool = False,
    ):
        self.device, self.host = device, BatchBuffers(count, width, dtype, y_dtype, device.pinned, outputs, sparse)
        self.copies = None if device is CPU else BatchBuffers(2, width, dtype, y_dtype, device.empty, outputs, sparse)

    def hand_out(self, batch: Batch) -> Batch:
        """Return the batch on the device: itself, or with x and y copied into the next pair there."""
        if self.copies is None:
            return batch
        x, y = self.copies.next(len(batch.y))
        if isinstance(x, CSR):
            x.copy_in(batch.x, self.device)
        else:
            self.device.copy_in(x, batch.x)
        self.device.copy_in(y, batch.y)
        return dataclasses.replace(batch, x=x, y=y)
