"""Bias and activation kernels against numpy."""

import numpy as np
import pytest

from hpcdl.kernels import activation

SHAPES = [(0, 3), (1, 1), (3, 1), (1, 3), (3, 1000), (1000, 3)]
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=SHAPES, ids=str)
def arrays(request, dtype):
    """z, dy (rows, width) and b, gb (width,)."""
    rows, width = request.param
    random = np.random.default_rng(1)
    return [random.standard_normal(shape).astype(dtype) for shape in [(rows, width), (rows, width), width, width]]


def test_add_bias(arrays):
    z, _, b, _ = arrays
    expected = z + b
    activation.add_bias(z, b)
    np.testing.assert_array_equal(z, expected)


def test_add_bias_relu(arrays):
    z, _, b, _ = arrays
    expected = np.maximum(z + b, 0)
    activation.add_bias_relu(z, b)
    np.testing.assert_array_equal(z, expected)


def test_add_rows(arrays, dtype):
    _, dy, _, gb = arrays
    before, expected = dy.copy(), gb + dy.astype("float64").sum(axis=0)
    activation.add_rows(dy, gb)
    np.testing.assert_allclose(gb, expected, rtol=0, atol=300 * TOLERANCE[dtype])
    np.testing.assert_array_equal(dy, before)


def test_relu_backward(arrays, dtype):
    y, dy, _, gb = arrays
    before, expected = dy.copy(), np.where(y > 0, dy, 0)
    sums = gb + expected.astype("float64").sum(axis=0)
    activation.relu_backward(y, dy, gb)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_allclose(gb, sums, rtol=0, atol=300 * TOLERANCE[dtype])
    np.testing.assert_array_equal(dy, before)


def test_tanh_backward(arrays, dtype):
    y, dy, _, gb = arrays
    np.tanh(y, out=y)
    before, expected = dy.copy(), dy * (1 - y**2)
    sums = gb + expected.astype("float64").sum(axis=0)
    activation.tanh_backward(y, dy, gb)
    np.testing.assert_allclose(y, expected, rtol=0, atol=10 * TOLERANCE[dtype])
    np.testing.assert_allclose(gb, sums, rtol=0, atol=300 * TOLERANCE[dtype])
    np.testing.assert_array_equal(dy, before)


@pytest.mark.parametrize("width", [1, 40])  # 40: the vectorized part and the rest of the loop
def test_nan_passes_through(width, dtype):
    nan, one = np.full((2, width), np.nan, dtype), np.ones((2, width), dtype)
    b = np.ones(width, dtype)
    for kernel in (activation.add_bias, activation.add_bias_relu):
        z = nan.copy()
        kernel(z, b)
        assert np.isnan(z).all()
    for kernel in (activation.relu_backward, activation.tanh_backward):
        y, gb = one / 2, b.copy()
        kernel(y, nan, gb)  # a NaN gradient
        assert np.isnan(y).all() and np.isnan(gb).all()
    y = nan.copy()
    activation.relu_backward(y, one, b.copy())  # a NaN output is not taken for an inactive unit
    np.testing.assert_array_equal(y, one)
