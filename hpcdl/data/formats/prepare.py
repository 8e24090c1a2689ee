"""Common parts of data preparation: inference of types and classes, the split into train and test, the writer.

    kind   source              train and test                              read
    idx    a folder            both are there                              slab by slab
    npz    numpy's archive     x_test and y_test, or split off by class    at once
    csv    a table             split off by class                          once, slab by slab, through a temporary file
    table  the same, or Parquet or Arrow
    text   plain text          the last part is test                       at once, bytes slab by slab
    libsvm sparse rows         a file of its own, or split off by class    once, block by block, through temporary files
    synthetic  a spec          both are made                               block by block

Options that are not given are inferred. Integers in 0..255 are pixels: they become bytes with scale 1/255 (scale 1 if
none is above 1). Other numbers keep their type, with scale 1. Integer or text labels are classes, other numbers are
targets of a regression. Labels other than 0, 1, 2, ... are numbered in sorted order, and the file keeps their names.
Texts become tokens without inference (prepare_text.py).
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hpcdl.csr import CSR
from hpcdl.data.digest import Digest, set_digest_time, write_digest
from hpcdl.data.fills import FILLED
from hpcdl.data.format import NOTES, TABLE, Info, read_info
from hpcdl.data.formats.sparse_file import SparseWriter, check_elements
from hpcdl.data.formats.vocabulary import Vocabulary
from hpcdl.data.hdf5 import FilePath, NewFile, check_x, check_y, new_file, shown, slabs
from hpcdl.data.partition import hold_out
from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import check_writable
from hpcdl.random import Random

CHUNK_BYTES = 256 << 10  # of a compressed data set
GZIP = {"compression": "gzip", "compression_opts": 9, "shuffle": True}
MOST_NAMES = 4000  # HDF5 keeps attributes below 64 KiB
# "train", "test", "rows": shape of x, slabs of x in order (CSR: sparse rows), y (None: no labels; a function is called
# after the last slab), other columns.
Labels: TypeAlias = np.ndarray | Callable[[], np.ndarray] | None
Group: TypeAlias = tuple[tuple[int, ...], Iterable[Any], Labels, dict[str, np.ndarray]]
Groups: TypeAlias = dict[str, Group]


class Output:
    """The data file to write, with its attributes.

    summary: phrases about the preparation, for the message at its end.
    """

    def __init__(
        self,
        path: FilePath,
        *,
        force: bool = False,
        compress: bool = False,
        name: str | None = None,
        scale: float | None = None,
        origin: str | None = None,
    ):
        """Raise UsageError if the file exists (without force), or its folder does not."""
        self.path, self.compress, self.scale, self.origin = Path(path), compress, scale, origin
        self.name, self.summary = name or self.path.stem, list[str]()
        for what, text in (("name", self.name), ("origin", origin or "")):
            check_text(text, f"the {what}")
        with self.blamed():  # a name may be too long
            exists, folder, file = self.path.exists(), self.path.is_dir(), self.path.is_file()
        if exists and not file:
            raise UsageError(f"{path} is {'a folder' if folder else 'no file'}; name the file to be made, as data.h5")
        if exists and not force:
            raise UsageError(f"{path} exists already; choose another name, or --force to replace it")
        if not self.path.parent.is_dir():
            raise UsageError(f"the folder {self.path.parent} does not exist; make it first")
        if not os.access(self.path.parent, os.W_OK):
            raise UsageError(f"the folder {self.path.parent} cannot be written to")
        with self.blamed():  # as on a system of files that is read only
            check_writable(self.path)
        if scale is not None and not (math.isfinite(scale) and scale != 0):
            raise UsageError(f"the scale must be a number other than 0, not {scale}")

    def write(
        self,
        groups: Groups,
        kind: np.dtype,
        scale: float,
        names: list | None,
        classes: int,
        vocabulary: Vocabulary | None = None,
        table: str | None = None,
        base: int | None = None,
        sparse: bool = False,
    ) -> Info:
        """Write the file. names: of the classes, or None; table: the recipe as JSON (recipe.py); base: the index of the
        first feature in libsvm's text, for sparse rows, whose slabs are CSR.
        """
        for label in names or ():
            check_text(label, "a label")
        digest, scale = Digest(), scale if self.scale is None else self.scale
        with self.blamed(), new_file(self.path) as file:
            for group, (shape, parts, y, columns) in groups.items():
                if 0 in shape:
                    raise UsageError(f"there would be no row in {group}; another test fraction may help")
                if y is not None and not callable(y):
                    self._write_y(file, digest, group, y, classes)
                for name, column in columns.items():
                    options = GZIP | {"chunks": True} if name == FILLED else {}
                    file.create_dataset(f"{group}/{name}", data=column, **options)
                    if group == "train" and name not in NOTES:  # as a partition reads it
                        digest.add(f"{group}/{name}", column, labels=True)
                (self._write_sparse if sparse else self._write_x)(file, digest, group, shape, kind, parts)
                if callable(y):
                    self._write_y(file, digest, group, y(), classes)
            file.attrs["name"], file.attrs["classes"] = self.name, classes
            file.attrs["scale"] = scale
            if names is not None:
                file.attrs["labels"] = names
            if vocabulary is not None:
                file.attrs["vocabulary"] = vocabulary.characters
            if table is not None:
                file.attrs[TABLE] = table
            if base is not None:
                file.attrs["base"] = base
            if self.origin:
                file.attrs["source"] = self.origin
            features = next(iter(groups.values()))[0][1:]
            seconds = write_digest(file, digest.finish(features, classes, scale, vocabulary))
        set_digest_time(self.path, seconds)
        return read_info(self.path)

    def _write_y(self, file: NewFile, digest: Digest, group: str, y: np.ndarray, classes: int) -> None:
        check_y(y, classes, f"{group}/y")
        file[f"{group}/y"] = y.astype(np.min_scalar_type(classes - 1)) if classes else y
        digest.add(f"{group}/y", y, labels=True)

    def _write_x(
        self,
        file: NewFile,
        digest: Digest,
        group: str,
        shape: tuple[int, ...],
        kind: np.dtype,
        parts: Iterable[np.ndarray],
    ) -> None:
        x, at = file.create_dataset(f"{group}/x", shape, kind, **self._layout(shape, kind)), 0
        for part in parts:
            check_x(part, f"{group}/x", range(at, at + len(part)))
            x[at : at + len(part)] = part
            digest.add(f"{group}/x", part.astype(kind, copy=False))
            at += len(part)
            file.check()

    def _write_sparse(
        self, file: NewFile, digest: Digest, group: str, shape: tuple[int, ...], kind: np.dtype, parts: Iterable[CSR]
    ) -> None:
        writer = SparseWriter(file, f"{group}/x", shape[1], kind, GZIP if self.compress else {})
        for part in parts:
            check_elements(part.data[part.indptr[0] : part.indptr[-1]], part.indptr - part.indptr[0], f"{group}/x")
            for name, added in writer.append(part).items():
                digest.add(f"{group}/x/{name}", added)
            file.check()

    def blamed(self) -> contextlib.AbstractContextManager:
        """Turn errors of the body into UsageErrors about the output file."""
        return blamed_on(f"{shown(self.path, 200)} cannot be written")

    def _layout(self, shape: tuple[int, ...], kind: np.dtype) -> dict[str, Any]:
        if not self.compress:
            return {}
        rows = min(shape[0], max(1, CHUNK_BYTES // (math.prod(shape[1:]) * kind.itemsize)))
        return {"chunks": (rows, *shape[1:]), **GZIP}


def storage_type(low: float, high: float, whole: bool, kind: np.dtype) -> tuple[np.dtype, float]:
    """Return the stored type of x and its scale. low, high: its range; whole: all its numbers are integers."""
    if whole and low >= 0 and high <= 255:
        return np.dtype(np.uint8), 1 / 255 if high > 1 else 1.0
    return kind.newbyteorder("="), 1.0


def check_text(text: str, what: str) -> None:
    """Raise UsageError for a text that a data file cannot hold."""
    if "\0" in text or any("\ud800" <= each <= "\udfff" for each in text):
        raise UsageError(f"{what} is {shown(text)}, which HDF5 cannot hold: it must be UTF-8, without a NUL")


def number_labels(parts: list[np.ndarray]) -> tuple[list[np.ndarray], list | None, int]:
    """Number integers or texts as classes 0, 1, ...: (class numbers, names or None, number of classes)."""
    known, numbers = np.unique(np.concatenate(parts), return_inverse=True)
    if len(known) < 2:
        raise UsageError(f"all rows have the label {shown(known[0])}; classification needs two classes or more")
    by_part = np.split(numbers, np.cumsum([len(part) for part in parts])[:-1])
    is_range = known.dtype.kind in "iu" and known[0] == 0 and known[-1] == len(known) - 1
    if not is_range and len(known) > MOST_NAMES:
        raise UsageError(f"there are {len(known)} different labels; if they are values to predict, pass --regression")
    if known.dtype.kind == "S":
        with blamed_on("labels of bytes must be texts in UTF-8"):
            known = np.char.decode(known, "utf-8")
    return by_part, None if is_range else known.astype(str).tolist(), len(known)


def class_numbers(path: FilePath, ys: list[np.ndarray], regression: bool) -> tuple[list[np.ndarray], list | None, int]:
    """Return labels in the form of `number_labels`; floats are targets of a regression (0 classes)."""
    kinds = {labels.dtype.kind for labels in ys}
    if kinds <= set("biuf") and ("f" in kinds or regression):
        return [labels.astype(float) for labels in ys], None, 0
    if regression or not (kinds <= set("biu") or kinds <= set("US")):
        raise UsageError(f"{path}: y is {ys[0].dtype}; classes must be integers or texts, values to predict numbers")
    return number_labels([labels.astype(int) if labels.dtype.kind == "b" else labels for labels in ys])


def split_rows(y: np.ndarray, classes: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return shuffled row numbers for train and test; the test fraction (0 to 1) is stratified by class."""
    if not 0 <= fraction <= 1:
        raise UsageError(f"the test fraction must lie between 0 and 1, as 0.2, not {fraction}")
    test = hold_out(y, classes, fraction, Random(seed)("test"))
    train = np.delete(np.arange(len(y)), test)
    shuffle = Random(seed)("shuffle")
    return shuffle.permutation(train), shuffle.permutation(test)


def split(
    x: np.ndarray, y: np.ndarray, classes: int, kind: np.dtype, fraction: float, seed: int, **columns: np.ndarray
) -> Groups:
    """Return groups for Output.write: the rows of x (an array or memory map), split and shuffled."""
    groups: Groups = {}
    for group, rows in split_by_group(y, classes, fraction, seed).items():
        others = {name: column[rows] for name, column in columns.items()}
        groups[group] = (len(rows), *x.shape[1:]), select_rows(x, rows, kind), y[rows], others
    return groups


def split_by_group(y: np.ndarray, classes: int, fraction: float, seed: int) -> dict[str, np.ndarray]:
    """Return the row numbers of `split_rows` by group, without an empty group."""
    train, test = split_rows(y, classes, fraction, seed)
    return ({"train": train} if fraction < 1 else {}) | ({"test": test} if fraction > 0 else {})


def select_rows(x: np.ndarray, rows: np.ndarray, kind: np.dtype) -> Iterator[np.ndarray]:
    """Yield the rows with these numbers slab by slab."""
    for slab in slabs(len(rows), x[:1].nbytes):
        yield x[rows[slab]].astype(kind, copy=False)
