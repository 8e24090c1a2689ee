"""Measures are those of the textbook, and add up over blocks."""

import math

import numpy as np
import pytest

from hpcdl.inference import scores
from hpcdl.inference.scores import ClassMeasures, ValueMeasures


@pytest.fixture
def scored():
    random = np.random.default_rng(4)
    p = random.dirichlet([0.5] * 4, 200)
    return random.choice(3, 200), p  # class 3 is never right


@pytest.mark.parametrize("most", [1000, 2])
def test_classes(scored, monkeypatch, most):
    monkeypatch.setattr(scores, "MOST", most)
    y, p = scored
    parts, whole = ClassMeasures(4), ClassMeasures(4)
    for rows in (slice(0, 0), slice(0, 70), slice(70, 200)):
        if rows.stop > rows.start:
            parts.add(y[rows], p[rows])
    whole.add(y, p)
    found, once = parts.results(), whole.results()
    assert {name: found[name] for name in ("confusion", "precision", "recall", "accuracy")}.items() <= once.items()
    assert found["expected_calibration_error"] == pytest.approx(once["expected_calibration_error"])
    said = p.argmax(axis=1)
    for c in range(4):
        hits = ((y == c) & (said == c)).sum()
        assert found["precision"][c] == pytest.approx(hits / (said == c).sum())
        assert found["recall"][c] == (None if c == 3 else pytest.approx(hits / (y == c).sum()))
    assert found["rows_per_class"] == np.bincount(y, minlength=4).tolist()
    assert found["accuracy"] == pytest.approx((y == said).mean())
    if most > 2:
        assert found["confusion"][1][2] == ((y == 1) & (said == 2)).sum() and np.sum(found["confusion"]) == 200
    else:
        assert found["confusion"] is None


def test_expected_calibration_error():
    """A hundred rows said with 0.9, of which 60 are right; as many with 0.7, of which 70 are."""
    p = np.array([[0.9, 0.1]] * 100 + [[0.7, 0.3]] * 100)
    y = np.array([0] * 60 + [1] * 40 + [0] * 70 + [1] * 30)
    both = ClassMeasures(2)
    both.add(y, p)
    assert both.results()["expected_calibration_error"] == pytest.approx(0.5 * 0.3)
    one = ClassMeasures(2)
    one.add(1 - y, p[:, 1])  # of a logistic regression: the probability of class 1
    swapped = ClassMeasures(2)
    swapped.add(1 - y, p)
    assert one.results() == swapped.results()
    sure = ClassMeasures(2)
    sure.add(np.array([0]), np.array([[1.0, 0.0]]))  # the last bin has its upper end
    assert sure.results()["calibration"][-1] == {
        "from": 14 / 15, "to": 1.0, "rows": 1, "probability": 1.0, "accuracy": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("far", [0, 1e9])
def test_values(far):
    random = np.random.default_rng(0)
    y = far + random.standard_normal((300, 2)) * [1, 5]
    z = y + random.standard_normal((300, 2)) * 0.5
    found = ValueMeasures(2, y[0])
    for rows in (slice(0, 120), slice(120, 300)):
        found.add(y[rows], z[rows])
    got = found.results()
    error = z - y
    np.testing.assert_allclose(got["rmse"], np.sqrt((error**2).mean(axis=0)), rtol=1e-6)
    np.testing.assert_allclose(got["mae"], abs(error).mean(axis=0), rtol=1e-6)
    spread = ((y - y.mean(axis=0)) ** 2).sum(axis=0)
    np.testing.assert_allclose(got["r2"], 1 - (error**2).sum(axis=0) / spread, rtol=1e-5)


def test_values_that_are_all_the_same():
    found = ValueMeasures(1, np.array([7.0]))
    found.add(np.full(5, 7.0), np.full(5, 8.0))
    assert found.results() == {"rmse": [1.0], "mae": [1.0], "r2": [None]} and math.isfinite(found.results()["mae"][0])
