"""The sum tree against its twin in NumPy, to the bit, and against what draws by priority should give."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.kernels.sum_tree import FAN, NumpySumTree, SumTree, bytes_needed, level_sizes

priorities = st.floats(0, 1e6) | st.just(0.0) | st.floats(1e-300, 1e-290)


@st.composite
def operations(draw):
    """Return a number of leaves, batches of assignments, in which a leaf may come twice, and a seed."""
    leaves = draw(st.integers(1, 700))
    pairs = st.lists(st.tuples(st.integers(0, leaves - 1), priorities), max_size=30)
    return leaves, draw(st.lists(pairs, max_size=6)), draw(st.integers(0, 2**32))


@settings(max_examples=150, deadline=None)
@given(operations())
def test_is_its_numpy_twin(drawn):
    """Random assignments give the same bits in sums, leaves and draws, also in a new tree of the same leaves."""
    leaves, batches, seed = drawn
    tree, twin, anew = SumTree(leaves), NumpySumTree(leaves), SumTree(leaves)
    for batch in batches:
        index, values = np.array([i for i, _ in batch], np.int64), np.array([value for _, value in batch])
        tree.assign(index, values)
        twin.assign(index, values)
    anew.assign(np.arange(leaves), tree.leaves.copy())
    assert tree.tree.tobytes() == twin.tree.tobytes() == anew.tree.tobytes()
    assert tree.total == pytest.approx(tree.leaves.sum())
    if tree.total > 0:
        uniform = np.random.default_rng(seed).random(64)
        targets = np.concatenate([uniform * tree.total, [0.0, np.nextafter(tree.total, 0)]])
        found = tree.draw(targets)
        np.testing.assert_array_equal(found, twin.draw(targets))
        assert (tree.leaves[found] > 0).all()


def test_draws_the_leaf_in_whose_part_the_target_lies():
    """Priorities are whole numbers, whose sums are exact."""
    values = np.random.default_rng(0).integers(0, 4, 1000)
    tree = SumTree(1000)
    tree.assign(np.arange(1000), values.astype(float))
    assert tree.total == values.sum()
    targets = np.arange(0, tree.total, 0.5)
    np.testing.assert_array_equal(tree.draw(targets), np.repeat(np.arange(1000), 2 * values))


def test_a_rounded_target_finds_the_last_leaf_that_is_not_zero():
    """The sum of tenths that is subtracted one by one is not the sum that is added up in pairs."""
    for count in range(1, 65):
        tree = SumTree(64)
        tree.assign(np.arange(count), np.full(count, 0.1))
        for target in (np.nextafter(tree.total, 0), tree.total, 1.01 * tree.total):
            assert tree.draw(np.array([target])) == count - 1


@pytest.mark.parametrize("wrong", [np.nan, -1.0, np.inf, 1e300])
@pytest.mark.parametrize("kind", [SumTree, NumpySumTree])
def test_what_is_no_priority_changes_nothing(kind, wrong):
    tree = kind(20)
    tree.assign(np.arange(20), np.ones(20))
    before = tree.tree.copy()
    with pytest.raises(ValueError, match="negative, infinite or NaN"):
        tree.assign(np.array([1, 2, 3]), np.array([5.0, wrong, 7.0]))
    np.testing.assert_array_equal(tree.tree, before)


@pytest.mark.parametrize("leaves", [1, 7, 8, 9, 64, 65, 512, 513, 100_000])
def test_nodes_are_cache_lines(leaves):
    tree = SumTree(leaves)
    assert tree.tree.ctypes.data % 64 == 0 and all(start % FAN == 0 for start in tree.starts)
    sizes = level_sizes(leaves)
    assert sizes[0] >= leaves and sizes[-1] == FAN
    assert all(above >= below // FAN for below, above in itertools.pairwise(sizes))
    assert tree.tree.nbytes == bytes_needed(leaves)
