"""RMSNorm of rows of zeros and of large numbers (test_cases.py: equal to numpy; test_layered.py: its gradient)."""

import numpy as np

from hpcdl.kernels.layer_norm import EPS
from hpcdl.kernels.rms_norm import rms_norm, rms_norm_backward


def test_rows_of_zeros_and_of_large_numbers(dtype):
    x = np.array([[0, 0, 0, 0], [1e15, -1e15, 1e15, -1e15]], dtype)
    y, rstd = np.empty_like(x), np.empty(2, dtype)
    rms_norm(x, np.full(4, 3, dtype), y, rstd)
    np.testing.assert_allclose(rstd, [EPS**-0.5, 1e-15], rtol=1e-6)
    np.testing.assert_allclose(y, [[0, 0, 0, 0], [3, -3, 3, -3]], rtol=1e-6)


def test_the_gradient_may_overwrite_that_of_the_output(dtype):
    random = np.random.default_rng(0)
    dy, x = random.standard_normal((2, 5, 19)).astype(dtype)
    gain, rstd = random.standard_normal(19).astype(dtype), random.random(5).astype(dtype)
    found = []
    for dx in (np.empty_like(dy), dy):
        dgain = np.ones(19, dtype)
        rms_norm_backward(dy, x, gain, rstd, dx, dgain)
        found.append((dx.copy(), dgain))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
