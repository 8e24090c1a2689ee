"""The sum of squares against numpy in float64."""

import numpy as np
import pytest

from hpcdl.kernels.norm import sum_of_squares


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [0, 1, 3, 1000])
def test_sum_of_squares(size, dtype):
    x = np.random.default_rng(size).standard_normal(size).astype(dtype)
    np.testing.assert_allclose(sum_of_squares(x), (x.astype("float64") ** 2).sum(), rtol=1e-13)


def test_float32_is_summed_in_float64():
    assert sum_of_squares(np.full(3, 1e30, "float32")) == pytest.approx(3e60)  # beyond the largest float32
    x = np.ones(2**24 + 2, "float32")
    assert sum_of_squares(x) == 2**24 + 2  # not a float32


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_are_not_hidden(bad, dtype):
    x = np.ones(1000, dtype)
    x[77] = bad
    assert not np.isfinite(sum_of_squares(x))
