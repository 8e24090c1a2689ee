"""Reductions of two vectors, against numpy."""

import numpy as np
import pytest

from hpcdl.comm.operations import OPERATIONS

NUMPY = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


@pytest.mark.parametrize("name", sorted(OPERATIONS))
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32", "uint8"])
@pytest.mark.parametrize("n", [0, 1, 3, 1000])
def test_kernels_do_as_numpy(name, dtype, n):
    random = np.random.default_rng(1)
    x, y = (random.integers(0, 100, n).astype(dtype) for _ in range(2))
    if n > 2 and np.dtype(dtype).kind == "f":
        x[0], y[1] = np.nan, np.nan
    wanted = NUMPY[name](x, y)
    OPERATIONS[name](x, y)
    assert np.array_equal(x, wanted, equal_nan=np.dtype(dtype).kind == "f")
