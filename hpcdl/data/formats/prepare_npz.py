"""npz archives of numpy.savez, numpy.savez_compressed and scipy.sparse.save_npz, as a data file or as rows to predict.
An archive of scipy holds a sparse matrix (data, indices, indptr, shape) in place of x; a data file needs y, too.

A folder of x.npy, y.npy, x_test.npy, y_test.npy stands for an archive of these arrays. They are mapped into memory, and
read slab by slab: x may be larger than the memory."""

import os
from functools import partial
from typing import Any

import numpy as np

from hpcdl.csr import COLUMN, CSR, MOST_FEATURES, START
from hpcdl.data.batch import PredictionRows, RowBlock, in_blocks
from hpcdl.data.format import Info
from hpcdl.data.formats.prepare import Output, class_numbers, select_rows, split, storage_type
from hpcdl.data.formats.sparse_file import sparse_rows
from hpcdl.data.hdf5 import FilePath, check_memory, short, shown
from hpcdl.errors import UsageError, blamed_on

ARRAYS = ("x", "y", "x_train", "y_train", "x_test", "y_test")
SPARSE = {"data", "indices", "indptr", "shape", "format"}  # what scipy.sparse.save_npz writes


def prepare_npz(
    path: FilePath, output: Output, *, regression: bool = False, test_fraction: float | None = None, seed: int = 0
) -> Info:
    """Make a data file of x, y (or x_train, y_train), and x_test, y_test if present (else a test fraction of 0.2).
    path: of an archive, or of a folder of arrays."""
    with blamed_on(f"{shown(path, 200)} cannot be read"):  # a name may be too long
        folder = os.path.isdir(path)
    arrays = map_arrays(path) if folder else load_npz(path)
    if set(arrays) >= SPARSE:  # rows in their own type, with scale 1
        matrix = sparse_matrix(path, arrays)
        if "y" not in arrays:
            hint = "add the labels: numpy.savez('new.npz', y=y, **numpy.load('old.npz'))"
            raise UsageError(f"{path} has no array y; {hint}")
        _check_labels(path, matrix, arrays["y"])
        (y,), names, classes = class_numbers(path, [arrays["y"]], regression)
        kind = matrix.dtype.newbyteorder("=")
        groups = split(matrix, y, classes, kind, test_fraction, seed)
        return output.write(groups, kind, 1.0, names, classes, sparse=True)
    x, y = (_member(path, arrays, name, f"{name}_train") for name in "xy")
    test_arrays = [name for name in ("x_test", "y_test") if name in arrays]
    if len(test_arrays) == 1:
        raise UsageError(f"{path} has {test_arrays[0]} alone; it needs both x_test and y_test, or none")
    if test_arrays and test_fraction is not None:
        raise UsageError(f"{path} has a test set of its own (x_test, y_test): leave --test-fraction out")
    xs, ys = ([x, arrays["x_test"]], [y, arrays["y_test"]]) if test_arrays else ([x], [y])
    ys = [labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels for labels in ys]
    for rows, labels in zip(xs, ys, strict=True):
        if rows.dtype.kind not in "biuf" or rows.ndim < 2 or rows.shape[1:] != x.shape[1:] or 0 in rows.shape:
            what = "it must hold numbers (rows, features...)"
            raise UsageError(f"{path}: x is {rows.dtype} of shape {rows.shape}; {what}")
        _check_labels(path, rows, labels)
    ys, names, classes = class_numbers(path, ys, regression)
    kind = np.result_type(*xs)
    low, high = min(rows.min() for rows in xs), max(rows.max() for rows in xs)
    kind, scale = storage_type(low, high, kind.kind in "biu", kind)
    if not test_arrays:
        groups = split(x, ys[0], classes, kind, test_fraction, seed)
    else:
        parts = [(rows.shape, select_rows(rows, np.arange(len(rows)), kind)) for rows in xs]
        groups = {group: (*part, y, {}) for group, part, y in zip(("train", "test"), parts, ys, strict=True)}
    return output.write(groups, kind, scale, names, classes)


