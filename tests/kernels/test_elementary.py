"""exp, tanh and log1p against numpy in extended precision, in units in the last place."""

import numba
import numpy as np
import pytest

from hpcdl.kernels import elementary
from hpcdl.kernels.bind import FASTMATH, OPTIONS

REFERENCE = {"exp": np.exp, "tanh": np.tanh, "log1p": np.log1p}
RANGE = {  # beyond it: test_ends
    ("exp", "float32"): (-86.8, 88.7),
    ("exp", "float64"): (-707.4, 709.7),
    ("tanh", "float32"): (-20, 20),
    ("tanh", "float64"): (-60, 60),
    ("log1p", "float32"): (0, 1),
    ("log1p", "float64"): (0, 1),
}
ERROR = {("tanh", "float32"): 5}  # units in the last place; 3 for the others


def over(function):
    """Return a function that applies `function` to an array, in a loop compiled with the flags of kernels."""

    @numba.njit(fastmath=FASTMATH, **OPTIONS)
    def loop(x, y):
        for i in range(x.size):
            y[i] = function(x[i])

    def apply(x):
        y = np.empty_like(x)
        loop(x, y)
        return y

    return apply


@pytest.fixture(scope="module")
def functions():
    return {name: over(getattr(elementary, name)) for name in REFERENCE}


@pytest.mark.parametrize("name, dtype", RANGE)
def test_units_in_the_last_place(name, dtype, functions):
    low, high = RANGE[name, dtype]
    random = np.random.default_rng(0)
    small = 10 ** random.uniform(-10, 0, 50_000)
    x = np.concatenate([random.uniform(low, high, 100_000), small, -small if low < 0 else small, [low, 0, high]])
    x = x.astype(dtype)
    wanted = REFERENCE[name](x.astype("longdouble"))
    error = np.abs(functions[name](x) - wanted) / np.spacing(np.abs(wanted).astype(dtype))
    worst = error.argmax()
    assert error[worst] < ERROR.get((name, dtype), 3), f"{name}({x[worst]})"


def test_ends(dtype, functions):
    x = np.array([np.nan, np.inf, -np.inf, 0, 1e4, -1e4], dtype)
    np.testing.assert_array_equal(functions["exp"](x), [np.nan, np.inf, 0, 1, np.inf, 0])
    tanh = functions["tanh"](x)
    np.testing.assert_allclose(tanh, [np.nan, 1, -1, 0, 1, -1], rtol=5 * np.finfo(dtype).eps)
    assert np.nanmax(np.abs(tanh)) <= 1
    np.testing.assert_array_equal(functions["log1p"](x[[0, 3]]), [np.nan, 0])


def test_as_plain_python():
    """As the simulator and CUDA call them."""
    for name, function in REFERENCE.items():
        assert getattr(elementary, name)(0.5) == pytest.approx(function(0.5))
