"""Sparse rows in a data file: x is a group that holds them as CSR (hpcdl/csr.py), not a data set.

    train/x/data      (elements,)   the nonzero elements, row after row; integers or floats
    train/x/indices   (elements,)   their columns, from 0, ascending within a row; int32 (other integers are read, too)
    train/x/indptr    (rows + 1,)   the start of each row among the elements, and the end of the last one; int64
    train/x, attribute features     the number of columns

A file is checked as it is read, in slabs of about SLAB_BYTES: row starts ascend, a row's columns exist and ascend."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from hpcdl.csr import COLUMN, CSR, MOST_FEATURES, START
from hpcdl.data import hdf5
from hpcdl.data.hdf5 import DataFile, check_x, dataset, follow_links, shown
from hpcdl.data.shards import JoinedGroup, JoinedSet
from hpcdl.errors import UsageError

PARTS = ("data", "indices", "indptr")
TYPES = {"indices": COLUMN, "indptr": START}  # in memory, for any integers in the file
GROUP_TYPES = (h5py.Group, JoinedGroup)
CHUNK = 1 << 16  # elements of an HDF5 chunk: data, indices and indptr grow while they are written


class SparseSet:
    """Sparse rows in a file, with the interface of an h5py data set: dtype (of data), shape (rows, features), nnz."""

    def __init__(self, file: DataFile, name: str):
        """Check the structure, not the elements; UsageError if it is invalid."""
        self.where = f"{file.filename}: {name}"
        columns = {part: dataset(file, f"{name}/{part}") for part in PARTS}
        self.data, self.indices, self.indptr = columns.values()
        for part, column in columns.items():
            if column.dtype.kind not in ("iuf" if part == "data" else "iu") or len(column.shape or ()) != 1:
                what = "numbers" if part == "data" else "whole numbers"
                problem = f"{shown(column.dtype)} of shape {column.shape}"
                raise UsageError(f"{self.where}/{part} is {problem}; for sparse rows it must be {what} (elements,)")
        if not len(self.indptr):
            raise UsageError(f"{self.where}/indptr has shape (0,); it must be (rows + 1,): where rows begin and end")
        self.nnz, rows = len(self.data), len(self.indptr) - 1
        self.bounds = [0, rows]  # of the rows of shards
        if isinstance(self.indptr, JoinedSet):
            self.bounds[1:] = (self.indptr.bounds[1:] - 1).tolist()
        if len(self.indices) != self.nnz:
            lengths = f"{self.nnz} elements, but {len(self.indices)} columns in indices"
            raise UsageError(f"{self.where} has {lengths}; each element must have one column")
        for part, column in columns.items():
            if (
                isinstance(column, h5py.Dataset) and len(column) and not column.id.get_storage_size()
            ):  # a damaged file may claim any shape
                raise UsageError(f"{self.where}/{part} has shape {column.shape}, but nothing was ever written into it")
        features = follow_links(file, name).attrs.get("features")
        if not isinstance(features, (int, np.integer)) or not 1 <= features <= MOST_FEATURES:
            problem = "is missing" if features is None else f"is {shown(features)}"
            what = "it is the number of columns, 1 to 2^31 - 1"
            raise UsageError(f"{self.where}: its attribute features {problem}; {what}")
        self.shape, self.dtype = (rows, int(features)), self.data.dtype
        if (int(self.indptr[0]), int(self.indptr[rows])) != (0, self.nnz):
            raise UsageError(f"{self.where}/indptr should go from 0 to {self.nnz}, the number of elements")

    def __len__(self) -> int:
        return self.shape[0]

    def place(self, row: int) -> tuple[str, int]:
        """Return the name of these rows for a message, and the number of a row: of a folder, those of the shard."""
        if not isinstance(self.indptr, JoinedSet):
            return self.where, row
        path, row = self.indptr.place(row)
        return f"{path}: {self.indptr.name.removesuffix('/indptr')}", row

    def starts(self, first: int, last: int) -> np.ndarray:
        """Return the starts of rows first to last - 1 and the end of the last row, int64; UsageError if invalid."""
        starts = np.empty(last - first + 1, START)
        self.indptr.read_direct(starts, np.s_[first : last + 1])
        falls = np.diff(starts) < 0
        if falls.any() or starts[0] < 0 or starts[-1] > self.nnz:
            where, row = self.place(first + int(np.argmax(falls)) if falls.any() else first)
            raise UsageError(f"{where}/indptr does not rise from 0 to {self.nnz}: look at row {row}")
        return starts

    def spans(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (slice of rows of one shard, their `starts`) for all rows, with SLAB_BYTES of starts at a time."""
        for first, last in itertools.pairwise(self.bounds):
            for part in hdf5.slabs(last - first, START.itemsize):
                rows = slice(first + part.start, first + part.stop)
                yield rows, self.starts(rows.start, rows.stop)

    def slabs(self, most: int) -> Iterator[slice]:
        """Yield slices that together are all rows, of one shard each and of at most `most` elements, or a row."""
        for part, starts in self.spans():
            at = 0
            while at < part.stop - part.start:
                end = int(np.searchsorted(starts, starts[at] + most, side="right")) - 1
                end = min(max(end, at + 1), part.stop - part.start)
                yield slice(part.start + at, part.start + end)
                at = end

    def read(self, first: int, last: int, into: CSR, most: float = math.inf) -> None:
        """Read rows first to last - 1 into the rows of `into`, from the start of its first row; `into` grows as needed.
        UsageError for columns that are out of order or do not exist, NaN, infinity, or a number beyond `most`."""
        starts = self.starts(first, last)
        begin, end, to = int(starts[0]), int(starts[-1]), int(into.indptr[0])
        into.reserve(to + end - begin)
        into.indptr[1:] = starts[1:] - begin + to
        part = slice(to, to + end - begin)
        if begin < end:
            self.data.read_direct(into.data[part], np.s_[begin:end])
            self.indices.read_direct(into.indices[part], np.s_[begin:end])
        where, first = self.place(first)
        check_columns(into.indices[part], starts - begin, self.shape[1], where, first)
        check_elements(into.data[part], starts - begin, where, first, most)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of elements of each of the sorted `rows`."""
        result = [np.empty(0, START)]
        for part, starts in self.spans():
            a, b = np.searchsorted(rows, (part.start, part.stop))
            result.append(np.diff(starts)[rows[a:b] - part.start])
        return np.concatenate(result)

    def most_elements(self, rows: int) -> int:
        """Return the most elements that any `rows` rows have together."""
        largest = np.empty(0, START)
        for _, starts in self.spans():
            largest = largest_lengths(np.concatenate([largest, np.diff(starts)]), rows)
        return int(largest.sum())

    def block(self, row_most: int) -> tuple[int, int]:
        """Return (rows, most elements) of blocks of at most 2 SLAB_BYTES, or one row. row_most: bytes of an element."""
        row = max(1, row_most * self.nnz // max(1, len(self)))
        block = max(1, min(len(self), hdf5.SLAB_BYTES // row))
        while True:
            shards = itertools.pairwise(self.bounds)
            slabs = ((a, slab) for a, b in shards for slab in hdf5.slabs(b - a, START.itemsize, block))
            starts = (self.starts(first + slab.start, first + slab.stop) for first, slab in slabs)
            most = max((int(np.diff(np.append(each[:-1:block], each[-1])).max()) for each in starts), default=0)
            if block == 1 or most * row_most <= 2 * hdf5.SLAB_BYTES:
                return block, most
            block = max(1, block // 2)


def open_rows(file: DataFile, name: str) -> Any:
    """Return the rows called `name` (as "train/x"): a data set of HDF5, or a SparseSet if they are sparse."""
    return SparseSet(file, name) if isinstance(follow_links(file, name), GROUP_TYPES) else dataset(file, name)


def largest_lengths(lengths: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` largest lengths."""
    return lengths if len(lengths) <= count else np.partition(lengths, len(lengths) - count)[len(lengths) - count :]


