"""The causal softmax: the future, large scores (test_cases.py: equal to numpy; test_layered.py: its gradient)."""

import numpy as np
import pytest

from hpcdl.kernels.attention import causal_softmax, causal_softmax_backward


def draw(matrices, length, dtype):
    return (3 * np.random.default_rng(1).standard_normal((matrices * length, length))).astype(dtype)


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
