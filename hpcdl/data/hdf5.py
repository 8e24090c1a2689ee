"""HDF5 files, maybe of unknown origin: opened, checked and read slab by slab, and written whole.
Files are written under a temporary name, synced and renamed: a file with its final name is complete."""

import contextlib
import errno
import itertools
import math
import os
from collections.abc import Iterator
from typing import Any, TypeAlias

import h5py
import numpy as np

from hpcdl.data.formats.vocabulary import Vocabulary
from hpcdl.data.shards import GROUPS, JoinedSet, ShardFolder, is_folder
from hpcdl.errors import UsageError, blamed_on, printable, reason, refuse_beyond
from hpcdl.files import Sink, atomic_path
from hpcdl.memory import available

FilePath: TypeAlias = str | os.PathLike[str]
DataFile: TypeAlias = h5py.File | ShardFolder
SLAB_BYTES = 8 << 20  # read or written at a time
LINK_LIMIT = 8  # soft links in a chain; a loop has more
MESSAGE_LENGTH = 60  # characters of foreign text that a message shows


def shown(value: object, most: int = MESSAGE_LENGTH) -> str:
    """Return a value for a message: one line, `most` characters at most, texts in quotes."""
    plain = value.item() if isinstance(value, np.generic) else value
    return short(repr(plain) if isinstance(plain, (str, bytes)) else str(plain), most)


def short(text: str, most: int = MESSAGE_LENGTH) -> str:
    """Return a text for a message: one line, `most` characters at most, without quotes."""
    text = printable(" ".join(text.split()), allowed="")
    return text if len(text) <= most else f"{text[:most]}..."


@contextlib.contextmanager
def open_file(path: FilePath) -> Iterator[Any]:
    """Open a data file, or a folder of shards, for reading; errors of HDF5, in the body too, become UsageErrors."""
    if is_folder(path):
        with blamed_on(f"data folder {path} cannot be read"):
            folder = ShardFolder(str(path), open_file, dataset)
            try:
                yield folder
            finally:
                folder.close()
        return
    with blamed_on(f"data file {path} cannot be read"):
        try:
            # No lock: data files appear whole under their name and never change, and some file systems have no locks.
            with h5py.File(path, "r", locking=False) as file:
                yield file
        except OSError as error:
            if not os.access(path, os.R_OK):
                why = os.strerror(error.errno or errno.EACCES)
                raise UsageError(f"data file {path} cannot be read: {why}") from None
            if not h5py.is_hdf5(path):
                why = "prepare-data makes one from idx, npz, tables, libsvm and text"
                raise UsageError(f"{path} is not an HDF5 file; {why}") from None
            raise UsageError(f"data file {path} is damaged: {reason(error)}") from None


def dataset(file: DataFile, name: str) -> Any:
    """Return the data set of this name, as "train/x"; of a folder of shards a `JoinedSet`. UsageError if it is missing
    or its elements lie outside the file: a foreign file could otherwise turn the bytes of other files into features."""
    item = follow_links(file, name)
    if isinstance(item, JoinedSet):
        return item
    if not isinstance(item, h5py.Dataset):
        raise UsageError(f"{file.filename} has no data set {name}; a data file holds x and y in train and in test")
    where = f"{file.filename}: {name}"
    if item.external:
        other = shown(item.external[0][0])
        raise UsageError(f"{where} has its elements in another file ({other}); copy them into this file")
    if item.is_virtual:
        raise UsageError(f"{where} is put together from other data sets (it is virtual); copy their elements into it")
    return item


def follow_links(file: DataFile, name: str) -> Any:
    """Return the object at a path in the file, or None; soft links are checked, for they may lead out of the file."""
    if isinstance(file, ShardFolder):
        found = file.item(name)
        return follow_links(file.shard(0), name) if found is None and name.split("/")[0] not in GROUPS else found
    parts, links = name.split("/"), 0
    at: Any = file
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        link = at.get(part, getlink=True) if isinstance(at, h5py.Group) else None
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > LINK_LIMIT:
                raise UsageError(f"{file.filename}: {name} is a chain of too many links; put the data set there")
            parts, at = link.path.split("/") + parts, file if link.path.startswith("/") else at
        elif isinstance(link, h5py.HardLink):
            at = at[part]
        elif link is not None:
            raise UsageError(f"{file.filename}: {name} is a link to another file; copy the data set into this file")
        else:
            return None
    return at


def check_memory(needed: int, what: str) -> None:
    """Raise UsageError if this machine has no memory for the `needed` bytes of `what`."""
    refuse_beyond(what, needed, available())


