"""The causal softmax against numpy in float64, row by row from the definition."""

import numpy as np
import pytest

from hpcdl.kernels.attention import causal_softmax, causal_softmax_backward

TOLERANCE = {"float32": 2e-6, "float64": 1e-13}
SHAPES = [(0, 4), (1, 1), (3, 1), (2, 5), (3, 16), (2, 70)]  # matrices, length


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def softmax(s):
    e = np.exp(s - s.max())
    return e / e.sum()


def draw(matrices, length, dtype, seed=1):
    return (3 * np.random.default_rng(seed).standard_normal((matrices * length, length))).astype(dtype)


@pytest.mark.parametrize("scale", [1, 0.125, -2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_of_the_past(shape, scale, dtype):
    s = draw(*shape, dtype)
    expected = np.zeros(s.shape)
    for i, row in enumerate(s.astype("float64")):
        count = i % shape[1] + 1
        expected[i, :count] = softmax(scale * row[:count])
    causal_softmax(s, shape[1], scale)
    np.testing.assert_allclose(s, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("scale", [1, 0.125])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(shape, scale, dtype):
    p, dp = draw(*shape, dtype), draw(*shape, dtype, seed=2)
    causal_softmax(p, shape[1], scale)
    expected, before = np.zeros(p.shape), p.copy()
    for i, (row, d) in enumerate(zip(p.astype("float64"), dp.astype("float64"), strict=True)):
        jacobian = scale * (np.diag(row) - np.outer(row, row))  # of all keys: p is 0 for those of the future
        expected[i] = jacobian @ d
    causal_softmax_backward(p, dp, shape[1], scale)
    np.testing.assert_allclose(dp, expected, rtol=0, atol=10 * TOLERANCE[dtype])
    np.testing.assert_array_equal(p, before)


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


@pytest.mark.parametrize("place", [0, 3, 6])
def test_nan_and_infinity_are_not_hidden(place, dtype):
    for bad in (np.nan, np.inf):
        s = draw(1, 40, dtype)
        s[6, place] = bad
        causal_softmax(s, 40, 1)
        assert np.isnan(s[6, :7]).all() and not s[6, 7:].any()
        assert np.isfinite(np.delete(s, 6, axis=0)).all()
        dp = draw(1, 40, dtype)
        causal_softmax_backward(s, dp, 40, 1)
        assert np.isnan(dp[6, :7]).all() and np.isfinite(np.delete(dp, 6, axis=0)).all()


def test_large_scores_do_not_overflow(dtype):
    s = np.array([[1e30, 0], [1e30, -1e30]], dtype)
    causal_softmax(s, 2, 1)
    np.testing.assert_array_equal(s, [[1, 0], [1, 0]])
