"""Layer normalization of rows with a large mean (test_cases.py: equal to numpy; test_layered.py: its gradient)."""

import numpy as np

from hpcdl.kernels.layer_norm import EPS, layer_norm


def test_a_large_mean_does_not_cancel_the_variance(dtype):
    x = (2.0**16 + np.arange(64) % 2).astype(dtype)[None]  # variance 1/4; the squares would need 34 bits
    y, mean, rstd = np.empty_like(x), *np.empty((2, 1), dtype)
    layer_norm(x, np.ones(64, dtype), np.zeros(64, dtype), y, mean, rstd)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(0.25 + EPS), rtol=1e-6)
    np.testing.assert_allclose(y, np.where(np.arange(64) % 2, 1, -1)[None], rtol=1e-4)
