"""The data file: HDF5, so that any tool can make one and any part of it can be read alone.

    train/x  (n, features...)   integers or floats       attributes of the file
    train/y  (n,)               class numbers, or        scale    the model sees x * scale (default 1)
                                floats to predict        classes  0 for regression (default: from y)
    test/x, test/y              the same                 name     for reports (default: the file's name)

A text is a data set, too, with rows of tokens, that is whole numbers 0 ... classes - 1 (prepare_text.py):

    train/x  (n, length)        unsigned integers        vocabulary  what the tokens stand for (vocabulary.py)
    train/y  (n,)               the token that follows   scale       1

Files are written under a temporary name, synced and renamed: a file that has its final name is whole.
"""

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import h5py
import numpy as np

from hpcdl.data.vocabulary import Vocabulary
from hpcdl.errors import UsageError, unknown
from hpcdl.files import atomic_path

FilePath: TypeAlias = str | os.PathLike[str]
KNOWN = {name: Path(__file__).with_name(f"{name}.h5") for name in ("digits", "text")}
SLAB_BYTES = 8 << 20  # what is read or written at a time


@dataclasses.dataclass(frozen=True)
class Info:
    """What a data file says of itself; `rows` and `kinds` (element types of x) by group, "train" and "test".

    vocabulary: of a text; None for other data.
    """

    path: str
    name: str
    features: tuple[int, ...]
    classes: int
    scale: float
    rows: dict[str, int]
    kinds: dict[str, np.dtype]
    vocabulary: Vocabulary | None = None


def find(name_or_path: str) -> Path:
    """The file of a known data set or of a path; UsageError if it is neither."""
    text = str(name_or_path)
    if text in KNOWN:
        return KNOWN[text]
    path = Path(text)
    if path.is_file():
        return path
    if path.is_dir():
        raise UsageError(f"data {text!r} is a folder; give an HDF5 file (prepare_data makes one)")
    if os.sep in text or path.suffix:
        raise UsageError(f"data file {text!r} does not exist")
    raise UsageError(f"{unknown('data set', text, KNOWN)}, or the path of an HDF5 file")


@contextlib.contextmanager
def open_file(path: FilePath) -> Iterator[h5py.File]:
    """Open a data file for reading; what HDF5 cannot open or read becomes a UsageError."""
    try:
        # No lock: data files appear whole under their name and never change, and some file systems have no locks.
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except OSError as error:
        if not os.access(path, os.R_OK):
            raise UsageError(f"data file {path} cannot be read: {os.strerror(error.errno or errno.EACCES)}") from None
        if not h5py.is_hdf5(path):
            raise UsageError(
                f"{path} is not an HDF5 file; prepare_data makes one from idx, npz, csv and text"
            ) from None
        raise UsageError(f"data file {path} is damaged: {error}") from None


def read_info(path: FilePath) -> Info:
    """Check the structure of a data file (not its values) and describe it; UsageError if it is not one."""
    with open_file(path) as file:
        for group in ("train", "test"):
            _check_group(path, file, group)
        features = file["train/x"].shape[1:]
        if file["test/x"].shape[1:] != features:
            raise UsageError(f"{path}: rows have shape {features} in train/x, but {file['test/x'].shape[1:]} in test/x")
        classes, scale = _classes(path, file), _number(path, file, "scale", 1.0)
        return Info(
            path=str(path),
            name=_text(file.attrs.get("name", Path(path).stem)),
            features=features,
            classes=classes,
            scale=scale,
            rows={group: len(file[group]["x"]) for group in ("train", "test")},
            kinds={group: file[group]["x"].dtype for group in ("train", "test")},
            vocabulary=_vocabulary(path, file, classes, scale) if "vocabulary" in file.attrs else None,
        )


def vocabulary_of(name_or_path: str) -> Vocabulary | None:
    """What the tokens of a text stand for; None for other data. UsageError if it is no data file."""
    return read_info(find(name_or_path)).vocabulary


def _check_group(path: FilePath, file: h5py.File, group: str) -> None:
    for name in ("x", "y"):
        if not isinstance(file.get(f"{group}/{name}"), h5py.Dataset):
            raise UsageError(f"{path} has no data set {group}/{name}; a data file holds x and y in train and in test")
    x, y = file[f"{group}/x"], file[f"{group}/y"]
    for dataset in (x, y):
        if dataset.dtype.kind not in "iuf":
            where = f"{path}: {dataset.name[1:]}"
            raise UsageError(f"{where} holds elements of type {dataset.dtype}; it must hold integers or floats")
    if len(x.shape or ()) < 2 or 0 in x.shape[1:]:
        raise UsageError(f"{path}: {group}/x has shape {x.shape}; it must have shape (rows, features...)")
    if y.shape != x.shape[:1]:
        raise UsageError(f"{path}: {group}/x has {len(x)} rows, but {group}/y has shape {y.shape}")
    if len(x) == 0:
        raise UsageError(f"{path}: {group} has no rows")


