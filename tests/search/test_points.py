"""Grid search, random search and Sobol points: what is tried does not depend on what is told."""

import itertools

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.search.methods.grid import GridSearch
from hpcdl.search.methods.random import RandomSearch, point
from hpcdl.search.methods.sobol import DIMENSIONS, Sobol
from hpcdl.search.space import Space
from hpcdl.search.tasks import SearchTask

SPACE = Space.read(["lr=log:0.001..0.5", "o=adam|momentum", "momentum:beta=0.8..0.99 if o=momentum", "n=int:1..64:log"])


def everything(method):
    found = []
    while not method.over:
        found.append(method.ask())
    assert method.ask() is None
    return found


def test_a_grid_in_order():
    grid = everything(GridSearch(SPACE, 0, 3))
    assert grid == [SearchTask(i, values) for i, values in enumerate(SPACE.grid(3))]
    assert len(grid) == 3 * (1 + 3) * 3
    assert everything(GridSearch(SPACE, 5, 3)) == grid[:5]
    assert everything(GridSearch(SPACE, 500, 3)) == grid


@pytest.mark.parametrize("sobol", [False, True])
def test_a_point_depends_on_seed_and_number(sobol):
    few, many = (everything(RandomSearch(SPACE, trials, 7, sobol)) for trials in (5, 40))
    assert few == many[:5]
    assert [task.trial for task in many] == list(range(40))
    assert all((task.rung, task.amount, task.parent) == (0, 0.0, None) for task in many)
    assert len({repr(task.values) for task in many}) == 40
    assert everything(RandomSearch(SPACE, 5, 8, sobol))[0] != few[0]
    assert {"momentum:beta" in task.values for task in many} == {True, False}
    if not sobol:
        assert [task.values for task in many] == [point(SPACE, 7, number) for number in range(40)]


def test_the_first_points_of_sobol():
    """By hand: v of the first dimension are 1/2, 1/4, ...; of the second 1/2, 3/4, 5/8, of the third 1/2, 3/4, 3/8."""
    found = [Sobol(3, None)(i).tolist() for i in range(8)]
    first = [0, 1 / 2, 1 / 4, 3 / 4, 1 / 8, 5 / 8, 3 / 8, 7 / 8]
    second = [0, 1 / 2, 3 / 4, 1 / 4, 5 / 8, 1 / 8, 3 / 8, 7 / 8]
    third = [0, 1 / 2, 3 / 4, 1 / 4, 3 / 8, 7 / 8, 5 / 8, 1 / 8]
    assert found == [list(each) for each in zip(first, second, third, strict=True)]


def test_sobol_is_what_scipy_has():
    qmc = pytest.importorskip("scipy.stats.qmc")
    theirs = qmc.Sobol(DIMENSIONS, scramble=False, bits=32).random(256)  # in the order of Gray's code
    mine = Sobol(DIMENSIONS, None)
    assert np.array_equal(theirs, [mine(i ^ i >> 1) for i in range(256)])


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_net_in_two_dimensions_and_each_coordinate_alone(seed):
    """Of 2^m points from a multiple of 2^m on, every box of 2^-a by 2^-(m-a) holds one; every interval, in each."""
    sobol = Sobol(DIMENSIONS, seed)
    for m, block in [(4, 0), (4, 3), (6, 1)]:
        points = np.array([sobol(i) for i in range(block << m, block + 1 << m)])
        assert points.min() >= 0 and points.max() < 1
        for a in range(m + 1):
            boxes = np.floor(points[:, :2] * [2**a, 2 ** (m - a)]).astype(int)
            assert len({tuple(box) for box in boxes}) == 2**m
        for coordinate in points.T:
            assert sorted(np.floor(coordinate * 2**m)) == list(range(2**m))


def test_scrambling_is_another_for_each_seed_and_dimension():
    points = [np.array([Sobol(2, seed)(i) for i in range(64)]) for seed in (0, 1)]
    columns = [tuple(column) for each in points for column in each.T]
    assert len(set(columns)) == 4
    assert np.array_equal(Sobol(1, 3)(5), Sobol(4, 3)(5)[:1])


def test_scrambling_is_nested():
    """Points that share their first k bits share them afterwards, and no others do."""
    plain, scrambled = Sobol(3, None), Sobol(3, 5)
    before, after = ([[int(x * 2**32) for x in sobol(i)] for i in range(32)] for sobol in (plain, scrambled))
    for i, j in itertools.combinations(range(32), 2):
        for d in range(3):
            assert (before[i][d] ^ before[j][d]).bit_length() == (after[i][d] ^ after[j][d]).bit_length()


def test_scrambling_is_more_than_a_shift():
    """Which bits are flipped depends on those before: not the same for all points."""
    plain, scrambled = Sobol(3, None), Sobol(3, 5)
    flips = [[int(x * 2**32) ^ int(y * 2**32) for x, y in zip(plain(i), scrambled(i), strict=True)] for i in range(32)]
    assert all(len({flip >> 27 for flip in column}) > 4 for column in zip(*flips, strict=True))
    assert all(len({flip >> 31 for flip in column}) == 1 for column in zip(*flips, strict=True))


def test_more_parameters_than_dimensions():
    wide = Space.read([f"x{i}=0..1" for i in range(DIMENSIONS + 1)])
    with pytest.raises(UsageError, match="has 21 dimensions, and the space 22 parameters"):
        RandomSearch(wide, 3, 0, sobol=True)
    assert len(RandomSearch(wide, 3, 0).ask().values) == DIMENSIONS + 1
