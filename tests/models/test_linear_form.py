"""What a linear model is made of: with it a loss and a gradient are put together as the model itself has them."""

import math

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.kernels.linear import HINGE, LOGISTIC, SOFTMAX, SQUARED
from hpcdl.models import make_model
from hpcdl.models.linear_form import linear_form
from hpcdl.random import Random


def losses(kind, z, y):
    """The loss of one row of outputs, and its slope by each of them."""
    sign = 2 * y - 1
    if kind == SOFTMAX:
        p = np.exp(z) / np.exp(z).sum()
        return -math.log(p[y]), p - np.eye(len(z))[y]
    if kind == LOGISTIC:
        return np.log1p(np.exp(-sign * z[0])), 1 / (1 + np.exp(-z)) - y
    if kind == HINGE:
        return max(0, 1 - sign * z[0]), np.array([-sign if sign * z[0] < 1 else 0])
    return ((z - y) ** 2).sum() / 2, z - y


@pytest.mark.parametrize(
    "spec, classes, outputs, kind",
    [
        ("linear", 0, (), SQUARED),
        ("linear", 0, (3,), SQUARED),
        ("logistic", 2, (), LOGISTIC),
        ("svm", 2, (), HINGE),
        ("softmax", 2, (), SOFTMAX),
        ("softmax", 4, (), SOFTMAX),
    ],
)
def test_loss_and_gradient_from_single_coordinates(spec, classes, outputs, kind, make_batch):
    model, batch = make_model(spec, (5,), classes, "float64", outputs=outputs), make_batch(7, 5, classes, "float64")
    if outputs:
        batch.y = np.random.default_rng(1).standard_normal((7, *outputs))
    form = linear_form(model, "this")
    assert form == (kind, 5, math.prod(outputs) if outputs else classes if kind == SOFTMAX else 1)
    w = model.initialize(Random(0)) + 0.1
    gradient, wanted, total = np.zeros(model.size), np.zeros(model.size), 0.0
    for x, y in zip(batch.x, batch.y, strict=True):
        z = [
            w[form.features * form.outputs + k] + sum(x[j] * w[j * form.outputs + k] for j in range(form.features))
            for k in range(form.outputs)
        ]
        loss, slopes = losses(kind, np.array(z), y)
        total += loss
        for k in range(form.outputs):
            wanted[form.features * form.outputs + k] += slopes[k]
            for j in range(form.features):
                wanted[j * form.outputs + k] += x[j] * slopes[k]
    assert model.loss_and_gradient(w, batch, gradient) == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "spec, classes, options, message",
    [
        ("mlp:4", 3, {}, "train-x works on the coordinates of linear models: take --model linear, logistic, svm or so"),
        ("gpt:layers=1,width=4,heads=1", 5, {}, "linear models: take --model"),
        ("linear", 0, {"loss": "huber"}, "train-x knows no Huber loss; take --loss squared"),
    ],
)
def test_other_models_are_refused(spec, classes, options, message):
    with pytest.raises(UsageError, match=message):
        linear_form(make_model(spec, (5,), classes, "float64", **options), "train-x")


def test_only_some_of_the_losses():
    with pytest.raises(UsageError, match=r"take --model svm$"):
        linear_form(make_model("softmax", (5,), 3), "train-x", (HINGE,))
    with pytest.raises(UsageError, match=r"take --model logistic or svm$"):
        linear_form(make_model("softmax", (5,), 3), "train-x", (LOGISTIC, HINGE))
    with pytest.raises(UsageError, match="linear models"):
        linear_form(object(), "train-x")
