"""Scores are those of the textbook and of scikit-learn, and add up over blocks."""

import math

import numpy as np
import pytest

from hpcdl.models import scores
from hpcdl.models.scores import ClassMeasures, ValueMeasures


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
    assert {name: found[name] for name in ("confusion", "precision", "recall", "f1")}.items() <= once.items()
    assert found["scores"] == pytest.approx(once["scores"])
    said = p.argmax(axis=1)
    for c in range(4):
        hits = ((y == c) & (said == c)).sum()
        assert found["precision"][c] == pytest.approx(hits / (said == c).sum())
        assert found["recall"][c] == (None if c == 3 else pytest.approx(hits / (y == c).sum()))
    assert found["rows_per_class"] == np.bincount(y, minlength=4).tolist()
    assert found["scores"]["accuracy"] == pytest.approx((y == said).mean())
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
    assert both.scores()["calibration_error"] == pytest.approx(0.5 * 0.3)
    one = ClassMeasures(2)
    one.add(1 - y, p[:, 1])  # of a logistic regression: the probability of class 1
    swapped = ClassMeasures(2)
    swapped.add(1 - y, p)
    assert one.results()["confusion"] == swapped.results()["confusion"]
    assert one.scores() == pytest.approx(swapped.scores())
    sure = ClassMeasures(2)
    sure.add(np.array([0]), np.array([[1.0, 0.0]]))  # the last bin has its upper end
    assert sure.results()["calibration"][-1] == {
        "from": 14 / 15, "to": 1.0, "rows": 1, "probability": 1.0, "accuracy": 1.0,
    }  # fmt: skip


def plain_areas(y, p):
    """ROC AUC by its definition, over all pairs of rows; average precision over all rows, the surest first."""
    pairs = p[y][:, None] - p[~y][None]
    thresholds = np.unique(p)[::-1]
    recall = np.array([0, *((p[y] >= t).mean() for t in thresholds)])
    precision = np.array([y[p >= t].mean() for t in thresholds])
    return ((pairs > 0) + (pairs == 0) / 2).mean(), (np.diff(recall) * precision).sum()


def made(classes):
    """Rows, many of them of equal probability, of which one class is rare, as probabilities and true classes."""
    random = np.random.default_rng(classes)
    y = random.choice(classes, 300, p=[0.9, *[0.1 / (classes - 1)] * (classes - 1)])
    p = np.round(random.dirichlet(np.ones(classes), 300) + 0.5 * np.eye(classes)[y], 1) + 1e-3
    return y, p / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("classes", [2, 3])
def test_areas_and_penalties(classes):
    y, p = made(classes)
    measures = ClassMeasures(classes, curves=True)
    for rows in (slice(0, 100), slice(100, 300)):
        measures.add(y[rows], p[rows])
    found, chosen = measures.scores(), [1] if classes == 2 else range(classes)
    expected = np.array([plain_areas(y == number, p[:, number]) for number in chosen])
    assert [found["roc_auc"], found["average_precision"]] == pytest.approx(expected.mean(axis=0))
    assert found["log_loss"] == pytest.approx(-np.log(p[np.arange(300), y]).mean())
    squares = np.square(p - np.eye(classes)[y]).sum(axis=1).mean()
    assert found["brier_score"] == pytest.approx(squares / 2 if classes == 2 else squares)
    for curve, (area, average) in zip(measures.results()["curves"], expected, strict=True):
        assert (curve["roc_auc"], curve["average_precision"]) == pytest.approx((area, average))
        assert (curve["recall"][-1], curve["false_positive_rate"][-1]) == (1, 1)
        assert curve["recall"] == sorted(curve["recall"]) and curve["threshold"] == sorted(curve["threshold"])[::-1]
        x = p[:, curve["class"]]
        for threshold, precision in zip(curve["threshold"], curve["precision"], strict=True):
            assert precision == pytest.approx((y[x >= threshold] == curve["class"]).mean())


