"""Placement of rows while training: in shared memory, in each rank's memory, or in the file; one interface for all.

    placement     train rows                                 memory per rank            reads of the file
    shared        one copy per node, in memory that its      rows / ranks of the node   once, by one rank per node
                  ranks share (hpcdl/shared_memory.py)
    partitioned   each rank holds its own rows only          rows / ranks               once, by every rank
    streamed      in the file                                two blocks                 every epoch

`rows.gather(index, x, y, moves=None)` writes scale * rows[index] into x (standardized on request) and their labels
into y, for every source. Memory keeps the file's own type (a byte per pixel); only floats wider than the model's are
narrowed. Labels become int64, targets the model's type.
"""

import contextlib
import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from hpcdl.csr import COLUMN, CSR, START
from hpcdl.data.augment import Augment, Moves
from hpcdl.data.digest import file_signature
from hpcdl.data.fills import Refill
from hpcdl.data.format import Info, owner_columns, row_notes
from hpcdl.data.formats.sparse_file import largest_lengths, open_rows, read_sparse
from hpcdl.data.hdf5 import check_memory, check_x, check_y, dataset, largest_input, open_file, slabs_of
from hpcdl.data.standard import Standard
from hpcdl.errors import UsageError, blamed_on
from hpcdl.kernels.gather import gather, gather_images
from hpcdl.kernels.sparse import gather_sparse
from hpcdl.shared_memory import share

if TYPE_CHECKING:
    from mpi4py import MPI  # its import starts MPI, which preparing a file does not need

Comm: TypeAlias = "MPI.Intracomm | None"
Rows = TypeVar("Rows")  # MemoryRows, FileRows, or others with a member `standard`


def memory_type(kind: np.dtype, dtype: np.dtype) -> np.dtype:
    """Return the type of x in memory: its own, for floats float32 or the model's dtype (kernels know no float16)."""
    if kind.kind != "f":
        return kind.newbyteorder("=")
    return np.dtype(np.float32) if kind.itemsize <= 4 else dtype


class MemoryRows:
    """Rows in memory: read-only views x (rows, features), y (rows,) or (rows, outputs).

    If x is sparse, `gather` writes into a sparse x, from the start of its first row.
    """

    def __init__(
        self,
        x: Any,
        y: np.ndarray,
        scale: float,
        dtype: np.dtype,
        augment: Augment | None = None,
        standard: Standard | None = None,
    ):
        self.sparse = isinstance(x, CSR)
        self.x, self.y, self.scale, self.standard = read_only_view(x), y, scale, standard
        self.width, self.y_kind, self.outputs = x.shape[1], y.dtype, y.shape[1:]
        self.augment, self.image = augment, augment.image if augment else ()
        self.gather_dense, self.gather_moved = gather[dtype.name], gather_images[dtype.name]
        self.gather_sparse = gather_sparse[dtype.name]

    def __len__(self) -> int:
        return len(self.y)

    def gather(self, index: np.ndarray, x: Any, y: np.ndarray, moves: Moves | None = None) -> None:
        """x[:] = scale * rows[index], moved, then standardized; y[:] = labels[index]. index (int64) is not checked."""
        if self.sparse:
            lengths = self.x.indptr[index + 1] - self.x.indptr[index]
            x.reserve(int(x.indptr[0] + lengths.sum()))
            self.gather_sparse(
                self.x.data, self.x.indices, self.x.indptr, index, self.scale, x.data, x.indices, x.indptr
            )
        elif moves is None:
            self.gather_dense(self.x, index, self.scale, x)
        else:
            self.gather_moved(self.x, index, self.scale, *self.image, *moves, x)
        if self.standard is not None:
            self.standard.apply(x)
        self.y.take(index, axis=0, out=y, mode="clip")  # any other mode makes take() copy
        if self.standard is not None:
            self.standard.apply_target(y)

    def most_elements(self, rows: int) -> int:
        """Return the most elements that any `rows` rows have together; sparse rows only."""
        return int(largest_lengths(np.diff(self.x.indptr), rows).sum())

    def close(self) -> None:
        """Drop the arrays: later uses raise an error instead of reading freed memory."""
        self.x = self.y = None  # type: ignore[assignment]


