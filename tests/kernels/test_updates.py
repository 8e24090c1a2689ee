"""Update kernels against numpy, each for one step on random state."""

import numpy as np
import pytest

from hpcdl.kernels import updates

RATE, SCALE, DECAY, BETA, BETA2, ROOT, EPS, SHRINK = 0.1, 0.25, 0.01, 0.9, 0.99, 3.0, 1e-3, 0.98
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}


def sgd(w, g):
    return [w - RATE * (SCALE * g + DECAY * w)]


def momentum(w, g, v):
    v = BETA * v + SCALE * g + DECAY * w
    return [w - RATE * v, v]


def nesterov(w, g, v):
    d = SCALE * g + DECAY * w
    v = BETA * v + d
    return [w - RATE * (d + BETA * v), v]


def adam(w, g, m, s):
    d = SCALE * g + DECAY * w
    m, s = BETA * m + (1 - BETA) * d, BETA2 * s + (1 - BETA2) * d**2
    return [SHRINK * w - RATE * m / (ROOT * np.sqrt(s) + EPS), m, s]


def yogi(w, g, m, s):
    d = SCALE * g + DECAY * w
    m, s = BETA * m + (1 - BETA) * d, s - (1 - BETA2) * d**2 * np.sign(s - d**2)
    return [w - RATE * m / (np.sqrt(s) + EPS), m, s]


CASES = {  # kernel, plain formula, state vectors, settings
    "sgd": (updates.sgd, sgd, 0, [RATE, SCALE, DECAY]),
    "momentum": (updates.momentum, momentum, 1, [RATE, SCALE, DECAY, BETA]),
    "nesterov": (updates.nesterov, nesterov, 1, [RATE, SCALE, DECAY, BETA]),
    "adam": (updates.adam, adam, 2, [RATE, SCALE, DECAY, SHRINK, BETA, 1 - BETA, BETA2, 1 - BETA2, ROOT, EPS]),
    "yogi": (updates.yogi, yogi, 2, [RATE, SCALE, DECAY, BETA, 1 - BETA, 1 - BETA2, EPS]),
}


def vectors(size, count, dtype):
    """w, g and `count` state vectors; positive, so that each can be a second moment."""
    random = np.random.default_rng(size)
    return [random.random(size).astype(dtype) for _ in range(2 + count)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [0, 1, 3, 1000])
@pytest.mark.parametrize("name", CASES)
def test_one_step(name, size, dtype):
    kernel, formula, count, settings = CASES[name]
    w, g, *state = vectors(size, count, dtype)
    gradient = g.copy()
    expected = formula(*(array.astype("float64") for array in (w, g, *state)))
    kernel(w, g, *state, *settings)
    for array, wanted in zip([w, *state], expected, strict=True):
        assert array.dtype == dtype
        np.testing.assert_allclose(array, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    np.testing.assert_array_equal(g, gradient)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_a_slice_is_updated_to_the_same_bits(name, dtype):
    kernel, _, count, settings = CASES[name]
    whole, parts = vectors(1000, count, dtype), vectors(1000, count, dtype)
    kernel(*whole, *settings)
    for cut in (slice(0, 1), slice(1, 334), slice(334, 1000)):
        kernel(*(array[cut] for array in parts), *settings)
    for array, part in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(array, part)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_nan_and_infinity_are_not_hidden(name, dtype):
    kernel, _, count, settings = CASES[name]
    for bad in (np.nan, np.inf):
        w, g, *state = vectors(100, count, dtype)
        g[17] = bad
        kernel(w, g, *state, *settings)
        assert not np.isfinite(w[17])
        assert np.isfinite(np.delete(w, 17)).all()
