"""The sum of squares against numpy in float64."""

import numpy as np
import pytest

from hpcdl.kernels.norm import sum_of_squares


def test_float32_is_summed_in_float64():
    assert sum_of_squares(np.full(3, 1e30, "float32")) == pytest.approx(3e60)  # beyond the largest float32
    x = np.ones(2**24 + 2, "float32")
    assert sum_of_squares(x) == 2**24 + 2  # not a float32
