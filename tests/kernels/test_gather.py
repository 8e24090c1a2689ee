"""Gather kernels against numpy."""

import numpy as np
import pytest

from hpcdl.kernels.gather import gather, gather_images


def read_only(array):
    array = np.ascontiguousarray(array).view()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("out", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["u1", "i2", "i8", "f4", "f8"])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_gather_picks_converts_and_scales(kind, out, rows):
    random = np.random.default_rng(rows)
    source = read_only((100 * random.random((50, 13))).astype(kind))
    index = random.integers(0, 50, rows)
    got = np.full((rows, 13), np.nan, out)
    gather[out](source, index, 1 / 16, got)
    np.testing.assert_array_equal(got, (source[index].astype(out) * np.dtype(out).type(1 / 16)))


def test_gather_images_without_a_move_is_gather():
    source, index, still = read_only(np.arange(60, dtype="u1").reshape(4, 15)), np.array([3, 0, 0]), np.zeros(3, int)
    got, want = np.empty((2, 3, 15), "f4")
    gather["float32"](source, index, 0.1, want)
    gather_images["float32"](source, index, 0.1, 3, 5, 1, still, still, still, got)
    np.testing.assert_array_equal(got, want)
