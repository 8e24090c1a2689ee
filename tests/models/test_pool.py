"""A buffer is lent once at a time and reused, and the number of buffers is bounded."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.models.pool import Pool


@pytest.mark.parametrize("shape", [(0, 5), (1,), (1, 1), (3, 4), (4, 4), (17,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shape_and_type(shape, dtype):
    buffer = Pool(dtype).take(*shape)
    assert buffer.shape == shape and buffer.dtype == dtype and buffer.flags.c_contiguous and buffer.flags.writeable


def test_a_buffer_comes_back():
    pool = Pool("float32")
    first = pool.take(30, 30)
    first[...] = 5
    pool.give(first)
    assert np.shares_memory(pool.take(29, 31), first)  # another shape of the same class
    assert not np.shares_memory(pool.take(30, 30), first)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 70), st.none()), max_size=40))
def test_lent_buffers_never_overlap_and_their_number_is_bounded(requests):
    """A number asks for that many elements, None gives the oldest buffer back."""
    pool, lent, most = Pool("float64"), [], 0
    for request in requests:
        if request is None:
            if lent:
                pool.give(lent.pop(0))
        else:
            buffer = pool.take(request)
            assert not any(np.shares_memory(buffer, other) for other in lent)
            lent.append(buffer)
        most = max(most, len(lent))
    for buffer in lent:
        pool.give(buffer)
    assert all(len(free) <= most for free in pool.free.values())
    assert all(buffer.size == 1 << k for k, free in pool.free.items() for buffer in free)  # whole ones


def test_on_a_device(gpu):
    pool = Pool("float64", gpu)
    first = pool.take(3, 4)
    pool.give(first)
    again = pool.take(2, 6)
    assert gpu.holds(first) and again.base is first.base and pool.take(3, 4).base is not first.base
