"""The largest of a part of a row, against numpy."""

import numpy as np
import pytest

from hpcdl.kernels import largest
from hpcdl.kernels.bind import block


@block("T[:, ::1], int64, T[::1]")
def tops_of(z, count, tops):
    """tops[i] = the largest of the first `count` of each row."""
    for i in range(z.shape[0]):
        tops[i] = largest.largest(z, i, count)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("center", [-20, 0, 20])  # negative, both, positive
def test_the_largest_of_the_first(count, center, dtype):
    z = (center + 5 * np.random.default_rng(count).standard_normal((50, 100))).astype(dtype)
    tops = np.empty(50, dtype)
    tops_of(z, count, tops)
    np.testing.assert_array_equal(tops, z[:, :count].max(axis=1))
    assert tops[3] == largest.largest(z, 3, count)


def test_every_kind_of_number_has_its_place(dtype):
    about = np.finfo(dtype)
    small, large = about.smallest_subnormal, about.max
    numbers = np.array([-np.inf, -large, -1, -small, 0, small, 1, large, np.inf], dtype)
    for top in range(1, len(numbers) + 1):
        tops = np.empty(1, dtype)
        tops_of(np.random.default_rng(top).permutation(numbers[:top])[None], top, tops)
        assert tops[0] == numbers[top - 1]


def test_nan_is_passed_over(dtype):
    tops = np.empty(4, dtype)
    z = np.array([[np.nan, -2, -3], [-2, -np.nan, -3], [np.nan, np.nan, np.nan], [np.nan, -np.inf, 1]], dtype)
    tops_of(z, 3, tops)
    np.testing.assert_array_equal(tops, [-2, -2, -np.inf, 1])
    tops_of(z, 0, tops)
    np.testing.assert_array_equal(tops, -np.inf)
    assert [largest.largest(z, i, 3) for i in range(4)] == [-2, -2, -np.inf, 1]
