"""Values that are no tokens give zeros, and -1 (test_cases.py: equal to numpy; test_part.py: parts of a table)."""

import numpy as np
import pytest

from hpcdl.kernels import embedding

VOCABULARY = 11


@pytest.mark.parametrize("bad", [-1, -0.5, 0.5, 11, 10.5, 1e30, -1e30, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, 39])
def test_what_is_no_token(bad, place, dtype):
    tokens = np.ones((4, 10), dtype)
    tokens.flat[place] = bad
    table = np.random.default_rng(3).standard_normal((VOCABULARY, 3)).astype(dtype)
    out = np.full((40, 3), np.nan, dtype)
    assert embedding.embed(tokens, table, 0, VOCABULARY, out) == -1
    expected = np.repeat(table[1:2], 40, axis=0)
    expected[place] = 0
    np.testing.assert_array_equal(out, expected)
    gradient = np.zeros_like(table)
    embedding.embed_backward(tokens, np.ones_like(out), 0, gradient)
    np.testing.assert_array_equal(gradient, 39 * np.eye(VOCABULARY)[:, 1:2] * np.ones(3))
