"""Gather kernels against numpy."""

import numpy as np
import pytest

from hpcdl.kernels.gather import gather


@pytest.mark.parametrize("out", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["u1", "i2", "i8", "f4", "f8"])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_gather_picks_converts_and_scales(kind, out, rows):
    random = np.random.default_rng(rows)
    source = (100 * random.random((50, 13))).astype(kind)
    source.flags.writeable = False
    index = random.integers(0, 50, rows)
    got = np.full((rows, 13), np.nan, out)
    gather[out](source, index, 1 / 16, got)
    np.testing.assert_array_equal(got, (source[index].astype(out) * np.dtype(out).type(1 / 16)))
