"""Targets, errors and weights of temporal differences, against their formulas in NumPy and by hand."""

import numpy as np
import pytest

from hpcdl.kernels import td


def drawn(dtype, rows=50, actions=4):
    random = np.random.default_rng(3)
    valued, chosen = (random.standard_normal((2, rows, actions)) * 3).astype(dtype)
    returns, discounts = random.standard_normal(rows).astype("f4"), (random.random(rows) > 0.3).astype("f4") * 0.9
    return random, valued, chosen, returns, discounts.astype("f4")


def test_targets(dtype):
    _, valued, chosen, returns, discounts = drawn(dtype)
    for by in (chosen, valued):
        found, best = td.targets(valued, by, returns, discounts), valued[np.arange(50), by.argmax(axis=1)]
        assert found.dtype == dtype
        np.testing.assert_allclose(found, returns + discounts * best, rtol=1e-6)
    ends = discounts == 0
    np.testing.assert_array_equal(found[ends], returns[ends])


@pytest.mark.parametrize("delta", [0.25, np.inf])
def test_errors(delta, dtype):
    random, q, _, y, _ = drawn(dtype)
    actions, weights, slopes, y = random.integers(0, 4, 50), random.random(50).astype("f4"), 7 + q, y.astype(dtype)
    loss, errors = td.errors(q, actions, y, weights, delta, slopes)
    e, wanted = q[np.arange(50), actions] - y, np.zeros_like(q)
    near = np.clip(e, -delta, delta)
    wanted[np.arange(50), actions] = weights.astype(dtype) * near
    assert loss == pytest.approx((weights * near * (e - near / 2)).sum(dtype="f8"), rel=1e-5)
    np.testing.assert_array_equal(errors, abs(e))
    np.testing.assert_array_equal(slopes, wanted)


def test_nan_is_not_lost(dtype):
    q = np.array([[1.0, np.nan, 3.0]], dtype)
    zero, one = np.zeros(1, dtype), np.ones(1, dtype)
    assert np.isnan(td.targets(q, q, zero, one))
    slopes = np.zeros_like(q)
    loss, errors = td.errors(q, np.array([1]), zero, one, 1.0, slopes)
    assert np.isnan(loss) and np.isnan(errors[0]) and np.isnan(slopes[0, 1])


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_importance_weights(beta):
    priorities = np.random.default_rng(1).random(64) + 0.01
    found = td.importance_weights(priorities, 31.0, 1000, beta)
    np.testing.assert_allclose(found, (1000 * priorities / 31.0) ** -beta, rtol=1e-13)