def check_x(
    x: np.ndarray, where: str, rows: Any = None, vocabulary: Vocabulary | None = None, most: float = math.inf
) -> None:
    """Raise UsageError for a NaN or an infinity, a token outside the vocabulary, or a number beyond -most to most.
    rows[i]: the number of row i of x in the data, for the message; None: i."""
    if vocabulary is not None and x.size and x.max() >= len(vocabulary):
        row, column = map(int, np.unravel_index(int(np.argmax(x >= len(vocabulary))), x.shape))
        number = row if rows is None else rows[row]
        tokens = len(vocabulary)
        exist = f"the {tokens} tokens of the vocabulary are 0 to {tokens - 1}"
        raise UsageError(f"{where} has the token {x[row, column]} in row {number}; {exist}")
    if x.dtype.kind == "f" and not (finite := np.isfinite(x)).all():
        row = int(np.argmin(finite.all(axis=tuple(range(1, x.ndim)))))
        row = row if rows is None else rows[row]
        raise UsageError(f"{where} has a NaN or an infinity (as {x.dtype}) in row {row}; clean the data first")
    if x.size and largest(x.dtype) > most and max(abs(float(x.min())), abs(float(x.max()))) > most:
        raise UsageError(f"{where} has numbers up to {float(x.max()):g}, which the scale makes infinite")


def check_slab(
    x: np.ndarray, source: Any, where: str, first: int, vocabulary: Vocabulary | None = None, most: float = math.inf
) -> None:
    """As `check_x`, for the rows from `first` on of the data set `source`; of a folder, the message names the shard."""
    last = first + len(x)
    for name, at, part in (
        source.pieces(first, last) if isinstance(source, JoinedSet) else [(where, first, slice(None))]
    ):
        check_x(x[part], name, range(at, at + last - first), vocabulary, most)


def largest(kind: np.dtype) -> float:
    return float(np.finfo(kind).max) if kind.kind == "f" else float(np.iinfo(kind).max)


def largest_input(scale: float, dtype: np.dtype) -> float:
    """Return the largest x for which scale * x is finite in the model's type; UsageError if the scale is not finite."""
    if abs(scale) > largest(dtype):
        raise UsageError(f"the scale {scale:g} is infinite as {dtype}")
    return largest(dtype) / abs(scale) if abs(scale) > 1 else largest(dtype)


def check_y(y: np.ndarray, classes: int, where: str) -> None:
    """Raise UsageError for a label outside the classes, or a target that is not finite."""
    if classes == 0:
        check_x(y, where)
    elif y.min() < 0 or y.max() >= classes:
        row = int(np.argmax((y < 0) | (y >= classes)))
        exist = f"the labels of {classes} classes are 0 to {classes - 1}"
        raise UsageError(f"{where} has the label {y[row]} in row {row}; {exist}")


def slabs(rows: int, row_bytes: int, multiple: int = 1) -> Iterator[slice]:
    """Yield slices of range(rows) of about SLAB_BYTES; all but the last have a multiple of `multiple` rows."""
    length = max(1, SLAB_BYTES // max(1, row_bytes * multiple)) * multiple
    for start in range(0, rows, length):
        yield slice(start, min(start + length, rows))


def slabs_of(dataset: Any, across: bool = False) -> Iterator[slice]:
    """Yield the slabs in which to read a data set of HDF5, or of a folder. They hold whole chunks, so that none is
    decompressed twice, and rows of one shard. across: slabs of the one file with these rows, for sums equal to the bit.
    """
    row_bytes, chunks, ends = dataset.dtype.itemsize * math.prod(dataset.shape[1:]), dataset.chunks, (0, len(dataset))
    for first, last in itertools.pairwise(ends if across else getattr(dataset, "bounds", ends)):
        for slab in slabs(int(last - first), row_bytes, chunks[0] if chunks else 1):
            yield slice(int(first) + slab.start, int(first) + slab.stop)


class NewFile(h5py.File):
    """An HDF5 file being written; `check` raises the OSError of a failed write. options: of h5py.File."""

    def __init__(self, sink: Sink, **options: Any):
        super().__init__(sink, "w", **options)
        self.check = sink.check


@contextlib.contextmanager
def new_file(path: FilePath) -> Iterator[NewFile]:
    """Yield a new HDF5 file that gets its name on success, and leaves nothing behind on failure."""
    with atomic_path(path) as temporary, Sink(temporary, "w+") as sink:
        with NewFile(sink) as file:
            yield file
        sink.check()
