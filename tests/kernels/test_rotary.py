"""Rotations keep lengths, have inverses, and products of differences of positions (test_cases.py: as in numpy)."""

import numpy as np
import pytest

from hpcdl.kernels.rotary import rotate, rotations


def table_of(positions, size, dtype, base=100.0):
    table = np.empty((len(positions), size), dtype)
    rotations(table, np.asarray(positions), base)
    return table


def test_angles(dtype):
    """The first pair turns by 1 a position, the last by almost 1 / base; far positions lose no digits to the type."""
    table = table_of([0, 1, 1_000_003], 6, dtype).astype("float64")
    angles = np.array([0, 1, 1_000_003])[:, None] * [1, 100 ** (-1 / 3), 100 ** (-2 / 3)]
    near = 1e-7 if dtype == "float32" else 1e-9
    np.testing.assert_allclose(table[:, ::2], np.cos(angles), atol=near)
    np.testing.assert_allclose(table[:, 1::2], np.sin(angles), atol=near)


@pytest.mark.parametrize("first", [1, 50])
def test_products_depend_on_the_difference(first):
    """Of all pairs of tokens in a sequence, and of two sequences in one array; other columns stay to the bit."""
    length, size, found = 7, 8, []
    x = np.random.default_rng(0).standard_normal((2 * length, 2 * size + 3))
    for start in (0, first):
        turned, table = x.copy(), table_of(range(start, start + length), size, "float64")
        rotate(turned, table, 2 * size, 1)
        q, k = turned[:, :size], turned[:, size : 2 * size]
        found.append(q @ k.T)
        np.testing.assert_array_equal(turned[:, 2 * size :], x[:, 2 * size :])
        np.testing.assert_allclose((q**2).sum(axis=1), (x[:, :size] ** 2).sum(axis=1))
        rotate(turned, table, 2 * size, -1)
        np.testing.assert_allclose(turned, x, atol=1e-14)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-10, atol=1e-12)
    assert not np.allclose(found[0], x[:, :size] @ x[:, size : 2 * size].T)