def check_columns(columns: np.ndarray, starts: np.ndarray, width: int, where: str, first: int = 0) -> None:
    """Raise UsageError unless each row's columns exist and ascend. starts: of rows. first: number of the first row."""
    if len(columns) and (columns.min() < 0 or columns.max() >= width):
        raise UsageError(f"{where} has a column outside of 0 to {width - 1}")
    rises = columns[1:] > columns[:-1]
    inner = starts[(starts > 0) & (starts < len(columns))]
    rises[inner - 1] = True  # columns may fall from one row to the next
    if not rises.all():
        row = first + int(np.searchsorted(starts, int(np.argmin(rises)) + 1, side="right")) - 1
        raise UsageError(f"{where}: the columns of row {row} do not ascend; sort them, each once")


def sparse_rows(x: Any, suffix: str = "") -> CSR:
    """Return a checked CSR made of a CSR or a matrix of scipy.sparse; UsageError if it is invalid."""
    if x.shape[1] > MOST_FEATURES:
        raise UsageError(f"x{suffix} has {x.shape[1]} columns; sparse rows have {MOST_FEATURES} at most")
    rows = CSR.of(x)
    starts, columns = rows.indptr, rows.indices
    if len(starts) != len(rows) + 1 or starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > len(columns):
        raise UsageError(f"x{suffix}: indptr does not cut its elements into {len(rows)} rows")
    check_columns(columns[: starts[-1]], starts, rows.shape[1], f"x{suffix}")
    return rows


