"""Vectors that are cut over the ranks: gathered whole on rank 0, and given back part by part, whatever the cut is."""

import numpy as np
import pytest
from cut_vectors import SHAPES, SIZE, cut

from hpcdl.checkpoint.sharded_vector import CutVector
from hpcdl.chunks import chunk
from hpcdl.comm import Communicator
from hpcdl.models.layout import Hyperslab


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_gather_and_scatter(comm, dtype):
    wrapped = Communicator(comm)
    whole = np.random.default_rng(comm.size).integers(0, 1000, SIZE).astype(dtype)
    pieces, numbers = cut("tensors", comm.rank, comm.size)
    mine = whole[numbers]
    for (each, speaks), name in zip(pieces, SHAPES, strict=True):
        if not speaks:  # what those say who do not speak is not asked for
            assert name == "alike"
            mine[each.local : each.local + each.size] = -1
    vector = CutVector(wrapped, mine, pieces, SIZE)
    kept = mine.copy()
    assert vector.stored("parameters") == "parameters"
    gathered = vector.gather(wrapped)
    if comm.rank == 0:
        np.testing.assert_array_equal(gathered, whole)
        assert gathered.dtype == dtype
    else:
        assert gathered is None
    np.testing.assert_array_equal(mine, kept)
    vector.scatter(wrapped, 3 * gathered if comm.rank == 0 else None)
    np.testing.assert_array_equal(mine, 3 * whole[numbers])  # and those who did not speak have it, too
    wrapped.free()


def test_from_one_cut_to_another(comm):
    """What one cut has gathered, another one scatters; this one by slices in the other order, one rank having none."""
    wrapped = Communicator(comm)
    pieces, numbers = cut("tensors", comm.rank, comm.size)
    whole = CutVector(wrapped, numbers.astype("float64"), pieces, SIZE).gather(wrapped)
    others = max(1, comm.size - 1)
    where = chunk(SIZE, others, others - 1 - comm.rank) if comm.rank < others else slice(0, 0)
    length = where.stop - where.start
    mine = np.full(length, -1.0)
    other = CutVector(wrapped, mine, [(Hyperslab(0, where.start, 1, length, length), True)] if length else [], SIZE)
    other.scatter(wrapped, whole)
    np.testing.assert_array_equal(mine, np.arange(SIZE)[where])
    again = other.gather(wrapped)
    if comm.rank == 0:
        np.testing.assert_array_equal(again, np.arange(SIZE))
    wrapped.free()


def test_an_empty_vector(comm):
    wrapped = Communicator(comm)
    vector = CutVector(wrapped, np.empty(0), [(Hyperslab(0, 0, 3, 0, 5), True)], 0)
    gathered = vector.gather(wrapped)
    assert gathered is None or gathered.shape == (0,)
    vector.scatter(wrapped, gathered)
    wrapped.free()


def test_what_the_whole_takes_in_messages(world):
    """Each rank sends what it speaks for, and is sent all that it has, in one message."""
    wrapped = Communicator(world)
    pieces, numbers = cut("tensors", world.rank, world.size)
    vector = CutVector(wrapped, numbers.astype("float64"), pieces, SIZE)
    whole, sent = vector.gather(wrapped), wrapped.traffic["push"].bytes
    spoken = sum(each.size for each, speaks in pieces if speaks)
    assert sent == (8 * spoken if world.rank > 0 else 0)
    vector.scatter(wrapped, whole)
    held = world.allgather(len(numbers))
    assert wrapped.traffic["push"].bytes - sent == (8 * sum(held[1:]) if world.rank == 0 else 0)
    wrapped.free()


def test_on_a_device(gpu, world):
    """The whole is put together on the host."""
    wrapped, whole = Communicator(world), np.arange(SIZE, dtype="float64")
    pieces, numbers = cut("tensors", world.rank, world.size)
    mine = gpu.array(whole[numbers])
    vector = CutVector(wrapped, mine, pieces, whole.size)
    gathered = vector.gather(wrapped)
    if world.rank == 0:
        assert isinstance(gathered, np.ndarray)
        np.testing.assert_array_equal(gathered, whole)
    vector.scatter(wrapped, -whole if world.rank == 0 else None)
    np.testing.assert_array_equal(gpu.host(mine), -whole[numbers])
    wrapped.free()
