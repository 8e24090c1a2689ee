"""Layer normalization against numpy in float64, and its gradient against differences."""

import numpy as np
import pytest

from hpcdl.kernels.layer_norm import EPS, layer_norm, layer_norm_backward


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=[(0, 3), (1, 1), (5, 1), (3, 5), (7, 100)], ids=str)
def arrays(request, dtype):
    """x, gain, bias, dy."""
    random, (rows, n) = np.random.default_rng(1), request.param
    return [random.standard_normal(shape).astype(dtype) for shape in [(rows, n), n, n, (rows, n)]]


def forward(x, gain, bias):
    """y, mean, rstd by the kernel."""
    y, mean, rstd = np.full_like(x, np.nan), *np.full((2, len(x)), np.nan, x.dtype)
    layer_norm(x, gain, bias, y, mean, rstd)
    return y, mean, rstd


def naive(x, gain, bias):
    x, gain, bias = (array.astype("float64") for array in (x, gain, bias))
    return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + EPS) * gain + bias


def test_backward_is_the_slope(arrays, dtype):
    """dx, dgain and dbias against differences of the float64 formula."""
    x, gain, bias, dy = arrays
    _, mean, rstd = forward(x, gain, bias)
    dx, dgain, dbias = np.full_like(x, np.nan), np.ones_like(gain), np.ones_like(bias)
    layer_norm_backward(dy, x, gain, mean, rstd, dx, dgain, dbias)
    wide = [array.astype("float64") for array in (x, gain, bias)]
    for k, found in enumerate((dx, dgain - 1, dbias - 1)):
        slope = np.empty_like(wide[k])
        for place in np.ndindex(slope.shape):
            sides = []
            for step in (1e-4, -1e-4):
                moved = [array.copy() for array in wide]
                moved[k][place] += step
                sides.append((naive(*moved) * dy).sum())
            slope[place] = (sides[0] - sides[1]) / 2e-4
        # The differences are good to h^2 f''', and rstd is up to 300 where all elements of a row are alike.
        np.testing.assert_allclose(found, slope, rtol=1e-4, atol=1e-4 if dtype == "float32" else 1e-6)


def test_dx_may_take_the_place_of_dy(arrays):
    x, gain, bias, dy = arrays
    _, mean, rstd = forward(x, gain, bias)
    apart, same = ([np.empty_like(x), np.zeros_like(gain), np.zeros_like(bias)] for _ in range(2))
    layer_norm_backward(dy, x, gain, mean, rstd, *apart)
    same[0] = dy.copy()
    layer_norm_backward(same[0], x, gain, mean, rstd, *same)
    for one, other in zip(apart, same, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_large_mean_does_not_eat_the_variance(dtype):
    x = (2.0**16 + np.arange(64) % 2).astype(dtype)[None]  # variance 1/4; the squares would need 34 bits
    y, _, rstd = forward(x, np.ones(64, dtype), np.zeros(64, dtype))
    np.testing.assert_allclose(rstd, 1 / np.sqrt(0.25 + EPS), rtol=1e-6)
    np.testing.assert_allclose(y, np.where(np.arange(64) % 2, 1, -1)[None], rtol=1e-4)


def test_a_row_of_equal_elements_has_no_direction(dtype):
    x, bias = np.full((1, 8), 3, dtype), np.arange(8, dtype=dtype)
    y, _, _ = forward(x, np.ones(8, dtype), bias)
    np.testing.assert_array_equal(y[0], bias)
