"""Grids of ranks: how they are written, where each rank lies, and who is in its groups."""

import itertools
import math

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.comm.grid import AXES, Grid, parse_grid, place
from hpcdl.errors import UsageError


def shapes(size):
    """All (data, pipeline, context, expert, tensor) of so many ranks."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    return [shape for shape in itertools.product(divisors, repeat=len(AXES)) if math.prod(shape) == size]


def test_places_are_those_of_an_array_and_of_the_picture():
    for size in range(1, 25):
        for shape in shapes(size):
            ranks = np.arange(size).reshape(shape)
            assert all(ranks[place(rank, shape)] == rank for rank in range(size))
    assert place(5, (2, 2, 1, 1, 2)) == (1, 0, 0, 0, 1)


def test_grids_are_read():
    ones = dict.fromkeys(AXES, 1)
    assert parse_grid("data=2,pipeline=3,tensor=4", 24) == ones | {"data": 2, "pipeline": 3, "tensor": 4}
    assert parse_grid("tensor=2,data=3", 6) == ones | {"data": 3, "tensor": 2}
    assert parse_grid("expert=2,context=2", 4) == ones | {"context": 2, "expert": 2}


@pytest.mark.parametrize(
    ("text", "size", "words"),
    [
        ("data=2,pipeline=2", 6, "tensor=1 has 4 ranks, and the job has 6: start 4 ranks, or take data=3$"),
        (
            "pipeline=4",
            6,
            "data=1,pipeline=4,context=1,expert=1,tensor=1 has 4 ranks, and the job has 6: start 4 ranks$",
        ),
        (
            "data=2,tensr=2",
            4,
            "there is no axis 'tensr' .did you mean 'tensor'.*axes are data, pipeline, context, expert, tensor",
        ),
        ("data=2,x=2", 4, "there is no axis 'x'; the axes"),
        ("data=2,data=2", 4, "the axis data is given twice"),
        ("data=0", 1, "the axis data has a whole number of ranks, at least 1, not '0'"),
        ("data=-1", 1, "not '-1'"),
        ("data=2.0", 2, "not '2.0'"),
        ("data=*", 2, "not '\\*'"),
        ("data=²", 2, "not '²'"),
        ("data=", 2, "not ''"),
        ("data", 2, "write AXIS=RANKS.*not 'data'"),
        ("data=2,", 2, "write AXIS=RANKS.*not ''"),
        ("", 1, "write AXIS=RANKS"),
    ],
)
def test_refusals(text, size, words):
    with pytest.raises(UsageError, match=words) as caught:
        parse_grid(text, size)
    assert "\n" not in str(caught.value)


def test_a_grid_of_another_size_is_refused(world):
    comm = Communicator(world, allreduce="ring")
    with pytest.raises(UsageError, match=rf"has {2 * comm.size} ranks, and the job has {comm.size}: start"):
        Grid(comm, data=comm.size, tensor=2)
    with pytest.raises(UsageError, match="at least 1 rank"):
        Grid(comm, data=-comm.size, tensor=-1)


def test_groups_are_the_lines_of_the_grid(bare):
    """On 1, 2, ... ranks, for all shapes: the ranks of each group, in order, and where they are counted."""
    comm = Communicator(bare, allreduce="ring")
    for shape in shapes(comm.size):
        ranks, grid = np.arange(comm.size).reshape(shape), Grid(comm, *shape)
        (d, p, c, e, t), stages = grid.place, shape[1]
        assert grid.shape == shape and ranks[grid.place] == comm.rank
        ends = ranks[d, [0, -1], c, e, t] if stages > 1 and p in (0, stages - 1) else None
        wanted = {"data": ranks[:, p, c, e, t], "pipeline": ranks[d, :, c, e, t], "context": ranks[d, p, :, e, t]}
        wanted |= {"expert": ranks[d, p, c, :, t], "tensor": ranks[d, p, c, e], "ends": ends}
        wanted |= {"copies": ranks[:, p, :, e, t].reshape(-1)}
        for name, members in wanted.items():
            group = getattr(grid, name)
            if members is None:
                assert group is None
                continue
            if name == "copies":
                name = "data-context" if shape[2] > 1 else "data"
            assert (group.name, group.size) == (name, len(members))
            assert group.mpi.allgather(comm.rank) == members.tolist()
            assert group.traffic is comm.traffic and group.timeline is comm.timeline
            vector, before = np.full(group.size, float(comm.rank)), comm.traffic["all_reduce"].messages
            group.all_reduce(vector)
            assert (vector == members.sum()).all()
            assert comm.traffic["all_reduce"].messages - before == 2 * (group.size - 1)
        groups = tuple(getattr(grid, axis) for axis in AXES)
        assert tuple(group.rank for group in groups) == grid.place
        grid.free()
        groups += grid.copies, grid.ends
        assert all(group is None or group.mpi == MPI.COMM_NULL for group in groups)
    comm.barrier()  # the communicator outlives its grids
