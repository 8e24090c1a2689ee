"""Predictions of blocks that ranks take in turn come out in the order of the rows, by name."""

import csv
import io
from functools import partial

import numpy as np
import pytest

from hpcdl.data.batch import PredictionRows, RowBlock
from hpcdl.data.schema import Schema
from hpcdl.errors import AgreedError, UsageError
from hpcdl.inference import predictions
from hpcdl.inference.predictions import describe_counts, predict_all, refuse_existing
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.models.scores import ClassMeasures, ValueMeasures


def model(predict, classes, labels=None, outputs=(), recipe=None):
    """A checkpoint that was read, and its model in one."""
    made = TrainedModel.__new__(TrainedModel)
    made.about, made.parameters, made.statistics, made.dtype = {"model": "of a test"}, None, {}, np.dtype("f4")
    made.classes, made.outputs, made.schema = classes, outputs, Schema(labels=labels, recipe=recipe)
    made.predict = lambda w, x: predict(x)
    return made


def rows_of(x, size, y=None, ids=None, **counts):
    """Rows in blocks of so many."""

    def blocks():
        for at in range(0, len(x), size):
            part = slice(at, at + size)
            about = None if y is None else y[part], ids and ids[part]
            yield partial(RowBlock, x[part], np.arange(len(x))[part], *about, **counts)

    return PredictionRows("rows", blocks, y is not None, ids is not None)


def two(x):
    """Class 1 is as likely as x says."""
    return np.column_stack([1 - x[:, 0], x[:, 0]]).astype("f4")


X = np.linspace(0, 1, 23)[:, None].astype("f4")


@pytest.fixture
def predicted(world, mpi_tmp_path):
    """A function: predict, and read what rank 0 has written."""

    def run(name, trained, rows, **how):
        path = mpi_tmp_path / name
        counts = predict_all(world, trained, trained, rows, str(path), **how)
        world.Barrier()
        return counts, list(csv.reader(path.open())) if name.endswith("csv") else dict(np.load(path))

    return run


@pytest.mark.parametrize("size", [1, 4, 23, 100])
def test_rows_come_in_order_whatever_the_blocks(world, predicted, size):
    y, ids = (X[:, 0] > 0.3).astype(int), [f"r,{k}" for k in range(23)]
    measures, whole = (ClassMeasures(2, curves=True) for _ in range(2))
    whole.add(y, two(X))
    trained = model(two, 2, ("no", "yes, sir"))
    counts, table = predicted(f"a{size}.csv", trained, rows_of(X, size, y, ids), measures=measures, every=True)
    assert counts == {"rows": 23, "refused": 0, "filled": 0, "unseen": 0}
    assert table[0] == ["row", "id", "label", "class", "probability", "p(no)", "p(yes, sir)"] and len(table) == 24
    for k, (row, name, label, best, probability, no, yes) in enumerate(table[1:]):
        assert (int(row), name) == (k, f"r,{k}") and label == ("yes, sir" if y[k] else "no")
        assert np.float32(yes) == X[k, 0] and np.float32(probability) == max(np.float32(no), np.float32(yes))
        assert best == ("yes, sir" if X[k, 0] > 0.5 else "no")
    assert measures.scores()["accuracy"] == pytest.approx(1 - ((X[:, 0] > 0.5) != y).mean())
    if world.rank == 0:  # which has the rows of all ranks
        assert measures.scores() == pytest.approx(whole.scores()) and 0.5 < whole.scores()["roc_auc"] <= 1


def test_a_threshold_decides_between_two_classes(predicted):
    trained = model(two, 2)
    trained.threshold = 0.25
    _, table = predicted("a.csv", trained, rows_of(X, 5), every=True)
    for _, best, probability, no, yes in table[1:]:
        assert best == str(int(np.float32(yes) >= 0.25)) and probability == (yes if best == "1" else no)


def test_as_npz(predicted):
    _, found = predicted("a.npz", model(two, 2, ("a", "b")), rows_of(X, 5, ids=[f"é{k}" for k in range(23)]))
    assert found["row"].tolist() == list(range(23)) and found["classes"].tolist() == ["a", "b"]
    np.testing.assert_array_equal(found["output"], two(X))
    assert found["id"][3] == "é3" and found["prediction"].tolist() == two(X).argmax(1).tolist() and "label" not in found


def test_one_probability_and_unnamed_classes(predicted):
    _, table = predicted("a.csv", model(lambda x: x[:, 0], 2), rows_of(X, 9))
    assert table[0] == ["row", "class", "probability"]
    assert [line[1] for line in table[1:]] == ["1" if x > 0.5 else "0" for x in X[:, 0]]


def test_values(predicted):
    y = np.column_stack([X[:, 0], -X[:, 0]])
    predict, recipe = lambda x: np.column_stack([x[:, 0] + 1, 0 * x[:, 0]]), {"label": ["a", "b"]}
    trained = model(predict, 0, outputs=(2,), recipe=recipe)
    measures = ValueMeasures(["a", "b"])
    _, table = predicted("a.csv", trained, rows_of(X, 4, y), measures=measures)
    assert table[0] == ["row", "label a", "label b", "value a", "value b"] and float(table[-1][3]) == 2
    assert measures.results()["mae"] == pytest.approx([1, 0.5])
    _, table = predicted("b.csv", model(lambda x: x[:, 0], 0), rows_of(X, 4))
    assert table[0] == ["row", "value"] and np.float32(table[5][1]) == X[4, 0]


