"""A batch, rows to predict in blocks, and the rotating buffers that batches are gathered into."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hpcdl.chunks import chunks
from hpcdl.csr import CSR, START
from hpcdl.data.hdf5 import SLAB_BYTES
from hpcdl.data.schema import Schema
from hpcdl.kernels.device import CPU, Array, Device

BLOCK_ROWS = 8192  # rows of a block to predict, at most


@dataclasses.dataclass(slots=True)
class Batch:
    """One rank's share of a batch; it may have no rows.

    x      (rows, features) in the model's type, C-contiguous, scaled; a CSR (hpcdl/csr.py) for sparse data
    y      (rows,) int64 class numbers, or targets (rows,) or (rows, outputs) in the model's type
    total  examples of the whole batch, over all ranks
    epoch, step: numbers of the epoch and of the step in it; index (rows,): numbers of the rows in the training set"""

    x: Any
    y: Array
    total: int
    epoch: int
    step: int
    index: np.ndarray

    def split(self, parts: int) -> list["Batch"]:
        """Return `parts` micro-batches, cut by `chunks`, as views that keep the total; some may have no rows."""
        about, cut = (self.total, self.epoch, self.step), chunks(len(self.x), parts)
        return [Batch(self.x[part], self.y[part], *about, self.index[part]) for part in cut]


class RowBlock(NamedTuple):
    """A block of rows to predict. x: raw features, or these in the form of a model. `rows` does as `Split.rows`."""

    x: Any  # (rows, features), maybe a CSR
    numbers: np.ndarray  # (rows,) int64: row numbers in the source, from 0
    y: np.ndarray | None = None  # class numbers of the model, or targets; None: no labels
    ids: list[str] | None = None  # names of the rows; None: no names
    reasons: list[str] | None = None  # for each row why it has no answer, "" if it has one; None: all have one
    filled: int = 0  # number of missing values filled in (texts by zeros)
    unseen: int = 0  # number of texts that the recipe does not have; their features are 0

    @property
    def examples(self) -> int:
        return len(self.x)

    @property
    def counts(self) -> list[int]:
        """How many rows have an answer, how many have none; values filled in, unseen texts."""
        refused = 0 if self.reasons is None else sum(map(bool, self.reasons))
        return [len(self.x) - refused, refused, self.filled, self.unseen]

    def rows(self, start: int, stop: int) -> tuple[Any, np.ndarray]:
        assert self.y is not None
        return self.x[start:stop], self.y[start:stop]


class PredictionRows(NamedTuple):
    """Rows to predict."""

    name: str  # of the source, for messages
    blocks: Callable[[], Iterator[Callable[[], RowBlock]]]  # yields a parser for each block
    labelled: bool = False  # True if rows have a y
    ids: bool = False  # True if rows have ids
    reasons: bool = False  # True if rows may be such as the model cannot take
    features: tuple[int, ...] = ()  # shape of a row
    schema: Schema = Schema()  # of the data; of a table or an array the default
    group: str = ""  # of the data file, or "" for other sources


def in_blocks(
    load: Callable[[slice], RowBlock], rows: int, features: tuple[int, ...], ranks: int, nnz: int | None = None
) -> Iterator[Callable[[], RowBlock]]:
    """Yield for each block of range(rows) a function that loads it. Ranks take turns. nnz: elements of sparse rows."""
    row = 8 * math.prod(features) if nnz is None else START.itemsize + 16 * nnz / max(1, rows)
    most = max(1, min(BLOCK_ROWS, int(SLAB_BYTES / row), -(-rows // ranks)))
    for start in range(0, rows, most):
        yield partial(load, slice(start, min(start + most, rows)))


class RowForm(NamedTuple):
    """The types and shapes of rows."""

    width: int  # number of features
    dtype: np.dtype  # of x
    y_dtype: np.dtype
    outputs: tuple[int, ...] = ()  # shape of a row's y
    sparse: bool = False  # True if x is a CSR

    def empty(self, rows: int, empty: Callable[..., Array] = CPU.empty) -> tuple[Any, Array]:
        """Return arrays for x and y, allocated by empty(shape, dtype); a sparse x grows as it is filled."""
        x: Any = CSR.empty(rows, self.width, self.dtype, empty=empty) if self.sparse else None
        y = empty((rows, *self.outputs), self.y_dtype)
        return empty((rows, self.width), self.dtype) if x is None else x, y


class BatchBuffers:
    """`count` pairs of arrays (x, y), used in turn, so that an epoch allocates nothing after its first batches.
    empty(shape, dtype): allocator on the host or a device. A sparse x keeps the room that `gather` has added."""

    def __init__(self, count: int, form: RowForm, empty: Callable[..., Array] = CPU.empty):
        self.form, self.allocate, self.turn = form, empty, 0
        self.pairs = [form.empty(0, empty) for _ in range(count)]

    def next(self, rows: int) -> tuple[Any, Array]:
        """Return the first `rows` rows of the next pair, the least recently used one."""
        self.turn = (self.turn + 1) % len(self.pairs)
        if len(self.pairs[self.turn][1]) < rows:
            self.pairs[self.turn] = self.form.empty(rows, self.allocate)
        x, y = self.pairs[self.turn]
        return x[:rows], y[:rows]


class DeviceBuffers:
    """`count` pairs of arrays on the host (`host`) to gather batches into, and 2 on the device, if that is another."""

    def __init__(self, device: Device, count: int, form: RowForm):
        self.device, self.host = device, BatchBuffers(count, form, device.pinned)
        self.copies = None if device is CPU else BatchBuffers(2, form, device.empty)

    def hand_out(self, batch: Batch) -> Batch:
        """Return the batch on the device: unchanged on the host, else with x and y copied into its next pair."""
        if self.copies is None:
            return batch
        x, y = self.copies.next(len(batch.y))
        if isinstance(x, CSR):
            x.copy_in(batch.x, self.device)
        else:
            self.device.copy_in(x, batch.x)
        self.device.copy_in(y, batch.y)
        return dataclasses.replace(batch, x=x, y=y)
