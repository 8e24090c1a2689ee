"""Scores are those of the textbook, whatever the shape of the model's output, and add up over shares and blocks."""

import math

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.data import from_arrays
from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.models.model import count
from hpcdl.random import Random
from hpcdl.runs.evaluation import check_scores, evaluate, new_measures, score_names, scores, scores_of_all
from hpcdl.runs.options import Options


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


def of_kind(classes, outputs=1):
    random = np.random.default_rng(3)
    y = random.integers(0, classes, 41) if classes else random.standard_normal((41, outputs))[:, : outputs or None]
    y = y if classes or outputs > 1 else y[:, 0]
    return from_arrays(random.standard_normal((41, 5)), y, dtype="float64", standardize=outputs > 1)


class Plain:
    """A model of a user's own, without layers and without `evaluate`."""

    def __init__(self, model):
        self.model, self.layout = model, model.layout
        self.loss_and_gradient, self.predict = model.loss_and_gradient, model.predict


@pytest.mark.parametrize(("classes", "outputs"), [(2, 1), (3, 1), (0, 1), (0, 2)])
def test_further_scores_are_those_of_all_rows_on_any_number_of_ranks(each_group, classes, outputs):
    data = of_kind(classes, outputs)
    spec = {0: "linear", 2: "logistic", 3: "mlp:4"}[classes]
    made = make_model(spec, (5,), classes, "float64", outputs=data.outputs)
    parameters = made.initialize(Random(1)) + 0.1

    def scored(comm, model, names):
        measures = new_measures(names, data, model, data.train)
        sums = evaluate(model, parameters, data.train, classes, (comm.rank, comm.size), measures)
        comm.all_reduce(sums)
        usual = scores(sums, classes, data.outputs, data.unit).named("test").items()
        return {name.removeprefix("test_"): each for name, each in usual} | scores_of_all(comm, measures, names)

    x, y = data.train.rows(0, 41)
    whole = new_measures(("all",), data, made, data.train)
    whole.add(y, made.predict(parameters, x))

    def body(bare):
        comm = Communicator(bare)
        found = scored(comm, made, ("all",))
        assert {*found} == {*score_names(data)}
        assert found == pytest.approx(found | whole.scores(), rel=1e-12)
        assert scored(comm, Plain(made), ("all",)) == pytest.approx(found, rel=1e-12)
        name = {2: "roc_auc", 3: "macro_f1", 0: "mae"}[classes]
        few = {each for each in found if each.startswith((name, "rmse"))} | {"loss", *(["accuracy"] if classes else [])}
        assert {*scored(comm, made, (name,))} == few
        comm.free()

    each_group(body)


def test_rmse_of_several_outputs_is_in_the_units_of_each():
    data = of_kind(0, 2)
    model = make_model("linear", (5,), 0, "float64", outputs=(2,))
    parameters, deviation = model.initialize(Random(1)), data.statistics["target_deviation"]
    measures = new_measures((), data, model, data.train)
    total = scores(evaluate(model, parameters, data.train, 0, measures=measures), 0, (2,), data.unit).named("test")
    x, y = data.train.rows(0, 41)
    error = model.predict(parameters, x) - y
    assert total["test_rmse_standardized"] == pytest.approx(np.sqrt((error**2).mean())) and "test_rmse" not in total
    each = np.sqrt((error**2).mean(axis=0)) * deviation
    assert [measures.scores()[f"rmse_{name}"] for name in "01"] == pytest.approx(list(each))


@pytest.mark.parametrize(
    ("classes", "model", "options", "said"),
    [
        (2, "svm", {"scores": "f1,roc_auc"}, "--scores roc_auc: this model and data have loss, accuracy, balanced_"),
        (3, "softmax", {"scores": "f1"}, "--scores f1: this model and data have"),
        (0, "linear", {"scores": "f1"}, "--scores f1: this model and data have loss, rmse, mae, r2, all"),
        (0, "linear", {"goal": "validation_f1=0.5", "validation": 0.1}, "--goal validation_f1=0.5: this model"),
        (2, "logistic", {"goal": "test_f1=0.5"}, "no test part; add --validation 0.1, and take validation_f1"),
    ],
)
def test_scores_that_no_evaluation_has_are_refused(classes, model, options, said):
    data = of_kind(classes)
    check_scores(Options(scores="all"), data, make_model(model, (5,), classes))
    with pytest.raises(UsageError, match=said):
        check_scores(Options(**options), data, make_model(model, (5,), classes))
