"""The support vector machine at the kink of the hinge loss.

Its gradient elsewhere and its predictions: test_layered.py, where it is one of the models."""

import numpy as np
import pytest
from plain_models import make_batch

from hpcdl.models import make_model


@pytest.mark.parametrize("label", [0, 1])
def test_at_the_kink_it_takes_the_subgradient_zero(label):
    """At the kink every slope between the left and the right one is a subgradient; 0 keeps a right answer."""
    model, batch = make_model("svm", (1,), 2, "float64"), make_batch(1, 1, 2, "float64")
    batch.x[:], batch.y[:] = 1, label
    w = np.array([2.0 * label - 1, 0])
    gradient = np.zeros(2)
    assert model.loss_and_gradient(w, batch, gradient) == 0 and not gradient.any()
    assert model.loss_and_gradient(0.5 * w, batch, gradient) == 0.5
    np.testing.assert_array_equal(gradient, -w[0] * np.ones(2))
