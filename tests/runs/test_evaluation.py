"""Scores are those of the textbook, whatever the shape of the model's output, and add up over shares and blocks."""

import math

import numpy as np
import pytest

from hpcdl.data import from_arrays
from hpcdl.models import make_model
from hpcdl.models.model import count
from hpcdl.random import Random
from hpcdl.runs.evaluation import evaluate, scores


def test_right_answers():
    assert count(np.array([[0.2, 0.8], [0.9, 0.1], [0.4, 0.6]]), np.array([1, 0, 0]), 2) == 2
    assert count(np.array([0.3, 0.6, 0.4]), np.array([0, 1, 1]), 2) == 2  # probabilities of class 1
    assert count(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 0.0]), 0) == 4 + 9


def test_means():
    found = scores(np.array([6.0, 3.0, 4.0]), classes=2)
    assert (found.loss, found.accuracy, found.rmse) == (1.5, 0.75, None)
    found = scores(np.array([8.0, 16.0, 4.0]), classes=0)
    assert (found.loss, found.accuracy, found.rmse) == (2.0, None, 2.0)
    assert found.named("test") == {"test_loss": 2.0, "test_rmse": 2.0}


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_shares_and_blocks_add_up(classes):
    random = np.random.default_rng(3)
    y = random.integers(0, classes, 41) if classes else random.standard_normal(41)
    data = from_arrays(random.standard_normal((41, 5)), y, dtype="float64")
    model = make_model({0: "linear", 2: "logistic", 3: "mlp:4"}[classes], (5,), classes, "float64")
    parameters = model.initialize(Random(1)) + 0.1
    whole = evaluate(model, parameters, data.train, classes)
    model.rows_at_once = 7
    parts = sum(evaluate(model, parameters, data.train, classes, (rank, 3)) for rank in range(3))
    assert np.allclose(whole, parts, rtol=1e-12) and whole[2] == 41
    if not classes:
        x, _ = data.train.rows(0, 41)
        error = model.predict(parameters, x) - y
        assert math.isclose(scores(whole, 0).rmse, math.sqrt((error**2).mean()))