class RowLookup:
    """Maps an element to the number of its row. The rows, numbered from `first`, begin at the elements `starts`."""

    def __init__(self, starts: np.ndarray, first: int = 0):
        self.starts, self.first = starts, first

    def __getitem__(self, element: Any) -> int:
        return self.first + int(np.searchsorted(self.starts, element, side="right")) - 1


def check_elements(data: np.ndarray, starts: np.ndarray, where: str, first: int = 0, most: float = math.inf) -> None:
    """Raise UsageError, like `check_x`, for elements that are not finite, or beyond `most`."""
    check_x(data[:, None], where, RowLookup(starts, first), most=most)


def slab_elements(kind: np.dtype) -> int:
    """Return the number of elements of this type that take SLAB_BYTES, with their columns."""
    return max(1, hdf5.SLAB_BYTES // (kind.itemsize + COLUMN.itemsize))


class SparseWriter:
    """Writes sparse rows into a new file part by part; the number of rows may be unknown at the start."""

    def __init__(self, file: h5py.File, name: str, features: int, kind: np.dtype, compress: dict[str, Any]):
        group = file.create_group(name)
        group.attrs["features"] = features
        kinds = dict(zip(PARTS, (kind, COLUMN, START), strict=True))
        how = {"chunks": (CHUNK,), "maxshape": (None,), **compress}
        self.parts = {part: group.create_dataset(part, (0,), kinds[part], **how) for part in PARTS}
        self.rows = 0
        self._append("indptr", np.zeros(1, START))

    def append(self, rows: CSR) -> dict[str, np.ndarray]:
        """Append the next rows; return the values appended to each data set, for the digest."""
        written, part = self.parts["data"], rows.part
        data, starts = rows.data[part].astype(written.dtype, copy=False), rows.indptr[1:] - part.start + len(written)
        added = {"data": data, "indices": rows.indices[part], "indptr": starts}
        for name, values in added.items():
            self._append(name, values)
        added["indptr"] = starts if self.rows else np.append(START.type(0), starts)
        self.rows += len(rows)
        return added

    def _append(self, name: str, values: np.ndarray) -> None:
        into = self.parts[name]
        at = len(into)
        into.resize(at + len(values), axis=0)
        into[at:] = values
