"""The causal softmax: its gradient against differences, the future, large scores (test_cases.py: as numpy)."""

import numpy as np
import pytest

from hpcdl.kernels.attention import causal_softmax, causal_softmax_backward


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def draw(matrices, length, dtype, seed=1):
    return (3 * np.random.default_rng(seed).standard_normal((matrices * length, length))).astype(dtype)


def test_backward_is_the_slope():
    s, d, h = draw(2, 5, "float64"), draw(2, 5, "float64", seed=2), 1e-6
    p, ds, slope = s.copy(), d.copy(), np.zeros_like(s)
    causal_softmax(p, 5, 0.7)
    causal_softmax_backward(p, ds, 5, 0.7)
    for place in np.ndindex(s.shape):
        sides = [s.copy(), s.copy()]
        for side, step in zip(sides, (h, -h), strict=True):
            side[place] += step
            causal_softmax(side, 5, 0.7)
        slope[place] = ((sides[0] - sides[1]) * d).sum() / (2 * h)
    np.testing.assert_allclose(ds, slope, rtol=0, atol=1e-8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_future_has_no_influence(bad, dtype):
    plain, s = draw(2, 20, dtype), draw(2, 20, dtype)
    p, dp = plain.copy(), plain.copy()
    causal_softmax(p, 20, 1)
    future = np.arange(20) > np.arange(40)[:, None] % 20
    s[future] = bad
    causal_softmax(s, 20, 1)
    np.testing.assert_array_equal(s, p)
    causal_softmax_backward(p, dp, 20, 1)
    s[future], plain[future] = bad, bad
    causal_softmax_backward(s, plain, 20, 1)
    np.testing.assert_array_equal(plain, dp)


def test_large_scores_do_not_overflow(dtype):
    s = np.array([[1e30, 0], [1e30, -1e30]], dtype)
    causal_softmax(s, 2, 1)
    np.testing.assert_array_equal(s, [[1, 0], [1, 0]])
