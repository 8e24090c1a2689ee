"""A checkpoint is all that is needed to predict; what is wrong with one is said."""

import numpy as np
import pytest
from in_process import ends

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data import open_data
from hpcdl.errors import UsageError
from hpcdl.inference.trained_model import TrainedModel


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    told = ["--steps", "3", "--standardize", "--out", str(folder / "a"), "--progress", "none"]
    assert ends("train_allreduce", told) == (0, "")
    return folder / "a"


@pytest.fixture
def changed(run, tmp_path):
    """A function: write the checkpoint with other attributes and vectors; its path."""

    def write(attributes=None, **vectors):
        found = Checkpoint.read(run)
        kept = {name: vector for name, vector in (dict(found.vectors) | vectors).items() if vector is not None}
        Checkpoint(kept, found.attributes | (attributes or {})).write(tmp_path / "b.h5")
        return str(tmp_path / "b.h5")

    return write


def test_what_it_knows(run):
    trained, data = TrainedModel(str(run)), open_data("digits", standardize=True)
    assert (trained.features, trained.classes, trained.outputs) == ((8, 8), 10, ())
    assert trained.schema.describe() == data.schema.describe()
    x = data.test.rows(0, 5)[0]
    raw = open_data("digits").test.rows(0, 5)[0]
    trained.standard().apply(raw)
    np.testing.assert_array_equal(raw, x)
    assert trained.model().predict(trained.parameters, x).shape == (5, 10)


def test_of_an_older_version_the_data_say_it(changed, run):
    """Which did not keep it: the file is looked at, if it is there."""
    found = Checkpoint.read(run)
    attributes = {name: value for name, value in found.attributes.items() if name not in ("meaning", "loss")}
    Checkpoint(found.vectors, attributes).write(run / "old.h5")
    assert TrainedModel(str(run / "old.h5")).schema.describe() == open_data("digits").schema.describe()
    meaning = {"scale": 1, "labels": None, "vocabulary": None, "recipe": None}
    assert TrainedModel(changed({"meaning": meaning})).schema.scale == 1


@pytest.mark.parametrize(
    ("attributes", "vectors", "words"),
    [
        ({"meaning": {"scale": 0}}, {}, "its attribute meaning should have valid values of scale"),
        ({"meaning": {"scale": 1, "labels": ["a"], "vocabulary": None, "recipe": None}}, {}, "names 1 of 10 classes"),
        ({}, {"data/mean": np.zeros(3)}, "its statistics of the data are not 64 means and"),
        ({}, {"data/mean": None}, "its statistics of the data are not 64 means and"),
        ({}, {"parameters": np.full(9610, np.nan, "f4")}, "not finite, as the training diverged"),
        ({}, {"parameters": np.zeros(3, "f4")}, "parameters are not 9610 values of float32"),
    ],
)
def test_refusals(changed, attributes, vectors, words):
    with pytest.raises(UsageError, match=words):
        TrainedModel(changed(attributes, **vectors))


def test_a_model_that_is_another_one(changed):
    with pytest.raises(UsageError, match="'mlp:5' is not one that this program can build"):
        TrainedModel(changed({"model": "mlp:5"})).model()