def _number(path: FilePath, file: h5py.File, name: str, default: float) -> float:
    value = file.attrs.get(name, default)
    if not isinstance(value, (int, float, np.number)) or not np.isfinite(value) or value == 0:
        raise UsageError(f"{path}: the attribute {name} is {value!r}; it must be a number other than 0")
    return float(value)


def _classes(path: FilePath, file: h5py.File) -> int:
    labels = [file["train/y"], file["test/y"]]
    whole = all(y.dtype.kind in "iu" for y in labels)
    if "classes" not in file.attrs:
        classes = max(int(y[...].max()) for y in labels) + 1 if whole else 0
    else:
        classes = file.attrs["classes"]
    if not isinstance(classes, (int, np.integer)) or classes < 0 or classes == 1:
        raise UsageError(f"{path}: the number of classes is {classes}; it must be 0 (regression), or 2 or more")
    if classes and not whole:
        raise UsageError(
            f"{path}: y holds floats, but the attribute classes says {classes}; class numbers are integers"
        )
    return int(classes)


def _vocabulary(path: FilePath, file: h5py.File, classes: int, scale: float) -> Vocabulary:
    value = file.attrs["vocabulary"]
    try:
        vocabulary = Vocabulary([_text(each) for each in value] if np.ndim(value) else _text(value))
    except UsageError as error:
        raise UsageError(f"{path}: the attribute vocabulary: {error}") from None
    for group in ("train", "test"):
        x = file[group]["x"]
        if x.dtype.kind != "u" or x.ndim != 2:
            where = f"{path}: {group}/x is {x.dtype} of shape {x.shape}"
            raise UsageError(f"{where}; a text has tokens (rows, length) as unsigned integers")
    if classes != len(vocabulary) or scale != 1:
        raise UsageError(
            f"{path}: classes is {classes} and scale {scale:g}, but the vocabulary has {len(vocabulary)} tokens; "
            f"a text has classes {len(vocabulary)} and scale 1"
        )
    return vocabulary


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def check_x(
    x: np.ndarray,
    where: str,
    rows: Sequence[int] | np.ndarray | None = None,
    vocabulary: Vocabulary | None = None,
) -> None:
    """UsageError if a float array has a NaN or an infinity, or tokens lie outside their vocabulary.

    rows: the numbers its rows have in the data.
    """
    if vocabulary is not None and x.size and x.max() >= len(vocabulary):
        row, column = map(int, np.unravel_index(int(np.argmax(x >= len(vocabulary))), x.shape))
        number = row if rows is None else rows[row]
        tokens = len(vocabulary)
        raise UsageError(
            f"{where} has the token {x[row, column]} in row {number}; with {tokens} tokens, 0 to {tokens - 1} exist"
        )
    if x.dtype.kind == "f" and not (finite := np.isfinite(x)).all():
        row = int(np.argmin(finite.all(axis=tuple(range(1, x.ndim)))))
        row = row if rows is None else rows[row]
        raise UsageError(f"{where} has a NaN or an infinity (as {x.dtype}) in row {row}; clean the data first")


def check_y(y: np.ndarray, classes: int, where: str) -> None:
    """UsageError if a label lies outside the classes, or a value to predict is not finite."""
    if classes == 0:
        check_x(y, where)
    elif y.min() < 0 or y.max() >= classes:
        row = int(np.argmax((y < 0) | (y >= classes)))
        raise UsageError(
            f"{where} has the label {y[row]} in row {row}; with {classes} classes, 0 to {classes - 1} exist"
        )


def slabs(rows: int, row_bytes: int, multiple: int = 1) -> Iterator[slice]:
    """Cut range(rows) into slices of about SLAB_BYTES, each but the last a multiple of so many rows."""
    length = max(1, SLAB_BYTES // max(1, row_bytes * multiple)) * multiple
    for start in range(0, rows, length):
        yield slice(start, min(start + length, rows))


def slabs_of(dataset: h5py.Dataset) -> Iterator[slice]:
    """The slabs in which to read an HDF5 data set: whole chunks, so that none is decompressed twice."""
    row_bytes = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:]))
    return slabs(len(dataset), row_bytes, dataset.chunks[0] if dataset.chunks else 1)


@contextlib.contextmanager
def new_file(path: FilePath) -> Iterator[h5py.File]:
    """An HDF5 file to write, which gets its name when all went well and leaves nothing when not."""
    with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        yield file
