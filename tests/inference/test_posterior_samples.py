"""The file of samples: what it holds, and what is refused; predictions that are means over samples."""

import h5py
import numpy as np
import pytest

from hpcdl.data import Batch
from hpcdl.errors import UsageError
from hpcdl.inference.posterior_samples import FILE, Predictive, Samples
from hpcdl.models import make_model

SIZE, KIND = 3, np.dtype("float64")


@pytest.fixture
def folder(tmp_path):
    """With two chains of 4 samples."""
    Samples(np.array([2, 4, 6, 8]), np.arange(24.0).reshape(2, 4, 3), np.array([4.0, 3.0, 2.0, 1.0])).write(tmp_path)
    return tmp_path


def test_written_and_read_up_to_a_step(folder):
    for step, there in ((8, 4), (7, 3), (100, 4), (1, 0)):
        found = Samples.read(folder, step, SIZE, KIND)
        assert found.steps.tolist() == [2, 4, 6, 8][:there]
        assert np.array_equal(found.vectors, np.arange(24.0).reshape(2, 4, 3)[:, :there])
        assert found.weights.tolist() == [4, 3, 2, 1][:there]
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_what_cannot_be_written_leaves_what_was_there(folder):
    with pytest.raises(TypeError):
        Samples(np.array([1]), np.array([[[object()]]])).write(folder)
    assert len(Samples.read(folder, 8, SIZE, KIND).steps) == 4 and len(list(folder.iterdir())) == 1


def rewrite(name, value):
    def change(file):
        del file[name]
        file[name] = value

    return change


@pytest.mark.parametrize(
    "change, words",
    [
        (rewrite("steps", [2, 4, 4, 8]), "its steps are not in ascending order"),
        (rewrite("steps", [2, 4, 6]), "does not hold samples of 3 parameters of float64"),
        (rewrite("samples", np.zeros((2, 4, 5))), "does not hold samples of 3 parameters of float64"),
        (rewrite("samples", np.zeros((2, 4, 3), "f4")), "does not hold samples of 3 parameters of float64"),
        (rewrite("samples", np.full((2, 4, 3), np.nan)), "a sample is not finite"),
        (rewrite("weights", [1.0, 2.0]), "its weights are not one number above 0 for each sample"),
        (rewrite("weights", [1.0, 2.0, 3.0, np.nan]), "its weights are not one number above 0 for each sample"),
        (lambda file: file.attrs.update(format="other"), "is not a file of samples that this version can read"),
        (lambda file: file.attrs.update(version=9), "is not a file of samples that this version can read"),
        (lambda file: file.pop("samples"), "is damaged or cut off"),
    ],
)
def test_what_is_no_file_of_samples(folder, change, words):
    with h5py.File(folder / FILE, "a") as file:
        change(file)
    with pytest.raises(UsageError, match=words):
        Samples.read(folder, 8, SIZE, KIND)


def test_a_file_that_is_missing_or_cut_off(folder):
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="is damaged or cut off"):
        Samples.read(folder, 8, SIZE, KIND)
    (folder / FILE).unlink()
    with pytest.raises(UsageError, match="only runs of train-sgld have samples"):
        Samples.read(folder, 8, SIZE, KIND)


def test_a_file_of_before_has_no_weights(folder):
    with h5py.File(folder / FILE, "a") as file:
        del file["weights"]
    assert Samples.read(folder, 8, SIZE, KIND).weights is None


@pytest.mark.parametrize("weights", [None, np.array([5.0, 4.0, 3.0, 2.0, 1.0])])
@pytest.mark.parametrize("name, classes", [("softmax", 3), ("logistic", 2)])
def test_the_mean_of_the_probabilities(name, classes, weights):
    random = np.random.default_rng(0)
    model = make_model(name, (4,), classes, "float64")
    samples, x, y = random.standard_normal((5, model.size)), random.standard_normal((7, 4)), np.arange(7) % classes
    made = Predictive(model, samples, classes, weights)
    wanted = np.average([model.predict(each, x) for each in samples], axis=0, weights=weights)
    assert np.abs(made.predict(samples[0], x) - wanted).max() < 1e-15
    loss, right = made.evaluate(samples[0], Batch(x, y, 7, 0, 0, np.arange(7)))
    p = wanted if classes == 3 else np.column_stack([1 - wanted, wanted])
    assert loss == pytest.approx(-np.log(p[np.arange(7), y]).sum(), rel=1e-12)
    assert right == (p.argmax(axis=1) == y).sum()


def test_the_mean_of_values():
    random = np.random.default_rng(0)
    model = make_model("linear", (4,), 0, "float64")
    samples, x, y = random.standard_normal((5, model.size)), random.standard_normal((7, 4)), random.standard_normal(7)
    error = ((np.mean([model.predict(each, x) for each in samples], axis=0) - y) ** 2).sum()
    found = Predictive(model, samples, 0).evaluate(samples[0], Batch(x, y, 7, 0, 0, np.arange(7)))
    assert found == pytest.approx((error / 2, error), rel=1e-12)
