"""Row s of rank r becomes row r of rank s: pairwise, and by Bruck's scheme, in ceil(log2 N) messages."""

import math

import numpy as np
import pytest
from local_ranks import run_locally

from hpcdl.comm import Communicator
from hpcdl.comm.primitives import all_to_all as module
from hpcdl.comm.primitives.all_to_all import bruck_all_to_all, pairwise_all_to_all, saves_time
from hpcdl.errors import UsageError


@pytest.mark.parametrize("steps", [pairwise_all_to_all, bruck_all_to_all], ids=["pairwise", "bruck"])
@pytest.mark.parametrize("size", [*range(1, 10), 16])
def test_rows_and_counts_of_any_number_of_ranks(alone, steps, size):
    for width in (0, 1, 3):
        everyone = np.arange(size * size * width).reshape(size, size, width).astype("float64")
        vectors = [each.reshape(-1).copy() for each in everyone]
        comms, taken = run_locally(steps.steps, vectors)
        assert np.array_equal(np.array(vectors).reshape(size, size, width), everyone.swapaxes(0, 1))
        rows, messages = size - 1, size - 1
        if steps is bruck_all_to_all:
            rows, messages = sum(bin(i).count("1") for i in range(size)), math.ceil(math.log2(size))
        assert taken == messages
        assert {(comm.values, comm.messages) for comm in comms} == {(rows * width, messages)}


def test_bruck_is_for_short_rows_on_many_ranks():
    assert not any(saves_time(size, 1) for size in (1, 2, 3))
    assert saves_time(4, 24_999) and not saves_time(4, 25_000)  # a message less, a row more
    assert saves_time(64, 1000) and not saves_time(64, 100_000)


@pytest.mark.parametrize("latency_bytes", [0, 10**9], ids=["pairwise", "bruck"])
def test_on_a_communicator(bare, call, latency_bytes, monkeypatch):
    monkeypatch.setattr(module, "LATENCY_BYTES", latency_bytes)
    comm = Communicator(bare)
    everyone = np.arange(comm.size * comm.size * 6).reshape(comm.size, comm.size, 2, 3).astype("float32")
    mine = everyone[comm.rank].copy()
    call(comm, "all_to_all", mine)
    assert np.array_equal(mine, everyone[:, comm.rank])
    few = latency_bytes and comm.size > 3
    messages = math.ceil(math.log2(comm.size)) if few else comm.size - 1
    rows = sum(bin(i).count("1") for i in range(comm.size)) if few else comm.size - 1
    counted = comm.traffic["all_to_all"]
    assert (counted.messages, counted.bytes) == (messages, 4 * 6 * rows)


@pytest.mark.mpi(min_size=2)
def test_a_length_that_cannot_be_divided_is_refused(world):
    with pytest.raises(UsageError, match=f"{world.size + 1} elements are no multiple of {world.size} ranks"):
        Communicator(world).all_to_all(np.zeros(world.size + 1))
