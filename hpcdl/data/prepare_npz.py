"""From numpy's npz archives, as numpy.savez and numpy.savez_compressed write them."""

import os

import numpy as np

from hpcdl.data.format import FilePath, Info, check_memory, short, shown
from hpcdl.data.prepare import Output, class_numbers, picked, pixels, split
from hpcdl.errors import UsageError, blamed_on


def prepare_npz(
    path: FilePath, output: Output, *, regression: bool = False, test_fraction: float | None = None, seed: int = 0
) -> Info:
    """From numpy's npz with x, y (or x_train, y_train) and, or not, x_test, y_test (else a test fraction of 0.2)."""
    arrays = load_npz(path)
    x, y = (_member(path, arrays, name, f"{name}_train") for name in "xy")
    own = [name for name in ("x_test", "y_test") if name in arrays]
    if len(own) == 1:
        raise UsageError(f"{path} has {own[0]} alone; it needs both x_test and y_test, or none")
    if own and test_fraction is not None:
        raise UsageError(f"{path} has a test set of its own (x_test, y_test): leave --test-fraction out")
    xs, ys = ([x, arrays["x_test"]], [y, arrays["y_test"]]) if own else ([x], [y])
    ys = [labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels for labels in ys]
    for rows, labels in zip(xs, ys, strict=True):
        if rows.dtype.kind not in "biuf" or rows.ndim < 2 or rows.shape[1:] != x.shape[1:] or 0 in rows.shape:
            raise UsageError(
                f"{path}: x is {rows.dtype} of shape {rows.shape}; it must hold numbers (rows, features...)"
            )
        if labels.shape != rows.shape[:1]:
            raise UsageError(
                f"{path}: x has {len(rows)} rows, but y has shape {labels.shape}; it must be ({len(rows)},)"
            )
    ys, names, classes = class_numbers(path, ys, regression)
    kind = np.result_type(*xs)
    low, high = min(rows.min() for rows in xs), max(rows.max() for rows in xs)
    kind, scale = pixels(low, high, kind.kind in "biu", kind)
    if not own:
        groups = split(x, ys[0], classes, kind, 0.2 if test_fraction is None else test_fraction, seed)
    else:
        groups = {
            group: (rows.shape, picked(rows, np.arange(len(rows)), kind), labels, {})
            for group, rows, labels in zip(("train", "test"), xs, ys, strict=True)
        }
    return output.write(groups, kind, scale, names, classes)


def load_npz(path: FilePath) -> dict[str, np.ndarray]:
    """The arrays of an npz archive by name. UsageError for what is none."""
    if not os.path.exists(path):
        raise UsageError(f"{path} does not exist")
    with blamed_on(f"{path} cannot be read as npz"):
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise UsageError(f"{path} holds one array; npz wants an archive with x and y (numpy.savez)")
        with archive:
            check_memory(sum(each.file_size for each in archive.zip.infolist()), f"{path}: its arrays")
            arrays = {name: archive[name] for name in archive.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy hands out what is no array as bytes
            raise UsageError(f"{path}: {shown(name)} is no array of numpy's")
    return arrays


def _member(path: FilePath, arrays: dict[str, np.ndarray], *names: str) -> np.ndarray:
    for name in names:
        if name in arrays:
            return arrays[name]
    others = short(", ".join(sorted(arrays)), 200) or "none"
    raise UsageError(f"{path} has no array {' or '.join(names)}; it has {others}")
