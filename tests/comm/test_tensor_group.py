"""Megatron's operators against numpy; f and g with their backwards are transposes; what each of them sends."""

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.comm.allreduce import circulant
from hpcdl.comm.tensor_group import TensorGroup
from hpcdl.errors import UsageError
from hpcdl.models.pool import Pool

WIDTH, PER_RANK = 5, 6


class Watched(Pool):
    """A pool that knows what is lent."""

    def __init__(self, dtype):
        super().__init__(dtype)
        self.lent = 0

    def take(self, *shape):
        self.lent += 1
        return super().take(*shape)

    def give(self, buffer):
        super().give(buffer)
        self.lent -= 1


def of(pool, values):
    """The values in an array from the pool."""
    array = pool.take(*values.shape)
    array[...] = values
    return array


def drawn(size, rows, dtype="float64", seed=0):
    """Whole numbers, (size, rows, WIDTH): an array of each rank, known to all. Their sums and products are exact."""
    return np.random.default_rng(seed).integers(-9, 10, (size, rows, WIDTH)).astype(dtype)


@pytest.mark.parametrize("allreduce", ["ring", "shared", "mpi", "naive"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_without_sequence_parallelism(allreduce, dtype, bare):
    comm, pool = Communicator(bare, allreduce), Watched(dtype)
    group, all_x = TensorGroup(comm), drawn(comm.size, PER_RANK, dtype)
    assert (group.rank, group.size, group.sequence) == (comm.rank, comm.size, False)
    for same in (group.f, group.g_backward):
        x = of(pool, all_x[comm.rank])
        assert same(x, pool) is x and (x == all_x[comm.rank]).all()
        pool.give(x)
    for add in (group.g, group.f_backward):
        y = of(pool, all_x[comm.rank])
        assert add(y, pool) is y and np.array_equal(y, all_x.sum(axis=0))
        pool.give(y)
    assert pool.lent == 0


@pytest.mark.parametrize("rows", [0, 1, PER_RANK])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_with_sequence_parallelism(rows, dtype, bare):
    comm, pool = Communicator(bare, "ring"), Watched(dtype)
    group, size, rank = TensorGroup(comm, sequence=True), comm.size, comm.rank
    own = slice(rank * rows, (rank + 1) * rows)
    assert group.sequence
    for gather in (group.f, group.g_backward):
        parts = drawn(size, rows, dtype)
        x = of(pool, parts[rank])
        whole = gather(x, pool)
        assert whole is not x and (x == parts[rank]).all() and not np.shares_memory(whole, x)
        assert whole.dtype == dtype and np.array_equal(whole, parts.reshape(-1, WIDTH))
        assert pool.lent == 2
        pool.give(whole)
        pool.give(x)
    for scatter in (group.g, group.f_backward):
        all_y = drawn(size, size * rows, dtype)
        part = scatter(of(pool, all_y[rank]), pool)
        assert part.flags.c_contiguous and part.dtype == dtype
        assert np.array_equal(part, all_y.sum(axis=0)[own]) and part.shape == (rows, WIDTH)
        assert pool.lent == 1  # the part; what was given has gone back
        pool.give(part)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_cut_over_ranks_is_the_whole_one(sequence, bare):
    """x A B with A cut by columns and B by rows, and its gradients; with sequence parallelism x and the sum are cut."""
    comm, pool = Communicator(bare, "ring"), Watched("float64")
    group, size, rank = TensorGroup(comm, sequence), comm.size, comm.rank
    x, dz = drawn(2, size * PER_RANK)
    a, b = drawn(1, 4 * size, seed=3)[0].T, drawn(1, 4 * size, seed=4)[0]  # (WIDTH, 4 N), (4 N, WIDTH)
    own, part = slice(rank * PER_RANK, (rank + 1) * PER_RANK), slice(4 * rank, 4 * rank + 4)
    rows = own if sequence else slice(None)

    wide = group.f(of(pool, x[rows]), pool)
    h = wide @ a[:, part]
    z = group.g(of(pool, h @ b[part]), pool)
    assert np.array_equal(z, (x @ a @ b)[rows])
    dy = group.g_backward(of(pool, dz[rows]), pool)
    assert np.array_equal(h.T @ dy, (x @ a).T[part] @ dz)
    dh = dy @ b[part].T
    assert np.array_equal(wide.T @ dh, x.T @ dz @ b[part].T)
    dx = group.f_backward(of(pool, dh @ a[:, part].T), pool)
    assert np.array_equal(dx, (dz @ b.T @ a.T)[rows])


@pytest.mark.parametrize("sequence", [False, True])
def test_what_each_operator_sends(sequence, bare, monkeypatch):
    monkeypatch.setattr(circulant, "SHORT", 0)
    comm, pool = Communicator(bare, "ring"), Watched("float32")
    group, size = TensorGroup(comm, sequence), comm.size
    part, whole = drawn(2, PER_RANK, "float32")[0], drawn(2, size * PER_RANK, "float32")[0]
    half = size - 1, (size - 1) * PER_RANK * WIDTH * 4  # messages and bytes of a reduce-scatter, of an all-gather
    gather, add = {"all_gather": half}, {"reduce_scatter": half}
    if not sequence:
        gather, add = {}, {"all_reduce": (2 * half[0], 2 * half[1])}
    calls = (group.f, part, gather), (group.f_backward, whole, add), (group.g, whole, add)
    for operator, array, wanted in (*calls, (group.g_backward, part, gather)):
        comm.traffic.clear()
        operator(of(pool, array), pool)
        assert {name: (each.messages, each.bytes) for name, each in comm.traffic.items()} == wanted


@pytest.mark.parametrize("sequence", [False, True])
def test_arrays_on_a_gpu(sequence, gpu, bare):
    comm, pool = Communicator(bare, "ring", device=gpu), Pool("float64", gpu)
    group, size, rank = TensorGroup(comm, sequence), comm.size, comm.rank
    own = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
    parts, all_y = drawn(size, PER_RANK), drawn(size, size * PER_RANK)
    for gather in (group.f, group.g_backward):
        whole = gather(of(pool, gpu.array(parts[rank])), pool)
        assert gpu.holds(whole)
        assert np.array_equal(gpu.host(whole), parts.reshape(-1, WIDTH) if sequence else parts[rank])
    for add in (group.g, group.f_backward):
        part, total = add(of(pool, gpu.array(all_y[rank])), pool), all_y.sum(axis=0)
        assert gpu.holds(part) and np.array_equal(gpu.host(part), total[own] if sequence else total)


@pytest.mark.mpi(min_size=2)
def test_rows_that_cannot_be_cut_are_refused(world):
    comm, pool = Communicator(world, "ring"), Watched("float64")
    for add in (TensorGroup(comm, sequence=True).g, TensorGroup(comm, sequence=True).f_backward):
        rows = 2 * comm.size + 1
        with pytest.raises(UsageError, match=f"{rows} rows cannot be cut over {comm.size} ranks.*needs a multiple of"):
            add(pool.take(rows, WIDTH), pool)
