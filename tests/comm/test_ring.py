"""Rank r sends 2 K - k(r+1) - k(r+2) values in 2 (N - 1) messages; its halves are reduce-scatter and all-gather."""

import numpy as np
import pytest
from local_ranks import circulant_traffic

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.allreduce import circulant, ring


def chunk_length(length, size, index):
    cut = chunks(length, size)[index % size]
    return cut.stop - cut.start


@pytest.mark.parametrize("length", [0, 1, 5, 12, 1009])
def test_counts(length, bare):
    comm = Communicator(bare, allreduce="ring")
    comm.all_reduce(np.ones(length, "float32"))
    counted, after = comm.traffic["all_reduce"], [chunk_length(length, comm.size, comm.rank + i) for i in (1, 2)]
    assert counted.messages == 2 * (comm.size - 1)
    assert counted.bytes == (4 * (2 * length - sum(after)) if comm.size > 1 else 0)
    if length % comm.size == 0:
        assert counted.bytes == 4 * 2 * (comm.size - 1) * length // comm.size


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_reduce_scatter_gives_rank_r_chunk_r(op, bare):
    comm = Communicator(bare)
    rows = np.random.default_rng(2).integers(-50, 50, (comm.size, 29)).astype("float64")
    mine = rows[comm.rank].copy()
    own = comm.reduce_scatter(mine, op)
    cut = chunks(29, comm.size)[comm.rank]
    assert np.shares_memory(own, mine) and own.size == cut.stop - cut.start
    assert np.allclose(own, getattr(rows, op)(0)[cut], rtol=1e-15, atol=0)
    counted = comm.traffic["reduce_scatter"]
    messages = comm.size - 1 if comm.size < 4 else circulant_traffic(29, comm.size, comm.rank)[0][1]
    assert (counted.messages, counted.bytes) == (messages, 8 * (29 - own.size))


def test_all_gather_fills_in_all_chunks(bare):
    comm = Communicator(bare)
    whole = np.arange(23, dtype="int64").reshape(23, 1)
    mine = np.full((23, 1), -1)
    cut = chunks(23, comm.size)[comm.rank]
    mine[cut] = whole[cut]
    comm.all_gather(mine)
    assert np.array_equal(mine, whole)
    sent = 23 - chunk_length(23, comm.size, comm.rank + 1), comm.size - 1
    sent = sent if comm.size < 4 else circulant_traffic(23, comm.size, comm.rank)[1]
    assert (comm.traffic["all_gather"].bytes, comm.traffic["all_gather"].messages) == (8 * sent[0], sent[1])


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_length_decides_whether_the_ring_is_taken(beyond, bare, monkeypatch):
    monkeypatch.setattr(circulant, "SHORT", 8 * 64)
    comm, length = Communicator(bare), 64 + beyond
    rows = np.random.default_rng(2).integers(-50, 50, (comm.size, length)).astype("float64")
    mine = rows[comm.rank].copy()
    comm.reduce_scatter(mine)
    comm.all_gather(mine)
    assert np.array_equal(mine, rows.sum(0))
    messages = [comm.traffic[name].messages for name in ("reduce_scatter", "all_gather")]
    few = [half[1] for half in circulant_traffic(64, comm.size, comm.rank)]
    assert messages == (few if beyond == 0 and comm.size > 3 else [comm.size - 1] * 2)


@pytest.mark.parametrize("length", [200, 1000, 1009, 4001])
def test_long_chunks_travel_in_segments(length, bare, monkeypatch):
    monkeypatch.setattr(ring, "SEGMENT", 100)  # bytes, so 12 float64
    comm = Communicator(bare, allreduce="ring")
    rows = np.random.default_rng(length).integers(-99, 99, (comm.size, length)).astype("float64")
    for _ in range(3):  # segments that meet in an inbox do so now and then
        mine = rows[comm.rank].copy()
        comm.all_reduce(mine)
        assert np.array_equal(mine, rows.sum(0))
    counted, longest = comm.traffic["all_reduce"], chunk_length(length, comm.size, 0)
    after = [chunk_length(length, comm.size, comm.rank + i) for i in (1, 2)]
    assert counted.messages == 3 * 2 * (comm.size - 1) * min(16, -(-longest * 8 // 100))
    assert counted.bytes == (3 * 8 * (2 * length - sum(after)) if comm.size > 1 else 0)
