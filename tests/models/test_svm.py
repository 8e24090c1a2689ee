"""The support vector machine: a subgradient of the hinge, and the optimum of a problem that is solved by hand."""

import numpy as np
import pytest

from hpcdl.models import make_model
from hpcdl.optim import make_optimizer
from hpcdl.random import Random


def test_gradient_away_from_the_kink(make_batch):
    model, batch = make_model("svm", (4,), 2, "float64"), make_batch(30, 4, 2, "float64")
    w = 3 * model.initialize(Random(1)) + 0.1
    sign = 2 * batch.y - 1
    margins = sign * (batch.x @ w[:4] + w[4])
    assert abs(margins - 1).min() > 1e-4 and (margins < 1).any() and (margins > 1).any()
    gradient, numeric = np.zeros(5), np.empty(5)
    loss = model.loss_and_gradient(w, batch, gradient)
    assert loss == pytest.approx(np.maximum(0, 1 - margins).sum(), rel=1e-13)
    for i in range(5):
        above, below = (model.evaluate(w + h * np.eye(5)[i], batch)[0] for h in (1e-6, -1e-6))
        numeric[i] = (above - below) / 2e-6
    np.testing.assert_allclose(gradient, numeric, atol=1e-8)


@pytest.mark.parametrize("label", [0, 1])
def test_at_the_kink_it_takes_the_subgradient_zero(label, make_batch):
    """There every slope between that of the left and that of the right is a subgradient: 0 leaves a right answer."""
    model, batch = make_model("svm", (1,), 2, "float64"), make_batch(1, 1, 2, "float64")
    batch.x[:], batch.y[:] = 1, label
    w = np.array([2.0 * label - 1, 0])
    gradient = np.zeros(2)
    assert model.loss_and_gradient(w, batch, gradient) == 0 and not gradient.any()
    assert model.loss_and_gradient(0.5 * w, batch, gradient) == 0.5
    np.testing.assert_array_equal(gradient, -w[0] * np.ones(2))


def test_predictions_are_classes(make_batch):
    model, batch = make_model("svm", (3,), 2, "float64"), make_batch(20, 3, 2, "float64")
    w = model.initialize(Random(0))
    z = batch.x @ w[:3] + w[3]
    predicted = model.predict(w, batch.x)
    np.testing.assert_array_equal(predicted, z > 0)
    loss, correct = model.evaluate(w, batch)
    assert correct == np.count_nonzero(predicted == batch.y) and loss > 0


@pytest.mark.parametrize("decay, wanted", [(0.25, 1.0), (2.0, 0.5)])
def test_the_optimum_of_two_points(decay, wanted, make_batch):
    """x = 1 of class 1, x = -1 of class 0: with b = 0 the objective is max(0, 1 - w) + d/2 w^2, least at min(1, 1/d).

    Subgradient descent with rates that fall comes there.
    """
    model, batch = make_model("svm", (1,), 2, "float64"), make_batch(2, 1, 2, "float64")
    batch.x[:, 0], batch.y[:] = [1, -1], [1, 0]
    optimizer = make_optimizer("sgd", 2, "float64", lambda step: 1 / (decay * (step + 10)), weight_decay=decay)
    w = np.array([-3.0, 0.7])
    for _ in range(20_000):
        gradient = np.zeros(2)
        model.loss_and_gradient(w, batch, gradient)
        optimizer.update(w, gradient, scale=0.5)
    np.testing.assert_allclose(w, [wanted, 0], atol=5e-3)
