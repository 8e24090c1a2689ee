"""Embedding kernels against numpy."""

import itertools

import numpy as np
import pytest

from hpcdl.kernels import embedding

VOCABULARY = 11


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=[(0, 4), (1, 1), (3, 7), (40, 16)], ids=str)
def tokens(request, dtype):
    return np.random.default_rng(1).integers(0, VOCABULARY, request.param).astype(dtype)


def table_of(width, dtype):
    return np.random.default_rng(width).standard_normal((VOCABULARY, width)).astype(dtype)


@pytest.mark.parametrize("cuts", [[0, 6, 11], [0, 0, 3, 11, 11]])  # some parts have no row
def test_the_parts_of_a_table_sum_to_the_whole(cuts, tokens, dtype):
    table, whole = table_of(3, dtype), np.empty((tokens.size, 3), dtype)
    embedding.embed(tokens, table, 0, VOCABULARY, whole)
    total = np.zeros_like(whole)
    for first, end in itertools.pairwise(cuts):
        out = np.full_like(whole, np.nan)
        assert embedding.embed(tokens, table[first:end], first, VOCABULARY, out) == 0
        mine = (tokens.ravel() >= first) & (tokens.ravel() < end)
        np.testing.assert_array_equal(out[~mine], 0)
        total += out
    np.testing.assert_array_equal(total, whole)


@pytest.mark.parametrize("bad", [-1, -0.5, 0.5, 11, 10.5, 1e30, -1e30, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, 39])
def test_what_is_no_token(bad, place, dtype):
    tokens = np.ones((4, 10), dtype)
    tokens.flat[place] = bad
    table, out = table_of(3, dtype), np.full((40, 3), np.nan, dtype)
    assert embedding.embed(tokens, table, 0, VOCABULARY, out) == -1
    expected = np.repeat(table[1:2], 40, axis=0)
    expected[place] = 0
    np.testing.assert_array_equal(out, expected)
    gradient = np.zeros_like(table)
    embedding.embed_backward(tokens, np.ones_like(out), 0, gradient)
    np.testing.assert_array_equal(gradient, 39 * np.eye(VOCABULARY)[:, 1:2] * np.ones(3))


def test_gradients_of_a_part_are_the_whole_ones_bits(tokens, dtype):
    dy = np.random.default_rng(2).standard_normal((tokens.size, 5)).astype(dtype)
    whole, part = np.zeros((VOCABULARY, 5), dtype), np.zeros((4, 5), dtype)
    embedding.embed_backward(tokens, dy, 0, whole)
    embedding.embed_backward(tokens, dy, 3, part)
    np.testing.assert_array_equal(part, whole[3:7])