def test_as_scikit_learn_does():
    pytest.importorskip("sklearn", "1.7")
    metrics = pytest.importorskip("sklearn.metrics")
    for classes in (2, 3):
        y, p = made(classes)
        measures = ClassMeasures(classes, curves=True)
        measures.add(y, p)
        found, said = measures.scores(), p.argmax(axis=1)
        one = p[:, 1] if classes == 2 else p
        expected = {
            "accuracy": metrics.accuracy_score(y, said),
            "balanced_accuracy": metrics.balanced_accuracy_score(y, said),
            "roc_auc": metrics.roc_auc_score(y, one, multi_class="ovr"),
            "average_precision": metrics.average_precision_score(y, one),
            "log_loss": metrics.log_loss(y, p),
            "brier_score": metrics.brier_score_loss(y, one),
        }
        for name in ("precision", "recall", "f1"):
            of = getattr(metrics, f"{name}_score")
            expected[f"macro_{name}"] = of(y, said, average="macro", zero_division=0)
            expected |= {name: of(y, said, zero_division=0)} if classes == 2 else {}
        assert expected == pytest.approx({name: found[name] for name in expected}, rel=1e-9)


def test_a_threshold_changes_classes_alone():
    y, p = made(2)
    plain, low = ClassMeasures(2, curves=True), ClassMeasures(2, 0.25, curves=True)
    for each in (plain, low):
        each.add(y, p[:, 1])
    said = p[:, 1] >= 0.25
    assert low.results()["confusion"] == [[((y == c) & (said == d)).sum() for d in (0, 1)] for c in (0, 1)]
    assert low.scores()["recall"] > plain.scores()["recall"]
    same = ("roc_auc", "average_precision", "log_loss", "brier_score", "calibration_error")
    assert all(low.scores()[name] == plain.scores()[name] for name in same)


def test_what_is_undefined_is_left_out(monkeypatch):
    one = ClassMeasures(2, curves=True)
    one.add(np.zeros(3, int), np.array([0.1, 0.2, 0.6]))  # no row of class 1
    assert not {"roc_auc", "average_precision"} & {*one.scores()} and one.scores()["f1"] == 0
    assert one.results()["curves"][0]["recall"] == [None] * len(one.results()["curves"][0]["threshold"])
    sure = ClassMeasures(2, curves=True, certain=True)  # of a support vector machine
    sure.add(np.array([0, 1]), np.array([0.0, 1.0]))
    assert not {"roc_auc", "log_loss", "brier_score", "calibration_error"} & {*sure.scores()}
    assert sure.scores()["f1"] == 1
    monkeypatch.setattr(scores, "MOST_KEPT", 6)
    many = ClassMeasures(2, curves=True)
    for _ in range(2):
        many.add(np.array([0, 1]), np.array([0.2, 0.7]))
    assert "roc_auc" not in many.scores() and many.scores()["f1"] == 1


@pytest.mark.parametrize("far", [0, 1e9])
def test_values(far):
    random = np.random.default_rng(0)
    y = far + random.standard_normal((300, 2)) * [1, 5]
    z = y + random.standard_normal((300, 2)) * 0.5
    found = ValueMeasures(["a", "b"], y[0])
    for rows in (slice(0, 120), slice(120, 300)):
        found.add(y[rows], z[rows])
    got = found.results()
    error = z - y
    np.testing.assert_allclose(got["rmse"], np.sqrt((error**2).mean(axis=0)), rtol=1e-6)
    np.testing.assert_allclose(got["mae"], abs(error).mean(axis=0), rtol=1e-6)
    spread = ((y - y.mean(axis=0)) ** 2).sum(axis=0)
    np.testing.assert_allclose(got["r2"], 1 - (error**2).sum(axis=0) / spread, rtol=1e-5)


def test_values_that_are_all_the_same():
    found = ValueMeasures([""], 7.0)
    found.add(np.full(5, 7.0), np.full(5, 8.0))
    assert found.results() == {"rmse": [1.0], "mae": [1.0], "r2": [None]} and math.isfinite(found.results()["mae"][0])
