"""The data file: HDF5, so that any tool can make one and any part of it can be read alone.

    train/x  (n, features...)   integers or floats       attributes of the file
    train/y  (n,)               class numbers, or        scale    the model sees x * scale (default 1)
                                floats to predict        classes  0 for regression (default: from y)
    test/x, test/y              the same                 name     for reports (default: the file's name)

Files are written under a temporary name, synced and renamed: a file that has its final name is whole.
"""

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np

from hpcdl.errors import UsageError, unknown
from hpcdl.files import atomic_path

KNOWN = {"digits": Path(__file__).with_name("digits.h5")}
SLAB_BYTES = 8 << 20  # what is read or written at a time


@dataclasses.dataclass(frozen=True)
class Info:
    """What a data file says of itself; `rows` and `kinds` (element types of x) by group, "train" and "test"."""

    path: str
    name: str
    features: tuple
    classes: int
    scale: float
    rows: dict
    kinds: dict


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
def open_file(path) -> Iterator[h5py.File]:
    """Open a data file for reading; what HDF5 cannot open or read becomes a UsageError."""
    try:
        # No lock: data files appear whole under their name and never change, and some file systems have no locks.
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except OSError as error:
        if not os.access(path, os.R_OK):
            raise UsageError(f"data file {path} cannot be read: {os.strerror(error.errno or errno.EACCES)}") from None
        if not h5py.is_hdf5(path):
            raise UsageError(f"{path} is not an HDF5 file; prepare_data makes one from idx, npz and csv") from None
        raise UsageError(f"data file {path} is damaged: {error}") from None


def read_info(path) -> Info:
    """Check the structure of a data file (not its values) and describe it; UsageError if it is not one."""
    with open_file(path) as file:
        for group in ("train", "test"):
            _check_group(path, file, group)
        features = file["train/x"].shape[1:]
        if file["test/x"].shape[1:] != features:
            raise UsageError(f"{path}: rows have shape {features} in train/x, but {file['test/x'].shape[1:]} in test/x")
        return Info(
            path=str(path),
            name=_text(file.attrs.get("name", Path(path).stem)),
            features=features,
            classes=_classes(path, file),
            scale=_number(path, file, "scale", 1.0),
            rows={group: len(file[group]["x"]) for group in ("train", "test")},
            kinds={group: file[group]["x"].dtype for group in ("train", "test")},
        )


def _check_group(path, file, group):
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


def _number(path, file, name, default):
    value = file.attrs.get(name, default)
    if not isinstance(value, (int, float, np.number)) or not np.isfinite(value) or value == 0:
        raise UsageError(f"{path}: the attribute {name} is {value!r}; it must be a number other than 0")
    return float(value)


def _classes(path, file):
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


def _text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def check_x(x: np.ndarray, where: str, rows: Sequence | None = None):
    """UsageError if a float array has a NaN or an infinity; rows: the numbers its rows have in the data."""
    if x.dtype.kind == "f" and not (finite := np.isfinite(x)).all():
        row = int(np.argmin(finite.all(axis=tuple(range(1, x.ndim)))))
        row = row if rows is None else rows[row]
        raise UsageError(f"{where} has a NaN or an infinity (as {x.dtype}) in row {row}; clean the data first")


def check_y(y: np.ndarray, classes: int, where: str):
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
def new_file(path) -> Iterator[h5py.File]:
    """An HDF5 file to write, which gets its name when all went well and leaves nothing when not."""
    with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        yield file