def npz_rows(path: str, ranks: int) -> PredictionRows:
    """Return the rows to predict of an archive: the array x, else x_test or x_train; or a sparse matrix."""
    arrays = load_npz(path)
    if set(arrays) >= SPARSE:
        return array_rows(sparse_matrix(path, arrays), path, ranks)
    name = next((each for each in ("x", "x_test", "x_train") if each in arrays), None)
    if name is None:
        others = ", ".join(sorted(map(shown, arrays))) or "none"
        raise UsageError(f"{path} has no array x, x_test or x_train; it has {others}")
    return array_rows(arrays[name], f"{path}: {name}", ranks)


def array_rows(x: Any, name: str, ranks: int) -> PredictionRows:
    """Return the rows to predict of an array or a CSR, called `name`."""
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise UsageError(f"{name} is {x.dtype} of shape {x.shape}; it must hold numbers (rows, features...)")
    x = x.view(np.uint8) if x.dtype == bool else x

    def load(part: slice) -> RowBlock:
        return RowBlock(x[part].copy() if isinstance(x, CSR) else x[part], np.arange(part.start, part.stop))

    blocks = partial(in_blocks, load, len(x), x.shape[1:], ranks, x.nnz if isinstance(x, CSR) else None)
    return PredictionRows(name, blocks, features=x.shape[1:])


def load_npz(path: FilePath) -> dict[str, np.ndarray]:
    """Return the arrays of an npz archive by name; UsageError if the file is no npz archive."""
    if not os.path.exists(path):
        raise UsageError(f"{path} does not exist")
    with blamed_on(f"{path} cannot be read as npz"):
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise UsageError(f"{path} holds one array; give an archive, or a folder, with arrays x and y")
        with archive:
            check_memory(sum(each.file_size for each in archive.zip.infolist()), f"{path}: its arrays")
            arrays = {name: archive[name] for name in archive.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy returns other members as bytes
            raise UsageError(f"{path}: {shown(name)} is no array of numpy's")
    return arrays


def map_arrays(folder: FilePath) -> dict[str, np.ndarray]:
    """Return the arrays of a folder by name, mapped into memory. Raises UsageError."""
    arrays = {}
    for name in ARRAYS:
        if os.path.exists(path := os.path.join(folder, f"{name}.npy")):
            with blamed_on(f"{path} cannot be read"):
                arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
            if not isinstance(arrays[name], np.ndarray):
                raise UsageError(f"{path} is an archive; unpack it")
    return arrays


def sparse_matrix(path: FilePath, arrays: dict[str, np.ndarray]) -> CSR:
    """Return the sparse rows of an archive of scipy; UsageError if they are invalid."""
    layout = arrays["format"].tolist()
    if layout not in ("csr", b"csr"):
        raise UsageError(f"{path} holds a sparse matrix in the form {shown(layout)}; save it as csr (x.tocsr())")
    data, indices, indptr, shape = (arrays[name] for name in ("data", "indices", "indptr", "shape"))
    kinds = data.dtype.kind, indices.dtype.kind, indptr.dtype.kind, shape.dtype.kind
    fits = all(each.ndim == 1 for each in (data, indices, indptr, shape)) and shape.shape == (2,)
    if not fits or kinds[0] not in "biuf" or set(kinds[1:]) - set("iu") or len(data) != len(indices):
        raise UsageError(f"{path}: data, indices, indptr and shape are no sparse matrix of numbers")
    rows, width = map(int, shape)
    if not 1 <= width < MOST_FEATURES or rows < 1 or len(indptr) != rows + 1 or (indices > MOST_FEATURES).any():
        raise UsageError(f"{path}: its indices and indptr do not fit its shape {shape.tolist()}")
    data = data.view(np.uint8) if data.dtype == bool else data
    matrix = CSR(data, indices.astype(COLUMN, copy=False), indptr.astype(START, copy=False), (rows, width))
    return sparse_rows(matrix, f" of {path}")


def _check_labels(path: FilePath, x: Any, y: np.ndarray) -> None:
    if y.shape != (len(x),):
        raise UsageError(f"{path}: x has {len(x)} rows, but y has shape {y.shape}; it must be ({len(x)},)")


def _member(path: FilePath, arrays: dict[str, np.ndarray], *names: str) -> np.ndarray:
    for name in names:
        if name in arrays:
            return arrays[name]
    others = short(", ".join(sorted(arrays)), 200) or "none"
    raise UsageError(f"{path} has no array {' or '.join(names)}; it has {others}")
