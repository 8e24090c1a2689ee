"""Numbers of single examples: those of all in their order on rank 0, and given back to whoever has the example."""

import numpy as np
import pytest

from hpcdl.checkpoint.by_example import ByExample
from hpcdl.comm import Communicator


@pytest.mark.parametrize("width", [1, 3])
def test_gathered_in_order_and_given_to_others(width, bare):
    comm, examples = Communicator(bare), 11
    owners = np.random.default_rng(5).integers(0, bare.size, examples)
    owners[owners == 1] = 0  # rank 1 has none
    before = np.flatnonzero(owners == bare.rank)
    after = np.arange(bare.rank, examples, bare.size)
    whole = np.arange(examples * width, dtype=float).reshape(examples, width)
    held = ByExample(comm, whole[before].copy(), before, examples)
    assert held.form(9) == ((examples, width), np.dtype(float)) and held.stored("a") == "a"
    found = held.gather(comm)
    assert (found is None) == (bare.rank > 0) and (found is None or np.array_equal(found, whole))
    other = ByExample(comm, np.zeros((len(after), width)), after, examples)
    other.scatter(comm, found)
    assert np.array_equal(other.array, whole[after])
    comm.free()
