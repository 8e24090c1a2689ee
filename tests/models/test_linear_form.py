"""The form of a linear model: loss and gradient computed from it are those of the model."""

import math

import numpy as np
import pytest
from plain_models import loss_of, make_batch

from hpcdl.errors import UsageError
from hpcdl.kernels.linear import HINGE, LOGISTIC, SOFTMAX, SQUARED
from hpcdl.models import make_model
from hpcdl.models.linear_form import linear_form
from hpcdl.random import Random

NAMES = {SQUARED: "squared", LOGISTIC: "logistic", HINGE: "hinge", SOFTMAX: "softmax"}  # in plain_models.py


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
def test_loss_and_gradient_from_single_coordinates(spec, classes, outputs, kind):
    model, batch = make_model(spec, (5,), classes, "float64", outputs=outputs), make_batch(7, 5, classes, "float64")
    if outputs:
        batch.y = np.random.default_rng(1).standard_normal((7, *outputs))
    form = linear_form(model, "this")
    assert form == (kind, 5, math.prod(outputs) if outputs else classes if kind == SOFTMAX else 1)
    w = model.initialize(Random(0)) + 0.1
    x, gradient, wanted = np.c_[batch.x, np.ones(7)], np.zeros(model.size), np.zeros(model.size)  # x of the bias is 1
    places = [np.arange(form.features + 1) * form.outputs + k for k in range(form.outputs)]  # of an output's parameters
    total, slopes = loss_of(NAMES[kind], np.stack([x @ w[place] for place in places], axis=1), batch.y)
    for place, slope in zip(places, slopes.T, strict=True):
        wanted[place] = x.T @ slope
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
