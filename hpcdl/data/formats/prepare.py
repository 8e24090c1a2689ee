"""Common parts of data preparation: inference of types and classes, the split into train and test, the writer.

Options that are not given are inferred. Integers in 0..255 are pixels: bytes with scale 1/255 (scale 1 if none is above
1). Other numbers keep their type, with scale 1. Integer or text labels are classes, other numbers are targets of a
regression. Labels other than 0, 1, 2, ... are numbered in sorted order, and the file keeps their names."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hpcdl.csr import CSR
from hpcdl.data.digest import Digest, set_digest_time, write_digest
from hpcdl.data.fills import FILLED
from hpcdl.data.format import NOTES, TABLE, TOKEN_BYTES, TOKENIZER, Info, read_info
from hpcdl.data.formats.sparse_file import SparseWriter, check_elements
from hpcdl.data.formats.vocabulary import TokenizerVocabulary, Vocabulary
from hpcdl.data.hdf5 import FilePath, NewFile, check_x, check_y, new_file, shown, slabs
from hpcdl.data.partition import hold_out
from hpcdl.data.shards import SHARD_SIZE, refuse_replacing
from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import check_writable
from hpcdl.random import Random

CHUNK_BYTES = 256 << 10  # of a compressed data set
GZIP = {"compression": "gzip", "compression_opts": 9, "shuffle": True}
TEST_FRACTION = 0.2  # of the rows, by default
MOST_RECIPE = 32 << 10  # characters: HDF5 keeps attributes below 64 KiB
MOST_NAMES = 4000  # HDF5 keeps attributes below 64 KiB
# "train", "test", "rows": shape of x, slabs of x in order (CSR: sparse rows), y (None: no labels; a function is called
# after the last slab), other columns.
Labels: TypeAlias = np.ndarray | Callable[[], np.ndarray] | None
Group: TypeAlias = tuple[tuple[int, ...], Iterable[Any], Labels, dict[str, np.ndarray]]
Groups: TypeAlias = dict[str, Group]


class Output:
    """The data file, or folder of shards, to write, with its attributes. summary: phrases for prepare-data's line.
    recipe: source and options, as JSON data, which the file keeps."""

    def __init__(
        self,
        path: FilePath,
        *,
        force: bool = False,
        compress: bool = False,
        name: str | None = None,
        scale: float | None = None,
        origin: str | None = None,
        shard_size: int = SHARD_SIZE,
    ):
        """Raise UsageError if the file exists, without `force`, or if its folder does not exist. A path that ends in /
        is a folder of shards, of about `shard_size` bytes each before compression."""
        self.path, self.compress, self.scale, self.origin = Path(path), compress, scale, origin
        self.folder, self.shard_size, self.recipe = str(path).endswith("/"), shard_size, dict[str, Any]()
        self.name, self.summary = name or self.path.stem, list[str]()
        for what, text in (("name", self.name), ("origin", origin or "")):
            check_text(text, f"the {what}")
        with self.blamed():  # a name may be too long
            exists, folder, file = self.path.exists(), self.path.is_dir(), self.path.is_file()
        if self.folder and folder:
            refuse_replacing(self.path, force)
        elif exists and self.folder:
            raise UsageError(f"{self.path} is no folder; name another folder of shards, or a file, as data.h5")
        elif exists and not file:
            raise UsageError(f"{path} is {'a folder' if folder else 'no file'}; name the file to be made, as data.h5")
        elif exists and not force:
            raise UsageError(f"{path} exists already; choose another name, or --force to replace it")
        if not self.path.parent.is_dir():
            raise UsageError(f"the folder {self.path.parent} does not exist; make it first")
        if not os.access(self.path.parent, os.W_OK):
            raise UsageError(f"the folder {self.path.parent} cannot be written to")
        with self.blamed():  # as on a read-only file system
            check_writable(self.path.with_name(f"{self.path.name}.parts") if self.folder else self.path)
        if scale is not None and not (math.isfinite(scale) and scale != 0):
            raise UsageError(f"the scale must be a number other than 0, not {scale}")

    def write(self, groups: Groups, *arguments: Any, **about: Any) -> Info:
        """Write the file or the folder of shards; return its structure. Arguments and errors: of `write_file`."""
        if not self.folder:
            return self.write_file(self.path, groups, *arguments, **about)
        from hpcdl.data.formats.shard_writer import write_shards  # here: it imports this file

        return write_shards(self, groups, *arguments, **about)

    def write_file(
        self,
        path: Path,
        groups: Groups,
        kind: np.dtype,
        scale: float,
        names: list | None,
        classes: int,
        vocabulary: Vocabulary | None = None,
        table: str | None = None,
        base: int | None = None,
        sparse: bool = False,
        token_bytes: dict[str, float] | None = None,
    ) -> Info:
        """Write one file; return its structure. names: of the classes; None: their numbers. table: the recipe as JSON
        (recipe.py). base: index of the first feature in libsvm's text. sparse: slabs of x are CSR. token_bytes: of
        a text, as of Schema. UsageError."""
        for label in names or ():
            check_text(label, "a label")
        digest, scale = Digest(), scale if self.scale is None else self.scale
        with self.blamed(), new_file(path) as file:
            for group, (shape, parts, y, columns) in groups.items():
                if 0 in shape:
                    raise UsageError(f"the group {group} would have no rows; choose another test fraction")
                if y is not None and not callable(y):
                    self._write_y(file, digest, group, y, classes)
                for name, column in columns.items():
                    options = GZIP | {"chunks": True} if name == FILLED else {}
                    file.create_dataset(f"{group}/{name}", data=column, **options)
                    if group == "train" and name not in NOTES:  # as a partition reads it
                        digest.add(f"{group}/{name}", column, labels=True)
                self._write_x(file, digest, f"{group}/x", shape, kind, parts, sparse)
                if callable(y):
                    self._write_y(file, digest, group, y(), classes)
            file.attrs["name"], file.attrs["classes"] = self.name, classes
            file.attrs["scale"] = scale
            optional: dict[str, Any] = {"labels": names, TABLE: table, "base": base, "source": self.origin or None}
            optional["recipe"] = self._recipe_text()
            optional[TOKEN_BYTES] = token_bytes and json.dumps(token_bytes)
            if isinstance(vocabulary, TokenizerVocabulary):
                file[TOKENIZER] = np.frombuffer(vocabulary.text.encode(), np.uint8)
            else:
                optional["vocabulary"] = vocabulary and vocabulary.characters
            file.attrs.update({name: value for name, value in optional.items() if value is not None})
            features = next(iter(groups.values()))[0][1:]
            seconds = write_digest(file, digest.finish(features, classes, scale, vocabulary))
        set_digest_time(path, seconds)
        return read_info(path)

    def _recipe_text(self) -> str | None:
        text = json.dumps(self.recipe, default=str)
        return text if self.recipe and len(text) < MOST_RECIPE else None

    def _write_y(self, file: NewFile, digest: Digest, group: str, y: np.ndarray, classes: int) -> None:
        check_y(y, classes, f"{group}/y")
        file[f"{group}/y"] = y.astype(np.min_scalar_type(classes - 1)) if classes else y
        digest.add(f"{group}/y", y, labels=True)

    def _write_x(
        self, file: NewFile, digest: Digest, name: str, shape: tuple[int, ...], kind: np.dtype, parts: Any, sparse: bool
    ) -> None:
        options, at = GZIP if self.compress else {}, 0
        if sparse:
            writer = SparseWriter(file, name, shape[1], kind, options)
            for each in parts:
                check_elements(each.data[each.part], each.indptr - each.indptr[0], name)
                for column, added in writer.append(each).items():
                    digest.add(f"{name}/{column}", added)
                file.check()
            return
        rows = min(shape[0], max(1, CHUNK_BYTES // (math.prod(shape[1:]) * kind.itemsize)))
        chunks = {"chunks": (rows, *shape[1:])} if self.compress else {}
        x = file.create_dataset(name, shape, kind, **options, **chunks)
        for part in parts:
            check_x(part, name, range(at, at + len(part)))
            x[at : at + len(part)] = part
            digest.add(name, part.astype(kind, copy=False))
            at += len(part)
            file.check()

    def blamed(self) -> contextlib.AbstractContextManager:
        """Turn errors of the body into UsageErrors about the output file."""
        return blamed_on(f"{shown(self.path, 200)} cannot be written")


def storage_type(low: float, high: float, whole: bool, kind: np.dtype) -> tuple[np.dtype, float]:
    """Return the type to store x in and its scale. low, high: range of x. whole: True for integers. kind: type of x."""
    if whole and low >= 0 and high <= 255:
        return np.dtype(np.uint8), 1 / 255 if high > 1 else 1.0
    return kind.newbyteorder("="), 1.0


def check_text(text: str, what: str) -> None:
    """Raise UsageError for a text that a data file cannot hold."""
    if "\0" in text or any("\ud800" <= each <= "\udfff" for each in text):
        raise UsageError(f"{what} is {shown(text)}, which HDF5 cannot hold: it must be UTF-8, without a NUL")


def number_labels(parts: list[np.ndarray]) -> tuple[list[np.ndarray], list | None, int]:
    """Number labels (integers, texts) from 0; return (numbers by part, names of classes or None, number of classes)."""
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
    """Return `number_labels` of ys; for floats, or under `regression`, (targets by part, None, 0)."""
    kinds = {labels.dtype.kind for labels in ys}
    if kinds <= set("biuf") and ("f" in kinds or regression):
        return [labels.astype(float) for labels in ys], None, 0
    if regression or not (kinds <= set("biu") or kinds <= set("US")):
        raise UsageError(f"{path}: y is {ys[0].dtype}; classes must be integers or texts, values to predict numbers")
    return number_labels([labels.astype(int) if labels.dtype.kind == "b" else labels for labels in ys])


def split_by_group(y: np.ndarray, classes: int, fraction: float | None, seed: int) -> dict[str, np.ndarray]:
    """Return shuffled row numbers by group, train and test (stratified). fraction: of test; 0 and 1 give one group."""
    fraction = TEST_FRACTION if fraction is None else fraction
    if not 0 <= fraction <= 1:
        raise UsageError(f"the test fraction must lie between 0 and 1, as 0.2, not {fraction}")
    test = hold_out(y, classes, fraction, Random(seed)("test"))
    train = np.delete(np.arange(len(y)), test)
    shuffle = Random(seed)("shuffle")
    train, test = shuffle.permutation(train), shuffle.permutation(test)
    return ({"train": train} if fraction < 1 else {}) | ({"test": test} if fraction > 0 else {})


def split(x: Any, y: np.ndarray, classes: int, kind: np.dtype, fraction: float | None, seed: int) -> Groups:
    """Return groups for `Output.write`: the rows of x (an array, a memory map or a CSR), split and shuffled."""
    return {
        group: ((len(rows), *x.shape[1:]), select_rows(x, rows, kind), y[rows], {})
        for group, rows in split_by_group(y, classes, fraction, seed).items()
    }


def select_rows(x: Any, rows: np.ndarray, kind: np.dtype) -> Iterator[Any]:
    """Yield the rows of x with these numbers slab by slab, as `kind`; rows of a CSR all at once, in their own type."""
    if isinstance(x, CSR):
        yield x.take(rows)
        return
    for slab in slabs(len(rows), x[:1].nbytes):
        yield x[rows[slab]].astype(kind, copy=False)
