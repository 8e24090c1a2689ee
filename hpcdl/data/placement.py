"""Placement of rows while training: in shared memory, in each rank's memory, or in the file; one interface for all.

    placement     train rows                                 memory per rank            reads of the file
    shared        one copy per node (shared_memory.py)       rows / ranks of the node   once, by one rank per node
    partitioned   each rank holds its own rows only          rows / ranks               once, by every rank
    streamed      in the file                                a window of blocks         every epoch

`rows.gather(index, x, y, moves=None)` writes scale * rows[index] into x (standardized on request) and their labels into
y. Memory keeps the file's own type (a byte per pixel), but has no float16, and no floats wider than the model's. Labels
become int64, targets the model's type."""

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hpcdl.csr import COLUMN, CSR, START
from hpcdl.data.augment import Augment, Moves
from hpcdl.data.batch import RowForm
from hpcdl.data.digest import file_signature
from hpcdl.data.fills import FillMarks
from hpcdl.data.format import Info, row_notes
from hpcdl.data.formats.sparse_file import largest_lengths, open_rows, slab_elements
from hpcdl.data.hdf5 import DataFile, check_memory, check_slab, check_y, dataset, largest_input, open_file, slabs_of
from hpcdl.data.standard import Standard
from hpcdl.errors import UsageError, blamed_on
from hpcdl.kernels.gather import gather, gather_images
from hpcdl.kernels.sparse import gather_sparse
from hpcdl.shared_memory import share

if TYPE_CHECKING:
    from mpi4py import MPI  # its import starts MPI, which preparing a file does not need

Comm: TypeAlias = "MPI.Intracomm | None"


def memory_type(kind: np.dtype, dtype: np.dtype) -> np.dtype:
    """Return the type of x in memory: integers as they are; floats as float32, or the model's dtype if over 4 bytes."""
    if kind.kind != "f":
        return kind.newbyteorder("=")
    return np.dtype(np.float32) if kind.itemsize <= 4 else dtype


class MemoryRows:
    """Rows in memory: read-only views x (rows, features), maybe a CSR, and y (rows,) or (rows, outputs)."""

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
        """Set x to scale * rows[index], moved, then standardized, and y to their labels. index: int64, not checked."""
        if self.sparse:
            lengths = self.x.indptr[index + 1] - self.x.indptr[index]
            x.reserve(int(x.indptr[0] + lengths.sum()))
            raw = self.x.data, self.x.indices, self.x.indptr
            self.gather_sparse(*raw, index, self.scale, x.data, x.indices, x.indptr)
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


def read_only_view(x: Any) -> Any:
    if isinstance(x, CSR):
        return CSR(read_only_view(x.data), read_only_view(x.indices), read_only_view(x.indptr), x.shape)
    view = x.view()
    view.flags.writeable = False
    return view


class FileX:
    """x of a group of an open file; `read` checks what it reads."""

    def __init__(self, file: DataFile, info: Info, group: str, dtype: np.dtype):
        self.x, self.marks = open_rows(file, f"{group}/x"), FillMarks(file, info, group) if info.fills else None
        self.where, self.vocabulary, self.sparse = f"{info.path}: {group}/x", info.vocabulary, info.sparse
        self.most = largest_input(info.scale, dtype)

    def read(self, part: slice, x: Any) -> None:
        """Read the rows `part` into x (rows, features), a CSR if they are sparse. UsageError for an invalid value."""
        if self.sparse:
            self.x.read(part.start, part.stop, x, self.most)
        else:
            self.x.read_direct(x.reshape(-1, *self.x.shape[1:]), part)
            if self.marks is not None:
                self.marks.refill(part, x)
            check_slab(x, self.x, self.where, part.start, self.vocabulary, self.most)


class FileRows:
    """Rows in a data file, read on demand."""

    def __init__(self, info: Info, group: str, dtype: np.dtype, standard: Standard | None = None):
        self.open = contextlib.ExitStack()
        file = self.open.enter_context(open_file(info.path))
        self.source = FileX(file, info, group, dtype)
        self.x, self.sparse, self.outputs = self.source.x, info.sparse, info.outputs
        self.y = None if group == "rows" else dataset(file, f"{group}/y")
        self.columns = row_notes(file, group, len(self.x))
        self.scale, self.dtype, self.standard = info.scale, dtype, standard
        self.kind = memory_type(info.kinds[group], dtype)
        self.width, self.y_kind = math.prod(info.features), np.dtype(np.int64) if info.classes else dtype
        self.form = RowForm(self.width, self.kind, self.y_kind, self.outputs, self.sparse)
        # A block is a whole number of HDF5 chunks, and the same for every rank: the order of an epoch depends on it.
        if self.sparse:
            row = self.kind.itemsize + COLUMN.itemsize
            self.block, elements = self.x.block(row)
        else:
            self.block = max(slab.stop - slab.start for slab in slabs_of(self.x))
            row, elements = self.width * self.kind.itemsize, 0
        shards = itertools.pairwise(getattr(self.x, "bounds", (0, len(self.x))))
        starts = [np.arange(first, last, self.block) for first, last in shards]
        self.starts = np.append(np.concatenate(starts), len(self.x))  # of blocks, none of two shards, and the end
        # Of a block, at most:
        self.elements, self.block_bytes = elements, row * (elements if self.sparse else self.block)
        check_memory(2 * self.block_bytes, f"{self.source.where}: two blocks of {self.block} rows")

    def __len__(self) -> int:
        return len(self.x)

    def read(self, start: int, stop: int, into: tuple | None = None, augment: Augment | None = None) -> MemoryRows:
        """Return rows start to stop - 1, read into arrays `into` (x, y) or new ones; UsageError for an invalid row."""
        x, y = (each[: stop - start] for each in into or self.form.empty(stop - start))
        with blamed_on(f"{self.source.where} is damaged"):
            self.source.read(slice(start, stop), x)
            if self.y is None:
                y[...] = 0
            else:
                self.y.read_direct(y, np.s_[start:stop])
        return MemoryRows(x, y, self.scale, self.dtype, augment, self.standard)

    def gather(self, index: np.ndarray, x: Any, y: np.ndarray) -> None:
        """Set x to scale * rows[index], standardized, and y to their labels; each needed block is read once."""
        by, parts, form = np.argsort(index, kind="stable"), [], self.form._replace(dtype=x.dtype, y_dtype=y.dtype)
        _, places = np.unique(np.searchsorted(self.starts, index[by], side="right"), return_index=True)
        for where in np.split(by, places[1:]):
            first = int(index[where[0]])
            rows = self.read(first, int(index[where[-1]]) + 1)
            part_x, part_y = form.empty(len(where))
            rows.gather(index[where] - first, part_x, part_y)
            y[where] = part_y
            if self.sparse:
                parts.append(part_x)
            else:
                x[where] = part_x
        if parts:
            x.put(CSR.joined(parts).take(np.argsort(by, kind="stable")))

    def most_elements(self, rows: int) -> int:
        return self.x.most_elements(rows)

    def close(self) -> None:
        self.open.close()


