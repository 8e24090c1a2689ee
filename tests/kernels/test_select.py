"""The k values of largest magnitude, beside numpy's order: ties, infinite values, NaN, and values of one bin."""

import numpy as np
import pytest

from hpcdl.kernels.select import select_largest

SPECIAL = {
    "drawn": lambda x: x,
    "equal": lambda x: np.full_like(x, 1.5),
    "a third NaN": lambda x: np.where(np.arange(x.size) % 3, x, np.nan).astype(x.dtype),
    "all NaN": lambda x: np.full_like(x, np.nan),
    "some infinite": lambda x: np.where(np.arange(x.size) % 50, x, -np.inf).astype(x.dtype),
    "whole numbers": np.round,
    "one is not zero": lambda x: (np.arange(x.size) == x.size // 2).astype(x.dtype),
    "denormal": lambda x: x * x.dtype.type(np.finfo(x.dtype).tiny / 4),
    "of all sizes": lambda x: np.exp2(12 * x),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_the_largest_and_of_equal_ones_the_first(kind, dtype):
    for n in (1, 7, 32, 33, 40_003):
        x = SPECIAL[kind](np.random.default_rng(n).standard_normal(n).astype(dtype))
        order = np.argsort(-np.where(np.isnan(x), np.inf, np.abs(x)), kind="stable")
        for k in {1, max(1, n // 1000), max(1, n // 100), max(1, n // 3), n}:
            indices = np.empty(k, np.uint32)
            select_largest(x, indices)
            assert np.array_equal(indices, np.sort(order[:k])), (n, k)
