"""Halving and doubling: the ring's bytes in 2 log2 N messages, where N is a power of two; else some ranks fold away."""

import numpy as np
import pytest

from hpcdl.comm import Communicator


@pytest.mark.parametrize("length", [0, 5, 1024])
def test_counts(length, bare):
    comm = Communicator(bare, allreduce="recursive")
    comm.all_reduce(np.ones(length))
    counted, steps = comm.traffic["all_reduce"], comm.size.bit_length() - 1
    power = 1 << steps
    folded = comm.rank < 2 * (comm.size - power)
    if folded and comm.rank % 2:
        assert (counted.messages, counted.bytes) == (1, 8 * length)
    else:
        assert counted.messages == 2 * steps + folded
        if length % power == 0:
            assert counted.bytes == 8 * (2 * (power - 1) * length // power + folded * length)
