"""Texts as means of the label: the formula, beside scikit-learn's, and that a training row's own label is not in it."""

import json

import h5py
import numpy as np
import pytest
from tables import WRITE, all_of, write_csv

from hpcdl.data.formats.recipe import Recipe, recipe_of
from hpcdl.data.formats.table_rows import TableRows
from hpcdl.data.formats.target_encoding import FOLDS, cross_fitted, targets_of, text_means
from hpcdl.errors import UsageError


def drawn(classes, rows=500, texts=20):
    random = np.random.default_rng(3)
    codes = random.integers(0, texts, rows)
    noise = random.normal(size=rows)
    y = np.digitize(codes % 5 + noise, np.arange(1, classes)) if classes else codes % 5 + noise
    return codes, y


@pytest.mark.parametrize("classes", [0, 2, 4])
def test_means_are_those_of_scikit_learn(classes):
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    codes, y = drawn(classes)
    targets = targets_of(y, classes)
    means, spread = (
        text_means(codes, targets, 20),
        np.array([targets[codes == code].mean(axis=0) for code in range(20)]),
    )
    m = np.square(targets - spread[codes]).sum(axis=0) / (500 - 20) / targets.var(axis=0)
    for at, smooth in enumerate(m.tolist()):  # scikit-learn has one m for all targets
        encoder = preprocessing.TargetEncoder(smooth=smooth, target_type="continuous").fit(
            codes[:, None], targets[:, at]
        )
        np.testing.assert_allclose(means[:, [at]], encoder.transform([[each] for each in [*range(20), 99]]), rtol=1e-12)


def test_by_hand():
    codes, targets = (
        np.array([0, 0, 1, 3]),
        np.array([[1.0], [3.0], [6.0], [2.0]]),
    )  # no row of text 2; one without text
    m = 2 / 3.5  # s2 = (1 + 1) / (4 rows - 3 texts)
    np.testing.assert_allclose(
        text_means(codes, targets, 3), [[(4 + 3 * m) / (2 + m)], [(6 + 3 * m) / (1 + m)], [3], [3]]
    )
    assert text_means(np.arange(4), targets, 4)[:, 0].tolist() == [2, 3, 4.5, 2.5, 3]  # s2 is not known: as t2
    assert text_means(codes, np.ones((4, 1)), 3).tolist() == [[1]] * 4
    assert targets_of(np.array([0, 1, 2]), 3).tolist() == np.eye(3).tolist() and targets_of(
        np.array([0, 1]), 2
    ).tolist() == [[0], [1]]


def test_a_training_row_is_encoded_without_its_own_label():
    """Other labels of the fold change nothing in the fold; a text of one row is the mean of the other folds."""
    codes, y = np.arange(100) % 50, np.random.default_rng(0).normal(size=(100, 1))
    encoded = cross_fitted(codes, y, 50, 7)
    assert (
        abs(np.corrcoef(encoded[:, 0], y[:, 0])[0, 1])
        < 0.3
        < np.corrcoef(text_means(codes, y, 50)[codes, 0], y[:, 0])[0, 1]
    )
    for row in (0, 42):
        changed = y.copy()
        changed[row] += 100
        same = cross_fitted(codes, changed, 50, 7) == encoded
        assert same[row] and same.sum() == 100 // FOLDS
    with pytest.raises(UsageError, match="needs two training rows or more"):
        cross_fitted(codes[:1], y[:1], 50, 7)


@pytest.mark.parametrize(("kind", "classes"), [("csv", 0), ("csv", 2), ("parquet", 3)])
def test_from_a_table_to_new_rows(tmp_path, prepare, kind, classes):
    codes, y = drawn(classes)
    texts = [
        ["town", "size", "label"],
        *(
            [f"t{code}" if k else "", k, f"c{label}" if classes else label]
            for k, (code, label) in enumerate(zip(codes, y, strict=True))
        ),
    ]
    texts = [[str(cell) for cell in row] for row in texts]
    path = WRITE[kind](tmp_path / f"in.{kind}", texts)
    with prepare(kind if kind == "csv" else "table", path, "--one-hot", "10", "--categories", "target") as file:
        names = {0: ["town:mean(label)"], 2: ["town:mean(c1)"], 3: [f"town:mean(c{k})" for k in range(3)]}[classes]
        recipe = recipe_of(tmp_path / "out.h5")
        assert recipe.features == [*names, "size"] and "means of the label by town (20)" in prepare.summary
        x, labels = {each: file[f"{each}/x"][...] for each in ("train", "test")}, file["train/y"][...]
        places = {each: file[f"{each}/x"][:, -1].astype(int) for each in x}
    assert x["train"].dtype == np.float64 and set(places["train"]) | set(places["test"]) == set(range(500))
    order = np.array(sorted(range(20), key=lambda k: f"t{k}")).argsort()
    known = np.where(places["train"] > 0, order[codes[places["train"]]], 20)
    targets = targets_of(labels, classes)
    means = text_means(known, targets, 20)
    np.testing.assert_array_equal(x["train"][:, :-1], cross_fitted(known, targets, 20, 0))
    test_codes = np.where(places["test"] > 0, order[codes[places["test"]]], 20)
    np.testing.assert_array_equal(x["test"][:, :-1], means[test_codes])
    found, *_, unseen = all_of(
        TableRows(write_csv(tmp_path / "new.csv", [["size", "town"], [1, "t3"], [2, "x"], [3, ""]]), recipe)
    )
    np.testing.assert_array_equal(found[:, :-1], means[[order[3], 20, 20]])
    assert unseen == 1
    with prepare("csv", tmp_path / "new.csv", "--like", tmp_path / "out.h5", "--no-label", out="rows.h5") as file:
        np.testing.assert_array_equal(file["rows/x"][...], found)


def test_what_is_refused(tmp_path, prepare):
    path = write_csv(tmp_path / "in.csv", [["town", "label"], *([f"t{k % 9}", k / 7] for k in range(40))])
    options = ["--one-hot", "5", "--categories", "target"]
    assert "needs training rows, of which --test-fraction 1 leaves none" in prepare(
        "csv", path, *options, "--test-fraction", "1"
    )
    prepare("csv", path, *options).close()
    with h5py.File(tmp_path / "out.h5", "r+") as file:
        good = json.loads(file.attrs["table"])
        for change, words in (
            ({"means": good["columns"][0]["means"][1:]}, "a mean of each target"),
            ({"means": [["x"]] * 10}, "no recipe"),
            ({"means": [[float("inf")]] * 10}, "the mean of a target"),
        ):
            file.attrs["table"] = json.dumps(good | {"columns": [good["columns"][0] | change]})
            with pytest.raises(UsageError, match=words):
                Recipe.read(json.loads(file.attrs["table"]), "out.h5")
