"""What every all-reduce algorithm must do, one body for all of them: names, types, lengths, sizes, operations."""

import os
import sys
import types

import numpy as np
import pytest
from mpi4py import MPI
from sums import total, values

from hpcdl.comm import Communicator
from hpcdl.comm.allreduce import ALGORITHMS, algorithm
from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError

LENGTHS = [0, 1, 2, 3, 5, 7, 64, 1009, 100_003]


@pytest.fixture(params=sorted(ALGORITHMS))
def name(request):
    return request.param


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32"])
@pytest.mark.in_turn("dtype")
def test_sum_is_exact_on_whole_numbers(name, dtype, bare):
    for length in LENGTHS:
        mine = values(bare.rank, length, dtype)
        ALGORITHMS[name](bare, mine)  # on the bare communicator, as a benchmark would
        assert np.array_equal(mine, total(bare.size, length, dtype))


def test_sum_of_reals_is_within_rounding_and_the_same_bits_on_all_ranks_and_again(name, bare):
    rows = np.random.default_rng(5).standard_normal((bare.size, 4099)).astype("float32")
    first, second = rows[bare.rank].copy(), rows[bare.rank].copy()
    ALGORITHMS[name](bare, first)
    ALGORITHMS[name](bare, second)
    exact, bound = rows.astype("float64").sum(0), bare.size * np.finfo("f4").eps * np.abs(rows).sum(0)
    assert (np.abs(first - exact) <= bound).all()
    assert all(np.array_equal(first, other) for other in bare.allgather(first))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("shape", [(6,), (4, 5), (0, 3)])
@pytest.mark.in_turn("shape")
def test_operations_on_arrays_of_any_shape(name, op, shape, bare):
    comm = Communicator(bare, allreduce=name)
    rows = np.random.default_rng(3).integers(-9, 9, (comm.size, *shape)).astype("float64")
    mine = rows[comm.rank].copy()
    comm.all_reduce(mine, op)
    assert np.allclose(mine, getattr(rows, op)(0), rtol=1e-15, atol=0)


def test_many_in_flight_completed_in_another_order(name, bare):
    comm = Communicator(bare, allreduce=name)
    arrays = [values(comm.rank, length, "float64") for length in LENGTHS]
    requests = [comm.iall_reduce(array) for array in arrays]
    order = np.random.default_rng(comm.rank).permutation(len(requests))  # another one on each rank
    waiting = {int(index) for index in order}
    while waiting:  # only test: a wait for one would not take the others forward
        waiting = {index for index in waiting if not requests[index].test()}
    for array, length in zip(arrays, LENGTHS, strict=True):
        assert np.array_equal(array, total(comm.size, length, "float64"))


@pytest.mark.mpi(min_size=2)
def test_ranks_wait_in_different_orders_and_on_different_operations(name, world):
    comm = Communicator(world, allreduce=name)
    group = comm.split(0)
    first, second, third = np.full(5000, 1.0), np.full(3000, 2.0), np.full(7, 3.0)
    requests = [comm.iall_reduce(first), comm.ireduce(second), group.iall_reduce(third)]
    if comm.rank == 0:  # in a barrier, while the others want the reductions first
        comm.barrier()
    for index in np.roll([0, 1, 2], comm.rank):
        requests[index].wait()
    if comm.rank != 0:
        comm.barrier()
    assert (first == comm.size).all() and (third == 3 * comm.size).all()
    assert comm.rank != 0 or (second == 2 * comm.size).all()
    assert activity.in_flight == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_max_and_min_keep_a_nan(name, dtype, bare):
    """Whichever rank has it, blocking and asynchronous; and infinities are numbers."""
    bare = Communicator(bare, allreduce=name)
    for op, infinity in (("max", np.inf), ("min", -np.inf)):
        for which in range(bare.size):
            array = np.array([1, np.nan if bare.rank == which else 2, infinity if bare.rank == which else 3], dtype)
            again = array.copy()
            bare.all_reduce(array, op)
            bare.iall_reduce(again, op).wait()
            assert np.isnan(array[1]) and array[0] == 1 and array[2] == infinity
            assert np.array_equal(array, again, equal_nan=True)


def their_own(comm, vector, op):
    """A user's algorithm, not a generator, with messages that name no tag."""
    total = vector.copy()
    for other in range(comm.Get_size()):
        if other != comm.Get_rank():
            theirs = np.empty_like(vector)
            comm.Sendrecv(vector, other, recvbuf=theirs, source=other)
            op(total, theirs)
    vector[:] = total


def test_a_users_own_algorithm(world, monkeypatch):
    module = types.ModuleType("theirs")
    module.their_own, module.number = their_own, 3
    monkeypatch.setitem(sys.modules, "theirs", module)
    comm = Communicator(world, allreduce="theirs:their_own", trace=10)
    blocking, flying = np.arange(5.0) * (comm.rank + 1), np.arange(5.0)
    request = comm.iall_reduce(flying)
    comm.all_reduce(blocking)
    request.wait()
    assert np.array_equal(blocking, np.arange(5.0) * comm.size * (comm.size + 1) / 2)
    assert np.array_equal(flying, np.arange(5.0) * comm.size)
    assert comm.traffic["all_reduce"].bytes == 2 * 40 * (comm.size - 1)
    assert comm.traffic["all_reduce"].calls == 2
    assert [span[0] for span in comm.timeline.spans] == ["all_reduce"] * 2  # one span for each call
    comm.free()
    wrongs = {"theirs:absent": "absent", ":f": "unknown", "no.such.module:f": "no", "theirs:number": "name a function"}
    for wrong, word in (wrongs | {"theirs:their_own,n=3": "without settings"}).items():
        with pytest.raises(UsageError, match=word):
            algorithm(wrong)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"did you mean 'ring'.*direct, .*mpi, naive.*tree"):
        algorithm("rings")


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(  # a tree sends it whole
    "name",
    ["tree", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("shared", "mpi", "ring", "recursive"))],
)
def test_more_than_two_gigabytes(name, world):
    """Where lengths in bytes no longer fit MPI's int; in one of the worlds that the tests run in, it takes seconds."""
    length = (1 << 29) + 1001  # float32: 2 GiB and a little
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if world.size != 3 or world.bcast(free) < 12 << 30:
        pytest.skip("on 3 ranks, with 12 GiB of free memory")
    pair = world.Split(0 if world.rank < 2 else MPI.UNDEFINED)
    if pair == MPI.COMM_NULL:
        return
    vector = np.empty(length, "float32")
    vector[:] = pair.rank + 1
    vector[[0, -1]] = 10 * (pair.rank + 1)
    ALGORITHMS[name](pair, vector)
    assert (vector[[0, -1]] == 30).all() and (vector[1:-1] == 3).all()
    pair.Free()