def standardized(rows: Rows, standard: Standard | None) -> Rows:
    """Return the same rows, standardized otherwise."""
    other: Any = copy.copy(rows)
    other.standard = standard
    return other  # type: ignore[no-any-return]


def read_only_view(x: Any) -> Any:
    """Return a read-only view of rows."""
    if isinstance(x, CSR):
        return CSR(read_only_view(x.data), read_only_view(x.indices), read_only_view(x.indptr), x.shape)
    view = x.view()
    view.flags.writeable = False
    return view


class FileRows:
    """Rows in a data file, read on demand."""

    def __init__(self, info: Info, group: str, dtype: np.dtype, standard: Standard | None = None):
        self.open = contextlib.ExitStack()
        file = self.open.enter_context(open_file(info.path))
        self.x, self.refill = open_rows(file, f"{group}/x"), Refill(file, info, group)
        self.y = None if group == "rows" else dataset(file, f"{group}/y")
        self.columns = row_notes(file, group, len(self.x))
        self.where, self.scale, self.dtype = f"{info.path}: {group}/x", info.scale, dtype
        self.standard, self.vocabulary, self.sparse = standard, info.vocabulary, info.sparse
        self.kind = memory_type(info.kinds[group], dtype)
        self.width, self.y_kind = math.prod(info.features), np.dtype(np.int64) if info.classes else dtype
        self.outputs = info.outputs
        self.most = largest_input(info.scale, dtype)
        # A block is a whole number of HDF5 chunks, and the same for every rank: the order of an epoch depends on it.
        if self.sparse:
            row = self.kind.itemsize + COLUMN.itemsize
            self.block, elements = self.x.block(row)
        else:
            self.block, row, elements = next(iter(slabs_of(self.x))).stop, self.width * self.kind.itemsize, 0
        needed = 2 * row * (elements if self.sparse else self.block)
        check_memory(needed, f"{self.where}: two blocks of {self.block} rows")

    def __len__(self) -> int:
        return len(self.x)

    def read(self, start: int, stop: int, into: tuple | None = None, augment: Augment | None = None) -> MemoryRows:
        """Read rows start to stop into memory (the first rows of the arrays `into`); UsageError for an invalid row."""
        rows = stop - start
        x, y = into or self.buffers(rows)
        x, y = x[:rows], y[:rows]
        with blamed_on(f"{self.where} is damaged"):
            if self.sparse:
                self.x.read(start, stop, x, self.most)
            else:
                self.x.read_direct(x.reshape(rows, *self.x.shape[1:]), np.s_[start:stop])
                self.refill(slice(start, stop), x)
            if self.y is not None:
                self.y.read_direct(y, np.s_[start:stop])
        if not self.sparse:
            check_x(x, self.where, range(start, stop), self.vocabulary, self.most)
        return MemoryRows(x, y, self.scale, self.dtype, augment, self.standard)

    def buffers(self, rows: int) -> tuple[Any, np.ndarray]:
        """Return arrays for x and y of `rows` rows; a sparse x grows as it is read."""
        x: Any = np.empty((rows, self.width), self.kind) if not self.sparse else CSR.empty(rows, self.width, self.kind)
        return x, np.zeros((rows, *self.outputs), self.y_kind)

    def gather(self, index: np.ndarray, x: Any, y: np.ndarray) -> None:
        """x[:] = scale * rows[index], standardized; y[:] = labels[index]; each needed block is read once."""
        by, parts = np.argsort(index, kind="stable"), []
        blocks, starts = np.unique(index[by] // self.block, return_index=True)
        for block, where in zip(blocks, np.split(by, starts[1:]), strict=True):
            first = int(index[where[0]])
            rows = self.read(first, min(int(index[where[-1]]) + 1, (int(block) + 1) * self.block))
            shape = len(where), x.shape[1]
            part_x: Any = CSR.empty(*shape, x.dtype) if self.sparse else np.empty(shape, x.dtype)
            part_y = np.empty((len(where), *y.shape[1:]), y.dtype)
            rows.gather(index[where] - first, part_x, part_y)
            y[where] = part_y
            if self.sparse:
                parts.append(part_x)
            else:
                x[where] = part_x
        if parts:
            x.put(CSR.joined(parts).take(np.argsort(by, kind="stable")))

    def most_elements(self, rows: int) -> int:
        """Return the most elements that any `rows` rows have together; sparse rows only."""
        return self.x.most_elements(rows)

    def close(self) -> None:
        """Close the file."""
        self.open.close()


def read_x(info: Info, group: str, x: Any, dtype: np.dtype, rows: np.ndarray | None = None) -> None:
    """Read group/x of a file slab by slab into x (n, features), all rows or the sorted `rows`.

    x may be a CSR whose first row begins at 0, with room for all elements. UsageError for a value that is not finite
    in the model's dtype, or a token outside the vocabulary.
    """
    most = largest_input(info.scale, dtype)
    with open_file(info.path) as file:
        if info.sparse:
            read_sparse(open_rows(file, f"{group}/x"), x, rows, most)
            return
        source, refill = dataset(file, f"{group}/x"), Refill(file, info, group)
        slab_x = None
        for slab in slabs_of(source):
            shape = (slab.stop - slab.start, *source.shape[1:])
            if rows is None:
                into = x[slab]
                source.read_direct(into.reshape(shape), slab)
                refill(slab, into)
            else:
                a, b = np.searchsorted(rows, (slab.start, slab.stop))
                if a == b:
                    continue
                if slab_x is None:
                    slab_x = np.empty((shape[0], x.shape[1]), x.dtype)
                source.read_direct(slab_x[: shape[0]].reshape(shape), slab)
                refill(slab, slab_x[: shape[0]])
                into = x[a:b]
                np.take(slab_x, rows[a:b] - slab.start, axis=0, out=into, mode="clip")
            numbers: range | np.ndarray = range(slab.start, slab.stop) if rows is None else rows[a:b]
            check_x(into, f"{info.path}: {group}/x", numbers, info.vocabulary, most)


def read_y(info: Info, group: str, dtype: np.dtype) -> np.ndarray:
    """Read and check group/y; targets in the model's dtype. UsageError for a label outside the classes."""
    with open_file(info.path) as file:
        read = dataset(file, f"{group}/y")[...]
    if not info.classes:
        with np.errstate(over="ignore"):
            read = read.astype(dtype, copy=False)
    check_y(read, info.classes, f"{info.path}: {group}/y")
    return read


def read_owners(info: Info, name: str) -> np.ndarray:
    """Read train/NAME, the owner of each row; UsageError if it is missing or does not fit."""
    with open_file(info.path) as file:
        if name not in owner_columns(file):
            others = ", ".join(owner_columns(file)) or "none"
            raise UsageError(f"{info.path} has no whole number for each row in train/{name}; such columns: {others}")
        return dataset(file, f"train/{name}")[...]


def refuse_other_files(comm: "Comm", path: str) -> None:
    """Raise UsageError if ranks on other hosts have another file of this name."""
    mine = run_together(comm, lambda: file_signature(path))
    for rank, other in enumerate(seen := [mine] if comm is None else comm.allgather(mine)):
        if other != seen[0]:
            raise UsageError(f"data file {path} is another one on rank {rank} ({other}) than on rank 0 ({seen[0]})")


def elements_of_rows(info: Info, group: str, rows: np.ndarray) -> int:
    """Return the number of elements of these sorted rows of a sparse group; 0 for a dense one."""
    if not info.sparse:
        return 0
    with open_file(info.path) as file:
        return int(open_rows(file, f"{group}/x").lengths(rows).sum())


def array_specs(
    info: Info, group: str, rows: int, dtype: np.dtype, elements: int | None = None
) -> list[tuple[tuple[int, ...], np.dtype]]:
    """Return shapes and types of the arrays that hold x and y of `rows` rows of a group: see `as_rows`.

    elements: of these rows, if they are sparse (None: of the whole group).
    """
    y_kind = np.dtype(np.int64) if info.classes else dtype
    x_kind = memory_type(info.kinds.get(group, next(iter(info.kinds.values()))), dtype)
    y = [((rows, *info.outputs), y_kind)]
    if not info.sparse:
        return [((rows, math.prod(info.features)), x_kind), *y]
    elements = info.elements.get(group, 0) if elements is None else elements
    return [((elements,), x_kind), ((elements,), COLUMN), ((rows + 1,), START), *y]


def as_rows(info: Info, arrays: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    """Return x and y of rows held by arrays of `array_specs`."""
    if not info.sparse:
        return arrays[0], arrays[1]
    data, columns, starts, y = arrays
    return CSR(data, columns, starts, (len(y), math.prod(info.features))), y


def check_room(info: Info, placement: str, dtype: np.dtype, ranks: int) -> None:
    """Raise UsageError if a rank's part of a file does not fit into memory; a damaged file may claim any shape."""
    train, test = info.rows["train"], info.rows["test"]
    itemsize = max(memory_type(kind, dtype).itemsize for kind in info.kinds.values())
    if info.sparse:
        elements = sum(info.elements.get(group, 0) for group in ("train", "test"))
        row = START.itemsize + -(-elements * (itemsize + COLUMN.itemsize) // max(1, train + test))  # on the mean
    else:
        row = math.prod(info.features) * itemsize
    row_memory = {"shared": train + test, "partitioned": train // ranks + test, "streamed": 0}[placement] * row
    # In addition to the rows: the labels of all, and the order of an epoch.
    what = f"{info.path}: {train} training and {test} test rows of {row} bytes under placement {placement}"
    check_memory(row_memory + 16 * (train + test), what)


class Arena:
    """Arrays that the ranks of a node share, filled by one of them (`fills`).

    Without room for shared memory, or alone on its node, a rank has and fills arrays of its own.
    """

    def __init__(self, comm: "Comm", specs: list[tuple[tuple[int, ...], np.dtype]]):
        """Collective. specs: (shape, dtype) of each of `arrays`."""
        self.node: Comm = None
        self.fills = True
        sizes = [-(-math.prod(shape) * dtype.itemsize // 64) * 64 for shape, dtype in specs]  # whole cache lines
        memory = None if comm is None else self._share(comm, sum(sizes))
        if memory is None:
            self.arrays = [np.empty(shape, dtype) for shape, dtype in specs]
            return
        starts = np.cumsum([0, *sizes])
        self.arrays = [
            memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for start, (shape, dtype) in zip(starts, specs, strict=False)
        ]

    def _share(self, comm: "MPI.Intracomm", size: int) -> np.ndarray | None:
        from hpcdl.comm.node_memory import (
            ranks_of_node,  # not above: it starts MPI, which preparing a file does not need
        )

        node = ranks_of_node(comm)
        if node.size > 1:
            size = size if node.rank == 0 else 0
            parts = share(node, size, "the data", "every rank of this node keeps its own copy")
            if parts is not None:
                self.node, self.fills = node, node.rank == 0
                return parts[0]
        node.Free()
        return None

    def ready(self) -> None:
        """Make the filled arrays visible to all ranks of the node. Collective."""
        if self.node is not None:
            self.node.Barrier()

    def close(self) -> None:
        """Drop the arrays; their memory is freed with the last view of them. Collective."""
        self.arrays = []
        if self.node is not None:
            self.node.Free()
        self.node = None


def run_together(comm: "Comm", work: Callable[[], Any], here: bool = True) -> Any:
    """Do the work on the ranks with `here`; a UsageError of one rank is raised on all. Collective."""
    if comm is None:
        return work()
    from hpcdl.comm import refuse_together  # not above: it starts MPI too

    with refuse_together(comm):
        return work() if here else None