def test_nothing_to_predict(predicted):
    counts, table = predicted("a.csv", model(two, 2), rows_of(X[:0], 4))
    assert counts["rows"] == 0 and table == [["row", "class", "probability"]]


def test_a_bad_row_leaves_no_file_and_all_ranks_refuse(world, mpi_tmp_path):
    def blocks():
        yield lambda: RowBlock(X[:3], np.arange(3))

        def bad():
            raise UsageError("row 3 is bad")

        yield bad

    with pytest.raises(AgreedError, match="row 3 is bad"):
        predict_all(world, model(two, 2), model(two, 2), PredictionRows("x", blocks), str(mpi_tmp_path / "a.csv"))
    world.Barrier()
    assert not list(mpi_tmp_path.iterdir())


def test_lines_to_a_stream(world):
    into = io.BytesIO()
    predict_all(world, model(two, 2), model(two, 2), rows_of(X, 3), stream=into)
    if world.rank == 0:
        assert into.getvalue().decode().splitlines()[1] == "0,0,1" and into.getvalue().count(b"\n") == 24


def test_counts_are_summed_and_said(world):
    counts = predict_all(world, model(two, 2), model(two, 2), rows_of(X[:21], 3, unseen=1, reasons=["", "bad", ""]))
    assert counts == {"rows": 14, "refused": 7, "filled": 0, "unseen": 7}
    said = "7 rows without an answer (the column reason says why), 7 texts that the training data do not have"
    assert describe_counts(counts) == f"14 rows, {said}"


@pytest.mark.parametrize("ids", [None, [f"n{k}" for k in range(4)]])
def test_a_row_that_the_model_cannot_take_has_a_reason_in_the_place_of_an_answer(predicted, ids):
    rows = rows_of(X[:4], 2, ids=ids, reasons=["", "column 'a': bad"])._replace(reasons=True)
    trained, values = model(two, 2, ("no", "yes")), model(lambda x: x[:, 0], 0)
    _, table = predicted("a.csv", trained, rows, every=True)
    known = ["row"] + ["id"] * bool(ids)
    assert table[0] == [*known, "class", "probability", "p(no)", "p(yes)", "reason"]
    assert all(
        (line[0], line[len(known)]) == (str(k), "yes" if X[k, 0] > 0.5 else "no")
        for k, line in enumerate(table[1::2])
        for k in [2 * k]
    )
    assert [line[len(known) :] for line in table[2::2]] == [["", "", "", "", "column 'a': bad"]] * 2
    assert all(line[-1] == "" and line[-2] for line in table[1::2])
    _, table = predicted("b.csv", values, rows)
    assert [line[-2] == "" for line in table[1:]] == [False, True] * 2 and table[0] == [*known, "value", "reason"]
    _, found = predicted("a.npz", trained, rows)
    assert found["reason"].tolist() == ["", "column 'a': bad"] * 2 and found["prediction"][[1, 3]].tolist() == [-1, -1]
    assert np.isnan(found["output"][[1, 3]]).all() and np.isfinite(found["output"][[0, 2]]).all()


def test_a_file_that_is_there_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("mine")
    with pytest.raises(UsageError, match=r"--out .*a\.csv exists already; give another name, or --force to replace it"):
        refuse_existing("--out", str(tmp_path / "a.csv"), False)
    refuse_existing("--out", str(tmp_path / "a.csv"), True)
    refuse_existing("--out", "", False)
    for other in (tmp_path / "a.csv", tmp_path / "." / "a.csv"):
        with pytest.raises(UsageError, match=r"--out .*a\.csv is SOURCE, too; give another name"):
            refuse_existing("--out", str(tmp_path / "a.csv"), True, {"x": "", "SOURCE": str(other)})


def test_who_reads_a_stream_may_have_enough(world, monkeypatch):
    """As head has: all ranks stop, and nothing is said of it."""
    monkeypatch.setattr(predictions.os, "dup2", lambda *of: None)
    monkeypatch.setattr(predictions.sys, "stdout", predictions.sys.__stdout__)  # has a descriptor

    class Head:
        def write(self, part):
            if part.startswith(b"0,"):
                raise BrokenPipeError

    counts = predict_all(world, model(two, 2), model(two, 2), rows_of(X, 1), stream=Head())
    assert counts["rows"] == world.size


@pytest.mark.parametrize(
    ("predict", "classes", "words"),
    [
        (lambda x: two(x)[:, :1], 2, r"predicts float32 of shape \(23, 1\), and should predict float32 of"),
        (lambda x: two(x)[1:], 2, r"shape \(22, 2\), and should"),
        (lambda x: [1] * len(x), 0, "predicts int64 of shape"),
        (lambda x: np.where(x[:, 0] > 0.9, np.nan, x[:, 0]), 0, "rows: the prediction for row 20 is NaN or infinite"),
        (lambda x: [][1], 2, r"model of a test: IndexError: list index out of range \(test_predictions.py, line"),
        (lambda x: exit(3), 2, "model of a test: it leaves the program, with status 3"),
    ],
)
def test_what_a_model_of_ones_own_may_do(world, mpi_tmp_path, predict, classes, words):
    """All ranks refuse together, and nothing is written."""
    with pytest.raises(AgreedError, match=words):
        made = model(predict, classes)
        predict_all(world, made, made, rows_of(X, 100), str(mpi_tmp_path / "a.csv"))
    world.Barrier()
    assert not list(mpi_tmp_path.iterdir())
