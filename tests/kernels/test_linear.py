"""The loss of one example against the kernels of whole batches, and its slope against differences."""

import numba
import numpy as np
import pytest

from hpcdl.kernels import loss
from hpcdl.kernels.linear import HINGE, LOGISTIC, SQUARED, loss_and_slope

KERNELS = {SQUARED: loss.squared, LOGISTIC: loss.logistic, HINGE: loss.hinge}


@numba.njit
def called(kind, z, y, one):
    return loss_and_slope(kind, z, y, one)


@pytest.mark.parametrize("kind", KERNELS)
def test_as_the_kernel_of_a_batch(kind):
    random = np.random.default_rng(kind)
    z, y = 3 * random.standard_normal(40), random.integers(0, 2, 40)
    for output, target in zip(z, y, strict=True):
        dz = np.empty((1, 1))
        label = np.array([target], "f8" if kind == SQUARED else "i8")
        total, _ = KERNELS[kind](np.array([[output]]), label, dz)
        found = called(kind, output, float(target), 1.0)
        assert found == pytest.approx((total, dz[0, 0]), rel=1e-13, abs=1e-15)
