"""Additions of several threads to one number: none is lost."""

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest

from hpcdl.kernels.atomics import atomic_add

TIMES, THREADS = 300_000, 4


@numba.njit(nogil=True)
def add(to, value, places):
    """To one place after the other, so that no compiler can add up first."""
    for place in places:
        atomic_add(np.int64(to.ctypes.data) + place * to.itemsize, value)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64"])
def test_no_addition_is_lost(dtype):
    to = np.zeros(3, dtype)
    one, places = to.dtype.type(1), np.random.default_rng(0).integers(0, 3, TIMES)
    add(to, one, places[:0])
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda _: add(to, one, places), range(THREADS)))
    assert np.array_equal(to, THREADS * np.bincount(places))  # whole numbers below 2^24, also in float32
