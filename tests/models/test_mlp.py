"""The multi-layer perceptron, and linear models as those without hidden layers."""

from types import SimpleNamespace

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.random import Random


@pytest.mark.parametrize("outputs", [(), (3,)])
@pytest.mark.parametrize("loss", ["squared", "huber:delta=0.3"])
@pytest.mark.parametrize("spec", ["linear", "mlp:6,activation=tanh"])
def test_regression_with_several_outputs(spec, loss, outputs):
    """Loss, gradient and score from the definition; several outputs share the hidden layers."""
    random = np.random.default_rng(2)
    model = make_model(spec, (4,), 0, "float64", outputs=outputs, loss=loss)
    w = model.initialize(Random(1)) + 0.1 * random.standard_normal(model.size)
    batch = SimpleNamespace(x=random.standard_normal((7, 4)), y=random.standard_normal((7, *outputs)))
    z = model.predict(w, batch.x)
    assert z.shape == batch.y.shape

    def loss_at(w):
        e = abs(model.predict(w, batch.x) - batch.y)
        each = e**2 / 2 if loss == "squared" else np.where(e <= 0.3, e**2 / 2, 0.3 * (e - 0.15))
        return each.sum()

    gradient = np.zeros_like(w)
    assert model.loss_and_gradient(w, batch, gradient) == pytest.approx(loss_at(w), rel=1e-12)
    steps = 1e-6 * np.eye(len(w))
    numeric = [(loss_at(w + step) - loss_at(w - step)) / 2e-6 for step in steps]
    np.testing.assert_allclose(gradient, numeric, rtol=1e-5, atol=1e-7)
    assert model.evaluate(w, batch) == pytest.approx((loss_at(w), ((z - batch.y) ** 2).sum()), rel=1e-12)
    with pytest.raises(UsageError, match="y is a float64 array of shape"):
        model.evaluate(w, SimpleNamespace(x=batch.x, y=np.zeros((7, 2))))
