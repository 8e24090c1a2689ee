"""Sparse rows for tests, as dense arrays and as files that are written by hand."""

import h5py
import numpy as np


def make_sparse(rows=60, test=16, width=23, classes=3, seed=0):
    """Arrays x, y, x_test, y_test: a tenth or so is not zero; row 3 is empty, row 5 full; x[:, 0] tells."""
    random = np.random.default_rng(seed)
    x, x_test = (random.integers(1, 99, (n, width)) * (random.random((n, width)) < 0.15) / 4 for n in (rows, test))
    for part in (x, x_test):
        part[:, 0] = np.arange(len(part)) + 1
        part[3], part[5] = 0, 7.25
    return x, np.arange(rows) * 7 % classes, x_test, np.arange(test) * 5 % classes


def put_sparse(group, x, features=None, indptr="i8", indices="i4", chunks=None):
    """Write dense rows as sparse ones."""
    row, column = np.nonzero(x)
    group.create_dataset("data", data=x[row, column], chunks=chunks)
    group.create_dataset("indices", data=column.astype(indices), chunks=chunks)
    group.create_dataset("indptr", data=np.append(0, np.cumsum((x != 0).sum(1))).astype(indptr), chunks=chunks)
    group.attrs["features"] = x.shape[1] if features is None else features


def write_sparse(path, x, y, x_test=None, y_test=None, attributes=(), **how):
    """A file of such rows."""
    with h5py.File(path, "w") as file:
        for name, part, labels in (("train", x, y), ("test", x_test, y_test)):
            if part is not None:
                put_sparse(file.create_group(f"{name}/x"), part, **how)
                file[f"{name}/y"] = labels
        file.attrs.update(dict(attributes))
    return path
