"""Two trees: each half of the vector goes up and down its own; no rank has children in both."""

import math

import numpy as np
import pytest
from local_ranks import reduced_locally
from sums import total, values

from hpcdl.comm import Communicator
from hpcdl.comm.allreduce import double_tree


def test_the_trees_are_trees_and_no_rank_has_children_in_both(alone):
    for size in range(1, 300):
        both = [double_tree.double_tree(rank, size) for rank in range(size)]
        assert not any(first.children and second.children for first, second in both)
        for tree in zip(*both, strict=True):
            assert sum(not each.parent for each in tree) == 1 and all(len(each.children) <= 2 for each in tree)
            for rank, each in enumerate(tree):
                assert all(tree[child].parent == [rank] for child in each.children)
                depth, at = 0, each
                while at.parent:
                    depth, at = depth + 1, tree[at.parent[0]]
                assert depth <= math.log2(size)


def test_the_trees_of_the_picture(alone):
    first, second = zip(*(double_tree.double_tree(rank, 8) for rank in range(8)), strict=True)
    assert [sorted(each.children) for each in first] == [[], [0, 2], [], [1, 5], [], [4, 6], [], [3]]
    assert [sorted(each.children) for each in second] == [[4], [], [1, 3], [], [2, 6], [], [5, 7], []]


def traffic(length, size, rank, count):
    """Values and messages that a rank sends: its half, up to a parent and down to each child, in both trees."""
    ends = [len(each.parent) + len(each.children) for each in double_tree.double_tree(rank, size)]
    return ends[0] * ((length + 1) // 2) + ends[1] * (length // 2), count * sum(ends)


@pytest.mark.parametrize("size", [*range(1, 10), 16])
def test_sums_and_counts_of_any_number_of_ranks(alone, size, monkeypatch):
    monkeypatch.setattr(double_tree, "SEGMENT", 8 * 30)
    monkeypatch.setattr(double_tree, "SEGMENTS", 5)
    for length, count in ((0, 1), (1, 1), (60, 1), (61, 2), (299, 5), (1009, 5)):
        rows = np.stack([values(rank, length, "float64") for rank in range(size)])
        comms, _ = reduced_locally(double_tree.ALGORITHM, rows)
        assert (rows == total(size, length, "float64")).all()
        for comm in comms:
            assert (comm.values, comm.messages) == traffic(length, size, comm.rank, count)
        assert sum(comm.values for comm in comms) == 2 * (size - 1) * length
        assert sum(comm.messages for comm in comms) == 4 * (size - 1) * count


@pytest.mark.parametrize("size", [3, 6, 16])
def test_all_ranks_have_the_same_bits(alone, size, monkeypatch):
    monkeypatch.setattr(double_tree, "SEGMENT", 400)
    rows = np.random.default_rng(size).standard_normal((2, size, 1009)).astype("float32")
    rows[1] = rows[0]
    for each in rows:
        reduced_locally(double_tree.ALGORITHM, each)
    assert (rows[0] == rows[0][0]).all() and np.array_equal(rows[0], rows[1])


def test_counts_by_mpi(bare, monkeypatch):
    monkeypatch.setattr(double_tree, "SEGMENT", 4096)
    comm = Communicator(bare, allreduce="double_tree")
    for length, count in ((0, 1), (5, 1), (10_000, 10)):
        before = comm.traffic["all_reduce"]
        sent = before.bytes, before.messages
        comm.all_reduce(np.ones(length))
        now = comm.traffic["all_reduce"]
        wanted, messages = traffic(length, comm.size, comm.rank, count)
        assert (now.bytes - sent[0], now.messages - sent[1]) == (8 * wanted, messages)
