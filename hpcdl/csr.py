"""Compressed sparse rows (CSR), the form of sparse data sets and batches.

    row i       its nonzero elements               data[indptr[i] : indptr[i + 1]]
                and their columns, in order        indices[indptr[i] : indptr[i + 1]]
    shape       (rows, features)

    0 5 0 7      data     5 7 1        indptr  0 2 2 3
    0 0 0 0      indices  1 3 0
    1 0 0 0

Types are fixed: indices int32, indptr int64, data float32 or float64 for models. `x[a:b]` is a view: its indptr is a
slice of x.indptr, whose offsets refer to x.data and x.indices."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

COLUMN, START = np.dtype(np.int32), np.dtype(np.int64)  # types of indices and indptr
MOST_FEATURES = 2**31 - 1  # columns are numbered in int32


class Elements:
    """The arrays data and indices, shared by all views of the same rows; larger arrays may replace them.
    empty(shape, dtype): allocates arrays in host or device memory."""

    __slots__ = ("data", "empty", "indices")

    def __init__(self, data: np.ndarray, indices: np.ndarray, empty: Callable = np.empty):
        self.data, self.indices, self.empty = data, indices, empty


class CSR:
    """Sparse rows of shape (rows, features), with the attributes and methods of a numpy array that batches need."""

    __slots__ = ("elements", "indptr", "shape")
    ndim = 2

    def __init__(self, data: Any, indices: Any, indptr: Any, shape: tuple[int, int], elements: Any = None):
        self.elements = elements or Elements(data, indices)
        self.indptr, self.shape = indptr, shape

    @classmethod
    def empty(cls, rows: int, features: int, dtype: DTypeLike, capacity: int = 0, empty: Callable = np.empty) -> "CSR":
        """Return rows without elements. capacity: elements to allocate; `put` adds more. empty: as in `Elements`."""
        elements = Elements(empty(capacity, np.dtype(dtype)), empty(capacity, COLUMN), empty)
        made = cls(None, None, empty(rows + 1, START), (rows, features), elements)
        made.indptr[:] = 0
        return made

    @classmethod
    def of(cls, x: Any) -> "CSR":
        """Convert a dense array (rows, features) or a scipy.sparse matrix, whose duplicate elements are summed."""
        if isinstance(x, CSR):
            return x
        if hasattr(x, "tocsr"):
            x = x.tocsr()
            if not x.has_canonical_format:
                x = x.copy()
                x.sum_duplicates()
            return cls(x.data, x.indices.astype(COLUMN, copy=False), x.indptr.astype(START, copy=False), x.shape)
        x = np.asarray(x)
        row, column = np.nonzero(x)
        indptr = np.searchsorted(row, np.arange(len(x) + 1)).astype(START)
        return cls(x[row, column], column.astype(COLUMN), indptr, (x.shape[0], x.shape[1]))

    @property
    def data(self) -> Any:
        """The elements of all rows that share the arrays, not only of these rows."""
        return self.elements.data

    @property
    def indices(self) -> Any:
        """The column of each element of `data`."""
        return self.elements.indices

    @property
    def dtype(self) -> np.dtype:
        """The type of the elements."""
        return self.elements.data.dtype

    @property
    def nnz(self) -> int:
        """The number of stored elements of these rows."""
        return self.part.stop - self.part.start

    @property
    def part(self) -> slice:
        """The slice of these rows' elements in data and indices."""
        starts = self.indptr.get() if hasattr(self.indptr, "get") else self.indptr  # CuPy arrays have `get`
        return slice(int(starts[0]), int(starts[-1]))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> "CSR":
        """Return a view of consecutive rows."""
        start, stop, step = part.indices(self.shape[0])
        if step != 1:
            raise IndexError(f"sparse rows can only be sliced in steps of 1, not {step}")
        stop = max(start, stop)
        indptr = self.indptr[start : stop + 1]
        return CSR(None, None, indptr, (stop - start, self.shape[1]), self.elements)

    def reserve(self, capacity: int) -> None:
        """Grow the capacity to `capacity` elements for all views of the same rows; the contents are kept."""
        old = self.elements
        if old.data.size < capacity:
            capacity = max(capacity, old.data.size * 3 // 2)
            data, indices = old.empty(capacity, old.data.dtype), old.empty(capacity, COLUMN)
            data[: old.data.size], indices[: old.indices.size] = old.data, old.indices
            old.data, old.indices = data, indices

    def copy_in(self, host: "CSR", device: Any) -> None:
        """Copy the rows of `host` into these rows on a device, equal in number; grow the capacity if necessary."""
        part, nnz = host.part, host.nnz
        self.reserve(nnz)
        device.copy_in(self.data[:nnz], host.data[part])
        device.copy_in(self.indices[:nnz], host.indices[part])
        device.copy_in(self.indptr, host.indptr - part.start)

    def copy(self) -> "CSR":
        part = self.part
        return CSR(self.data[part].copy(), self.indices[part].copy(), self.indptr - part.start, self.shape)

    def take(self, index: np.ndarray) -> "CSR":
        """Return a copy of the rows with these numbers."""
        lengths = self.indptr[index + 1] - self.indptr[index]
        indptr = np.zeros(len(index) + 1, START)
        np.cumsum(lengths, out=indptr[1:])
        which = np.repeat(self.indptr[index] - indptr[:-1], lengths) + np.arange(indptr[-1])
        return CSR(self.data[which], self.indices[which], indptr, (len(index), self.shape[1]))

    def put(self, rows: "CSR") -> None:
        """Overwrite these rows with `rows`, equal in number and type; grow the capacity if necessary."""
        part, to = rows.part, int(self.indptr[0])
        here = slice(to, to + rows.nnz)
        self.reserve(here.stop)
        self.data[here], self.indices[here] = rows.data[part], rows.indices[part]
        self.indptr[1:] = rows.indptr[1:] - part.start + to

    @classmethod
    def joined(cls, parts: "list[CSR]") -> "CSR":
        """Return the concatenated rows of one or more parts."""
        made = cls.empty(sum(map(len, parts)), parts[0].shape[1], parts[0].dtype, sum(part.nnz for part in parts))
        at = 0
        for part in parts:
            made[at : at + len(part)].put(part)
            at += len(part)
        return made

    def dense(self) -> np.ndarray:
        """Return the dense array (rows, features)."""
        out = np.zeros(self.shape, self.dtype)
        rows = np.repeat(np.arange(len(self)), np.diff(self.indptr))
        out[rows, self.indices[self.part]] = self.data[self.part]
        return out


def on(device: Any, x: Any) -> Any:
    """Return rows, sparse or dense, on a device (hpcdl.kernels.device)."""
    if not isinstance(x, CSR):
        return device.array(x)
    return CSR(device.array(x.data), device.array(x.indices), device.array(x.indptr), x.shape)
