"""Targets, errors and weights of temporal differences, against their twins in NumPy and by hand."""

import numpy as np
import pytest

from hpcdl.kernels import td


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def drawn(dtype, rows=50, actions=4):
    random = np.random.default_rng(3)
    valued, chosen = (random.standard_normal((2, rows, actions)) * 3).astype(dtype)
    returns, discounts = random.standard_normal(rows).astype("f4"), (random.random(rows) > 0.3).astype("f4") * 0.9
    return random, valued, chosen, returns, discounts.astype("f4")


def test_targets(dtype):
    _, valued, chosen, returns, discounts = drawn(dtype)
    for by in (chosen, valued):
        found = td.targets(valued, by, returns, discounts)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, td.targets_numpy(valued, by, returns, discounts), rtol=1e-6)
    np.testing.assert_allclose(found, returns + discounts * valued.max(axis=1), rtol=1e-6)
    assert (td.targets(valued, chosen, returns, discounts) <= found).all()  # what double is for
    ends = discounts == 0
    np.testing.assert_array_equal(found[ends], returns[ends])


@pytest.mark.parametrize("delta", [1.0, 0.25, np.inf])
def test_errors(delta, dtype):
    random, q, _, y, _ = drawn(dtype)
    actions, weights = random.integers(0, 4, 50), random.random(50).astype("f4")
    slopes, same = np.full_like(q, 7), np.full_like(q, 7)
    y = y.astype(dtype)
    loss, errors = td.errors(q, actions, y, weights, delta, slopes)
    other, others = td.errors_numpy(q, actions, y, weights.astype(dtype), delta, same)
    assert loss == pytest.approx(other, rel=1e-5)
    np.testing.assert_array_equal(errors, others)
    np.testing.assert_array_equal(slopes, same)
    assert (slopes != 0).sum() <= 50
    # The slopes are those of the loss: a central difference of float64.
    q, y, step, row = q.astype("f8"), y.astype("f8"), 1e-6, 11
    room = np.empty_like(q)
    for action in range(4):
        sides = []
        for side in (step, -step):
            moved = q.copy()
            moved[row, action] += side
            sides.append(td.errors(moved, actions, y, weights, delta, room)[0])
        td.errors(q, actions, y, weights, delta, room)
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(room[row, action], abs=1e-6)


def test_hubers_loss_by_hand():
    q, slopes = np.array([[0.5, 9.0], [9.0, -3.0]]), np.empty((2, 2))
    loss, errors = td.errors(q, np.array([0, 1]), np.zeros(2), np.array([2.0, 1.0]), 1.0, slopes)
    assert loss == 2 * 0.125 + 2.5
    np.testing.assert_array_equal(errors, [0.5, 3.0])
    np.testing.assert_array_equal(slopes, [[1.0, 0.0], [0.0, -1.0]])


def test_nan_is_not_lost(dtype):
    q = np.array([[1.0, np.nan, 3.0]], dtype)
    zero, one = np.zeros(1, dtype), np.ones(1, dtype)
    assert np.isnan(td.targets(q, q, zero, one)) and np.isnan(td.targets_numpy(q, q, zero, one))
    slopes = np.zeros_like(q)
    loss, errors = td.errors(q, np.array([1]), zero, one, 1.0, slopes)
    assert np.isnan(loss) and np.isnan(errors[0]) and np.isnan(slopes[0, 1])


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_importance_weights(beta):
    priorities = np.random.default_rng(1).random(64) + 0.01
    found = td.importance_weights(priorities, 31.0, 1000, beta)
    np.testing.assert_allclose(found, td.importance_weights_numpy(priorities, 31.0, 1000, beta), rtol=1e-13)
    np.testing.assert_allclose(found, (1000 * priorities / 31.0) ** -beta)


def test_step_back_adds_up_the_n_step_return():
    """Of each suffix of an episode, what the twin over all steps finds."""
    rewards, gamma, n = np.random.default_rng(2).standard_normal(9), 0.9, 4
    ends = np.zeros(9, bool)
    ends[6] = True
    for terminated, truncated in ((ends, ~ends & ends), (~ends & ends, ends)):
        returns, discounts, spans = td.n_step_numpy(rewards, terminated, truncated, gamma, n)
        np.testing.assert_array_equal(spans, [4, 4, 4, 4, 3, 2, 1, 0, 0])
        for t in range(7):
            total, discount = 0.0, 1.0
            for reward in rewards[t : t + spans[t]][::-1]:
                total, discount = td.step_back(total, discount, reward, gamma)
            assert total == pytest.approx(returns[t], rel=1e-12)
            cut = terminated[6] and t + spans[t] == 7
            assert discounts[t] == pytest.approx(0 if cut else discount, rel=1e-12)
