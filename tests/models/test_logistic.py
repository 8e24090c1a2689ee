"""Logistic regression is softmax regression with two classes, of which only the difference counts."""

import numpy as np
import pytest

from hpcdl.models import make_model
from hpcdl.random import Random


def test_equals_softmax_regression_with_two_classes(make_batch):
    logistic = make_model("logistic", (4,), 2, "float64")
    softmax = make_model("softmax", (4,), 2, "float64")
    batch = make_batch(20, 4, 2, "float64")
    w, wide = logistic.initialize(Random(0)), np.zeros(softmax.size)
    w[-1] = 0.3
    softmax.layout.view(wide, "dense1.weight")[:, 1] = w[:4]
    softmax.layout.view(wide, "dense1.bias")[1] = w[4]
    gradient, wide_gradient = np.zeros_like(w), np.zeros_like(wide)
    loss = logistic.loss_and_gradient(w, batch, gradient)
    assert loss == pytest.approx(softmax.loss_and_gradient(wide, batch, wide_gradient), rel=1e-12)
    weight, bias = softmax.layout.views(wide_gradient).values()
    np.testing.assert_allclose(gradient, [*weight[:, 1], bias[1]], rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(logistic.predict(w, batch.x), softmax.predict(wide, batch.x)[:, 1], rtol=1e-12)
    assert logistic.evaluate(w, batch)[1] == softmax.evaluate(wide, batch)[1]
