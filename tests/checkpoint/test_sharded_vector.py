"""Vectors that are cut over the ranks: gathered whole on rank 0, and given back part by part, whatever the cut is."""

import numpy as np
import pytest

from hpcdl.checkpoint.sharded_vector import CutVector
from hpcdl.chunks import chunk
from hpcdl.comm import Communicator
from hpcdl.models.layout import Hyperslab, Layout, Tensor, piece

SHAPES = {"rows": (7, 3), "columns": (3, 7), "blocks": (3, 2, 5), "alike": (4,), "few": (1, 2)}
AXES = {"rows": 0, "columns": 1, "blocks": 2, "alike": None, "few": 0}  # few: ranks beyond the first have nothing of it


def laid_out(shapes, first=0):
    """A layout of tensors of these shapes that begins at `first`."""
    tensors, offset = [], first
    for name, shape in shapes.items():
        tensors.append(Tensor(name, shape, offset, "layer"))
        offset += int(np.prod(shape))
    return Layout(tensors, "float64")


def cut(rank, size):
    """What rank `rank` of `size` has of the whole vector: pieces, and the numbers of their elements in the whole."""
    whole, own = laid_out(SHAPES), {}
    numbers = np.arange(whole.size)
    for name, shape in SHAPES.items():
        axis = AXES[name]
        own[name] = whole.view(numbers, name)
        if axis is not None:
            own[name] = own[name][(slice(None),) * axis + (chunk(shape[axis], size, rank),)]
    part = laid_out({name: view.shape for name, view in own.items()})
    pieces = [
        (piece(part.tensors[name], tensor, AXES[name], rank, size), AXES[name] is not None or rank == size - 1)
        for name, tensor in whole.tensors.items()
    ]
    return pieces, np.concatenate([view.ravel() for view in own.values()])


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_gather_and_scatter(each_group, dtype):
    def body(comm):
        wrapped, size = Communicator(comm), laid_out(SHAPES).size
        whole = np.random.default_rng(comm.size).integers(0, 1000, size).astype(dtype)
        pieces, numbers = cut(comm.rank, comm.size)
        mine = whole[numbers]
        for (each, speaks), name in zip(pieces, SHAPES, strict=True):
            if not speaks:  # what those say who do not speak is not asked for
                assert name == "alike"
                mine[each.local : each.local + each.size] = -1
        vector = CutVector(wrapped, mine, pieces, size)
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

    each_group(body)


def test_from_one_cut_to_another(each_group):
    """What one cut has gathered, another one scatters; this one by slices in the other order, one rank having none."""

    def body(comm):
        wrapped, size = Communicator(comm), laid_out(SHAPES).size
        pieces, numbers = cut(comm.rank, comm.size)
        whole = CutVector(wrapped, numbers.astype("float64"), pieces, size).gather(wrapped)
        others = max(1, comm.size - 1)
        where = chunk(size, others, others - 1 - comm.rank) if comm.rank < others else slice(0, 0)
        length = where.stop - where.start
        mine = np.full(length, -1.0)
        other = CutVector(wrapped, mine, [(Hyperslab(0, where.start, 1, length, length), True)] if length else [], size)
        other.scatter(wrapped, whole)
        np.testing.assert_array_equal(mine, np.arange(size)[where])
        again = other.gather(wrapped)
        if comm.rank == 0:
            np.testing.assert_array_equal(again, np.arange(size))
        wrapped.free()

    each_group(body)


def test_an_empty_vector(each_group):
    def body(comm):
        wrapped = Communicator(comm)
        vector = CutVector(wrapped, np.empty(0), [(Hyperslab(0, 0, 3, 0, 5), True)], 0)
        gathered = vector.gather(wrapped)
        assert gathered is None or gathered.shape == (0,)
        vector.scatter(wrapped, gathered)
        wrapped.free()

    each_group(body)


def test_what_the_whole_takes_in_messages(world):
    """Each rank sends what it speaks for, and is sent all that it has, in one message."""
    wrapped, size = Communicator(world), laid_out(SHAPES).size
    pieces, numbers = cut(world.rank, world.size)
    vector = CutVector(wrapped, numbers.astype("float64"), pieces, size)
    whole, sent = vector.gather(wrapped), wrapped.traffic["push"].bytes
    spoken = sum(each.size for each, speaks in pieces if speaks)
    assert sent == (8 * spoken if world.rank > 0 else 0)
    vector.scatter(wrapped, whole)
    held = world.allgather(len(numbers))
    assert wrapped.traffic["push"].bytes - sent == (8 * sum(held[1:]) if world.rank == 0 else 0)
    wrapped.free()


def test_on_a_device(gpu, world):
    """The whole is put together on the host."""
    wrapped, whole = Communicator(world), np.arange(laid_out(SHAPES).size, dtype="float64")
    pieces, numbers = cut(world.rank, world.size)
    mine = gpu.array(whole[numbers])
    vector = CutVector(wrapped, mine, pieces, whole.size)
    gathered = vector.gather(wrapped)
    if world.rank == 0:
        assert isinstance(gathered, np.ndarray)
        np.testing.assert_array_equal(gathered, whole)
    vector.scatter(wrapped, -whole if world.rank == 0 else None)
    np.testing.assert_array_equal(gpu.host(mine), -whole[numbers])
    wrapped.free()
