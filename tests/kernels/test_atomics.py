"""Additions of several threads to one number are not lost; compare-and-swap compares bits."""

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest

from hpcdl.kernels import atomics

TIMES, THREADS = 300_000, 4


@numba.njit(nogil=True)
def add(to, value, places, words):
    """Add to one place after the other, so that no compiler can add up first."""
    for place in places:
        atomics.atomic_add(np.int64(to.ctypes.data) + place * to.itemsize, value)


@numba.njit(nogil=True)
def add_locked(to, value, places, words):
    for place in places:
        atomics.lock(atomics.place(words, 0), 10)
        to[place] += value
        atomics.unlock(atomics.place(words, 0))


@numba.njit(nogil=True)
def add_by_swap(to, value, places, words):
    for place in places:
        there = atomics.place(to, place)
        old = atomics.read(there, value)
        while not atomics.compare_and_swap(there, old, old + value):
            old = atomics.read(there, value)


WAYS = [(add, "float64"), (add, "float32"), (add, "int64"), (add_locked, "float32"), (add_by_swap, "float32")]


@pytest.mark.parametrize("way, dtype", WAYS)
def test_no_addition_is_lost(way, dtype):
    to, words = np.zeros(3, dtype), np.zeros(8, np.int64)
    one, places = to.dtype.type(1), np.random.default_rng(0).integers(0, 3, TIMES if way is add else 20_000)
    way(to, one, places[:0], words)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda _: way(to, one, places, words), range(THREADS)))
    assert np.array_equal(to, THREADS * np.bincount(places))  # whole numbers below 2^24, also in float32
    assert words[0] == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_are_swapped_bit_by_bit(dtype):
    swap = numba.njit(lambda array, old, new: atomics.compare_and_swap(atomics.place(array, 1), old, new))
    array = np.array([1, 0.0, 3], dtype)
    assert not swap(array, dtype(-0.0), dtype(5)) and array[1] == 0
    assert swap(array, dtype(0.0), dtype(5)) and array.tolist() == [1, 5, 3]
    array[1] = np.nan
    assert swap(array, dtype(np.nan), dtype(7)) and array[1] == 7
