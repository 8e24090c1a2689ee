"""Broadcast and reduce along a chain: values, messages, steps; and which lengths take it."""

import itertools
import math

import numpy as np
import pytest
from local_ranks import run_locally

from hpcdl.comm import Communicator, node_memory
from hpcdl.comm.operations import SUM
from hpcdl.comm.primitives import LATENCY_BYTES, chain


@pytest.mark.parametrize("size", [*range(1, 10), 16])
def test_values_messages_and_steps_of_any_number_of_ranks(alone, size):
    """A rank sends each segment once, except the last of the chain; the last segment arrives in step N - 2 + s."""
    for root, (length, segments) in itertools.product({0, size // 2, size - 1}, [(0, 1), (3, 5), (20, 1), (23, 4)]):
        rows = np.random.default_rng(length).integers(-9, 9, (size, length)).astype("float64")
        vectors = list(rows.copy())
        comms, taken = run_locally(chain.chain_broadcast.steps, vectors, segments, root)
        assert all((vector == rows[root]).all() for vector in vectors)
        check_sent(comms, (root - 1) % size, length, segments)
        vectors = list(rows.copy())
        summed, steps = run_locally(chain.chain_reduce.steps, vectors, segments, SUM, root)
        assert (vectors[root] == rows.sum(0)).all()
        check_sent(summed, root, length, segments)
        assert size == 1 or taken == steps == size - 2 + segments + 1  # and a wait for what was sent


def check_sent(comms, last, length, segments):
    sent = [(comm.values, comm.messages) for comm in comms]
    assert sent == [(0, 0) if rank == last else (length, segments) for rank in range(len(comms))]


@pytest.mark.parametrize("size", [2, 3, 4, 7, 64, 1000])
def test_the_faster_schedule_and_the_best_number_of_segments(alone, size):
    """Of the tree and all numbers of segments; the time is close to the closed form of the minimum."""
    for bytes in (0, 1, 1000, LATENCY_BYTES, 10**6, 10**8):
        steps, segments = chain.fastest(size, bytes, True)
        taken = steps * (LATENCY_BYTES + bytes / segments)
        tree = math.ceil(math.log2(size)) * (LATENCY_BYTES + bytes)
        along = [(size - 2 + s) * (LATENCY_BYTES + bytes / s) for s in range(1, 5000)]
        assert min(tree, *along) <= taken <= min(tree, 1.01 * min(along))
        if segments > 1:
            least = (math.sqrt((size - 2) * LATENCY_BYTES) + math.sqrt(bytes)) ** 2
            assert least * (1 - 1e-12) <= taken <= 1.05 * least
        assert chain.fastest(size, bytes, False) == (math.ceil(math.log2(size)), 1)
    assert segments > 1 or size == 2
    assert chain.fastest(size, 1000, True) == (math.ceil(math.log2(size)), 1)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_on_a_communicator(op, bare, call, monkeypatch):
    """Each rank is a node of its own, and a vector of 8 kB is a long one."""
    monkeypatch.setattr(chain, "LATENCY_BYTES", 64)
    monkeypatch.setattr(node_memory, "ranks_of_node", lambda comm: comm.Split(comm.rank))
    comm, length = Communicator(bare), 1009
    _, segments = chain.fastest(comm.size, 8 * length, True)
    assert segments > 1 or comm.size < 3
    rows = np.random.default_rng(3).standard_normal((comm.size, length))
    for root in range(comm.size):
        mine, again = rows[comm.rank].copy(), rows[comm.rank].copy()
        call(comm, "reduce", mine, root, op)
        call(comm, "reduce", again, root, op)
        assert (mine == again).all()  # the same bits in every run
        wanted = getattr(rows, op)(0) if comm.rank == root else rows[comm.rank]
        assert np.allclose(mine, wanted, rtol=1e-13, atol=1e-13)
        call(comm, "broadcast", mine, root)
        assert np.allclose(mine, getattr(rows, op)(0), rtol=1e-13, atol=1e-13)
    if comm.size > 2:  # last in one chain of each kind
        for name, times in (("broadcast", 1), ("reduce", 2)):
            counted, sends = comm.traffic[name], times * (comm.size - 1)
            assert (counted.messages, counted.bytes) == (sends * segments, sends * 8 * length)