def read_x(info: Info, group: str, x: Any, dtype: np.dtype, rows: np.ndarray | None = None) -> None:
    """Read group/x of a file slab by slab into x (n, features): all rows, or the sorted `rows`. x may be a CSR whose
    first row begins at 0, with room for all elements. UsageError: a value infinite in `dtype`, or an invalid token."""
    with open_file(info.path) as file:
        source = FileX(file, info, group, dtype)
        form = RowForm(x.shape[1], x.dtype, np.dtype(np.int64), sparse=info.sparse)
        for slab in source.x.slabs(slab_elements(x.dtype)) if info.sparse else slabs_of(source.x):
            if rows is None:
                source.read(slab, x[slab])
                continue
            a, b = np.searchsorted(rows, (slab.start, slab.stop))
            if a < b:
                part, _ = form.empty(slab.stop - slab.start)
                source.read(slab, part)
                if info.sparse:
                    x[a:b].put(part.take(rows[a:b] - slab.start))
                else:
                    np.take(part, rows[a:b] - slab.start, axis=0, out=x[a:b], mode="clip")


def read_y(info: Info, group: str, dtype: np.dtype) -> np.ndarray:
    """Return group/y, checked; targets in the model's dtype. UsageError for a label outside the classes."""
    with open_file(info.path) as file:
        read = dataset(file, f"{group}/y")[...]
    if not info.classes:
        with np.errstate(over="ignore"):
            read = read.astype(dtype, copy=False)
    check_y(read, info.classes, f"{info.path}: {group}/y")
    return read


def refuse_other_files(comm: "Comm", path: str) -> None:
    """Raise UsageError if ranks on other hosts have a different file of this name. Collective."""
    mine = run_together(comm, lambda: file_signature(path))
    for rank, other in enumerate(seen := [mine] if comm is None else comm.allgather(mine)):
        if other != seen[0]:
            files = f"rank {rank} ({other}) and rank 0 ({seen[0]})"
            raise UsageError(f"data file {path} differs between {files}; copy one file to all hosts")


def check_room(info: Info, placement: str, dtype: np.dtype, ranks: int) -> None:
    """Raise UsageError if a rank's rows of a file do not fit into memory; a damaged file may claim any shape."""
    train, test = info.rows["train"], info.rows["test"]
    itemsize = max(memory_type(kind, dtype).itemsize for kind in info.kinds.values())
    if info.sparse:
        elements = sum(info.elements.get(group, 0) for group in ("train", "test"))
        row = START.itemsize + -(-elements * (itemsize + COLUMN.itemsize) // max(1, train + test))  # on average
    else:
        row = math.prod(info.features) * itemsize
    row_memory = {"shared": train + test, "partitioned": train // ranks + test, "streamed": 0}[placement] * row
    # In addition to the rows: the labels of all, and the order of an epoch.
    what = f"{info.path}: {train} training and {test} test rows of {row} bytes under placement {placement}"
    check_memory(row_memory + 16 * (train + test), what)


class Arena:
    """Arrays that the ranks of a node share; one rank (`fills`) fills them. Without shared memory each has its own."""

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
        from hpcdl.comm.node_memory import ranks_of_node  # here: it starts MPI, which preparing a file does not need

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
    """Return work() on the ranks with `here`, else None; a UsageError of one rank is raised on all. Collective."""
    if comm is None:
        return work()
    from hpcdl.comm import refuse_together  # here: it starts MPI, too

    with refuse_together(comm):
        return work() if here else None


def on_first_rank(comm: Comm, work: Callable[[], Any]) -> Any:
    """Do the work on the first rank; return its result, or raise its UsageError, on all ranks."""
    result = run_together(comm, work, here=comm is None or comm.rank == 0)
    return result if comm is None else comm.bcast(result)
