"""Predictions of the losses at outputs of any size."""

import warnings

import numpy as np
import pytest

from hpcdl.models.losses import Logistic, SoftmaxCrossEntropy, Squared
from hpcdl.models.pool import Pool


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_predictions_do_not_overflow(dtype):
    pool, z = Pool(dtype), np.array([[-1e30], [-200], [0], [200], [1e30]], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = Logistic(pool).predict(z)
        q = SoftmaxCrossEntropy(pool).predict(np.concatenate([0 * z, z], axis=1))
    np.testing.assert_allclose(p, [0, np.exp(np.array(-200, dtype)), 0.5, 1, 1], rtol=1e-5)
    np.testing.assert_allclose(q, np.stack([1 - p, p], axis=1), atol=1e-6)
    assert p.dtype == q.dtype == dtype


def test_nan_is_predicted_without_a_warning():
    z = np.array([[np.nan, 0], [0, np.inf], [0, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = SoftmaxCrossEntropy(Pool("float64")).predict(z)
        p = Logistic(Pool("float64")).predict(z[:, :1])
    assert np.isnan(q[0]).all() and np.isnan(q[1]).any() and (q[2] == 0.5).all()
    np.testing.assert_array_equal(p, [np.nan, 0.5, 0.5])


def test_squared_predicts_the_output():
    z = np.array([[1.5], [np.nan]])
    prediction = Squared(Pool("float64")).predict(z)
    np.testing.assert_array_equal(prediction, [1.5, np.nan])
    assert not np.shares_memory(prediction, z)
