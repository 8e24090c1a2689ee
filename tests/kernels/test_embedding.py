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


@pytest.mark.parametrize("width", [1, 5, 64])
def test_embed(tokens, width, dtype):
    table, out = table_of(width, dtype), np.full((tokens.size, width), np.nan, dtype)
    assert embedding.embed(tokens, table, 0, VOCABULARY, out) == 0
    np.testing.assert_array_equal(out, table[tokens.ravel().astype(int)])


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


@pytest.mark.parametrize("first, end", [(0, 11), (4, 9), (2, 2)])
@pytest.mark.parametrize("width", [1, 5, 64])
def test_embed_backward(first, end, width, tokens, dtype):
    dy = np.random.default_rng(2).standard_normal((tokens.size, width)).astype(dtype)
    gradient = table_of(width, dtype)[first:end].copy()
    expected = gradient.astype("float64")
    for token, row in zip(tokens.ravel(), dy, strict=True):
        if first <= token < end:
            expected[int(token) - first] += row
    embedding.embed_backward(tokens, dy, first, gradient)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-4 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("offset", [0, 1, 6, 7, 20])
@pytest.mark.parametrize("rows", [0, 1, 7, 40, 70])
def test_positions(rows, offset, dtype):
    random = np.random.default_rng(rows)
    x, table = (random.standard_normal((n, 5)).astype(dtype) for n in (rows, 9))
    place = [(i + offset) % 7 for i in range(rows)]
    expected = x + table[place].reshape(x.shape)
    gradient, wanted = table.copy(), table.astype("float64")
    np.add.at(wanted, place, x)
    embedding.add_positions_backward(x, gradient, 7, offset)
    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-5 if dtype == "float32" else 1e-13)
    embedding.add_positions(x, table, 7, offset)
    np.testing.assert_array_equal(x, expected)


def test_gradients_of_a_part_are_the_whole_ones_bits(tokens, dtype):
    dy = np.random.default_rng(2).standard_normal((tokens.size, 5)).astype(dtype)
    whole, part = np.zeros((VOCABULARY, 5), dtype), np.zeros((4, 5), dtype)
    embedding.embed_backward(tokens, dy, 0, whole)
    embedding.embed_backward(tokens, dy, 3, part)
    np.testing.assert_array_equal(part, whole[3:7])
