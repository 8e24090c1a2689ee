"""Halving and doubling: the ring's bytes in 2 log2 N messages, where N is a power of two; else as test_circulant.py."""

import numpy as np
import pytest

from hpcdl.comm import Communicator


@pytest.mark.parametrize("length", [0, 5, 1024])
def test_counts(length, bare):
    comm = Communicator(bare, allreduce="recursive")
    comm.all_reduce(np.ones(length))
    counted, size = comm.traffic["all_reduce"], comm.size
    if size & (size - 1) == 0:
        assert counted.messages == 2 * (size.bit_length() - 1)
    if length % size == 0:
        assert counted.bytes == 8 * 2 * (size - 1) * length // size
