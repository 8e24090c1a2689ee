"""The binomial tree: 2 (N - 1) messages of K values in 2 ceil(log2 N) steps; its halves are reduce and broadcast."""

import math

import numpy as np
import pytest

from hpcdl.comm import Communicator


def test_counts(bare):
    comm, length = Communicator(bare, allreduce="tree"), 1009
    comm.all_reduce(np.ones(length))
    counted = comm.traffic["all_reduce"]
    assert counted.bytes == counted.messages * length * 8
    if comm.rank == 0:
        assert counted.messages == math.ceil(math.log2(comm.size))
    total = np.array([counted.messages])
    comm.reduce(total)
    assert comm.rank != 0 or total[0] == 2 * (comm.size - 1)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_reduce_changes_the_root_only(op, bare):
    comm = Communicator(bare)
    rows = np.random.default_rng(2).integers(-50, 50, (comm.size, 2, 9)).astype("float64")
    for root in range(comm.size):
        mine = rows[comm.rank].copy()
        comm.reduce(mine, root, op)
        wanted = getattr(rows, op)(0) if comm.rank == root else rows[comm.rank]
        assert np.allclose(mine, wanted, rtol=1e-15, atol=0)


def test_broadcast_from_every_root(bare):
    comm = Communicator(bare)
    for root in range(comm.size):
        mine = np.full((3, 2), comm.rank, "int64")
        comm.broadcast(mine, root)
        assert (mine == root).all()
    total = np.array([comm.traffic["broadcast"].messages])
    comm.reduce(total)
    assert comm.rank != 0 or total[0] == comm.size * (comm.size - 1)  # N - 1 messages for each of N roots
