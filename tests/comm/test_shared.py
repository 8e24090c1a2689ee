"""Vectors in the memory of a node: any length, any mixture, no messages, bytes as theory says, and too little room."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from sums import check_sum, check_sums

from hpcdl.comm import Communicator
from hpcdl.kernels import shared as kernels

# Around the limits of the short way (SMALL) and of a scratch block (BLOCK), in float32, and not a multiple of anything.
SMALL, BLOCK = kernels.SMALL // 4, kernels.BLOCK // 4
LENGTHS = [0, 1, 7, 1009, SMALL - 1, SMALL, SMALL + 1, 5003, 100_003, BLOCK - 1, BLOCK + 1, 2 * BLOCK + 17]


@pytest.mark.parametrize("where", ["windows", "elsewhere", "mixed"])
def test_sums_of_all_lengths(where, bare):
    comm = Communicator(bare, allreduce="shared")
    check_sums(comm, where, LENGTHS, times=3)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32", "uint8"])
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_types_and_operations(dtype, op, bare):
    if op == "mean" and not dtype.startswith("float"):
        return
    comm = Communicator(bare, allreduce="shared")
    for length in (5, 40_001):
        rows = np.random.default_rng(3).integers(0, 9, (comm.size, length)).astype(dtype)
        vector = comm.empty(length, dtype)
        vector[:] = rows[comm.rank]
        comm.all_reduce(vector, op)
        assert np.allclose(vector, getattr(rows, op)(0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["complex64", "float16", "bool", ">f4"])
def test_a_vector_of_a_type_that_is_not_reduced(dtype, world):
    comm = Communicator(world, allreduce="shared")
    vector = comm.empty(5, dtype)
    assert vector.dtype == dtype and vector.shape == (5,)


def test_any_part_of_a_vector_and_several_vectors(bare):
    comm = Communicator(bare, allreduce="shared")
    first, second = comm.empty(50_000), comm.empty(30_000)
    for start, stop in ((0, 50_000), (1, 20_000), (4_999, 50_000), (17, 17 + SMALL)):
        first[:], second[:] = -1, -2
        part = first[start:stop]
        check_sum(comm, part)
        assert (first[:start] == -1).all() and (first[stop:] == -1).all() and (second == -2).all()
    places = [10 * comm.rank, 10 * comm.rank + 20_000]  # each rank offers another part
    part = first[places[0] : places[1]]
    check_sum(comm, part)
    matrix = second.reshape(300, 100)
    matrix[:] = comm.rank
    comm.all_reduce(matrix)
    assert (matrix == comm.size * (comm.size - 1) / 2).all()


def test_nothing_is_sent_and_the_bytes_are_those_of_theory(bare):
    comm = Communicator(bare, allreduce="shared")
    lines = 1000
    length, size = 16 * lines * comm.size, comm.size  # every rank adds `lines` cache lines
    counted = comm.traffic["all_reduce"]

    def bytes_of(vector):
        before = counted.bytes
        comm.all_reduce(vector)
        return counted.bytes - before

    if size > 1:
        assert bytes_of(comm.empty(length)) == 64 * lines * (size - 1)  # its sums, into all others' vectors
        assert bytes_of(np.ones(length, "float32")) == 64 * lines * (size - 1) + 2 * 4 * length  # and in and out
        assert bytes_of(comm.empty(SMALL)) == 4 * SMALL
    else:
        assert bytes_of(comm.empty(length)) == 0
    assert counted.messages == 0


def test_the_vector_outlives_the_communicator(world):
    comm = Communicator(world, allreduce="shared")
    vector = comm.empty(1000)
    vector[:] = comm.rank
    comm.free()
    assert (vector == world.rank).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["wait", "wait for the second", "test"])
def test_mpi_has_its_turns_while_a_rank_waits(how, world, fetch_first):
    comm = Communicator(world, allreduce="shared")
    first, second = comm.empty(10), comm.empty(10)
    first[:] = second[:] = 1

    def body():
        requests = [comm.iall_reduce(vector) for vector in ([first] if how == "wait" else [first, second])]
        while how == "test" and not requests[0].test():
            pass
        for request in reversed(requests):
            request.wait()

    fetch_first(body, busy=0, late=1)
    assert (first == comm.size).all()


@pytest.mark.mpi(min_size=2)
def test_without_room_ranks_exchange_messages(world, no_room, caplog):
    no_room(rank=1)
    with caplog.at_level(logging.WARNING):
        comm = Communicator(world, allreduce="shared")
    warned = world.allgather([record.getMessage() for record in caplog.records])
    assert ["exchange messages instead" in message for message in warned[0]] == [True] and not any(warned[1:])
    for vector in (comm.empty(1009), np.empty(1009, "float32")):
        check_sum(comm, vector)
    assert comm.traffic["all_reduce"].messages > 0


@pytest.mark.mpi(min_size=2)
def test_without_room_for_one_vector(world, no_room, caplog):
    comm = Communicator(world, allreduce="shared")
    no_room(rank=1)
    with caplog.at_level(logging.WARNING):
        vector = comm.empty(5000)
    assert [record.getMessage() for record in caplog.records] == [] or "keeps its own" in caplog.text
    check_sum(comm, vector)
    assert comm.traffic["all_reduce"].messages == 0


def test_a_wait_yields_after_each_poll_where_another_process_runs_on_the_core(monkeypatch):
    state, now, taken = np.zeros(kernels.WORDS, np.int64), [0], []
    state[kernels.SPINS] = state[kernels.MOST_SPINS] = 100

    def offer(what, least):
        taken.append(what)
        now[0] += least

    def spins(nanoseconds, sliced=0):
        state[kernels.SLICED] = sliced
        monkeypatch.setattr(kernels, "sched_yield", lambda: offer("yield", nanoseconds))
        kernels.yield_core.py_func(state)
        return state[kernels.SPINS]

    monkeypatch.setattr(kernels, "usleep", lambda _: offer("nap", 70_000))
    monkeypatch.setattr(kernels, "now", lambda _: now[0])
    short, long = kernels.SHARED, kernels.TAKEN + 1
    assert [spins(each) for each in (short, short + 1, *[short] * 8)] == [100, 1, 2, 4, 8, 16, 32, 64, 100, 100]
    assert spins(long, sliced=1) == 1 and spins(short, sliced=1) == 2 and set(taken) == {"yield"}
    assert spins(long) == 1 and spins(short) == 1 and taken[-2:] == ["yield", "nap"]


def test_vectors_that_are_dropped_are_given_back(world):
    """Neither descriptors nor memory run out, and what is kept stays; no order of dropping matters."""

    def shared():
        return sum("/dev/shm/hpcdl" in line for line in Path("/proc/self/maps").read_text().splitlines())

    comm = Communicator(world, allreduce="shared")
    kept = comm.empty(5000)
    kept[:] = comm.rank
    descriptors, before, most, vectors = len(os.listdir("/proc/self/fd")), shared(), 0, []
    for i in range(150):
        vectors.append(comm.empty(2500))
        vectors[-1][:] = i
        if len(vectors) > 3:
            vectors.pop(i % 3 if comm.rank else i % 2)
        if i % 10 == 0:
            comm.all_reduce(vectors[-1])
            assert (vectors[-1] == i * comm.size).all()
            most = max(most, shared())
    assert len(os.listdir("/proc/self/fd")) == descriptors and most <= before + 8
    comm.all_reduce(kept)
    assert (kept == sum(range(comm.size))).all()
    comm.free()
