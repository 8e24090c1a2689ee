"""evaluate.py scores, predicts, exports and lets write what a run has trained."""

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data import open_data
from hpcdl.data.schema import Schema
from hpcdl.models import make_model
from hpcdl.random import Random
from hpcdl.scripts import evaluate

FOLDER = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def trained(run_on, tmp_path):
    run_on(2, FOLDER / "train_allreduce.py", "--epochs", "3", "--out", tmp_path / "a", check=0)
    return tmp_path / "a"


def forward(tensors, x):
    """The network in plain numpy."""
    names = list(tensors)
    hidden = np.maximum(x @ tensors[names[0]] + tensors[names[1]], 0)
    return hidden @ tensors[names[2]] + tensors[names[3]]


def test_score_predict_and_export(run_on, trained, tmp_path):
    program = FOLDER / "evaluate.py"
    done = run_on(3, program, trained, "--predict", "p.npz", "--export", "w.npz", check=0)
    summary = json.loads((trained / "summary.json").read_text())
    found = dict(re.findall(r"(test_\w+) ([\d.e-]+)", done.stdout))
    assert float(found["test_accuracy"]) == pytest.approx(summary["test_accuracy"], rel=1e-5)
    assert float(found["test_loss"]) == pytest.approx(summary["test_loss"], rel=1e-4)
    run_on(2, program, trained, "--predict", "p.csv", "--export", "w.safetensors", check=0)
    test = open_data("digits").test
    x, y = test.rows(0, test.examples)
    with np.load(tmp_path / "w.npz") as file:
        weights = {name: file[name] for name in file.files}
    answers = forward(weights, x).argmax(1)
    assert (answers == y).mean() == pytest.approx(summary["test_accuracy"])
    with np.load(tmp_path / "p.npz") as file:
        assert np.array_equal(file["prediction"], answers)
        assert file["output"].shape == (len(y), 10)
    row, label, said = np.loadtxt(tmp_path / "p.csv", skiprows=1, dtype=int, delimiter=",", usecols=(0, 1, 2)).T
    assert np.array_equal(said, answers) and np.array_equal(label, y) and np.array_equal(row, np.arange(len(y)))
    done = run_on(2, program, trained, "--predict", "p.csv")
    assert done.returncode == 2 and "p.csv exists already; give another name, or --force" in done.stderr
    on_train = run_on(2, program, trained, "--split", "train", check=0).stdout
    assert "on 1438 rows" in on_train and "train_loss" in on_train and "test_loss" not in on_train
    other = load_file(tmp_path / "w.safetensors")
    assert other.keys() == weights.keys()
    assert all(np.array_equal(other[name], weights[name]) for name in weights)
    flat = np.concatenate([weights[name].ravel() for name in weights])
    assert np.array_equal(flat, Checkpoint.read(trained).vectors["parameters"])


@pytest.fixture
def refused(capsys):
    """A function: the one line with which evaluate refuses."""

    def run(*options):
        with pytest.raises(SystemExit) as end:
            evaluate.main([*map(str, options)])
        printed = capsys.readouterr()
        assert end.value.code == 2 and not printed.out and printed.err.count("\n") == 1
        return printed.err

    return run


@pytest.mark.long
def test_sample(run_on, tmp_path, refused):
    """Rank 0 writes the text that the model makes of the prompt, the same for the same seed."""
    spec, program = "gpt:layers=1,width=16,heads=2,context=64", FOLDER / "evaluate.py"
    training = ["--data", "text", "--model", spec, "--steps", 3, "--progress", "none", "--out", "t"]
    run_on(1, FOLDER / "train_sequential.py", *training, check=0)
    found, data = Checkpoint.read(tmp_path / "t"), open_data("text")
    model, parameters = make_model(spec, data.features, data.classes), found.vectors["parameters"]
    asked = ["--sample", 150, "--prompt", "def f(", "--temperature", 1.5, "--seed", 3]
    text = run_on(2, program, "t", *asked, check=0).stdout  # and nothing else
    done = run_on(2, program, "t", "--predict", "p.npz", check=0)
    assert "t, step 3, on 2416 rows of text" in done.stdout and "test_loss" in done.stdout
    prompt = data.vocabulary.encode("def f(").tolist()
    made = model.generate(parameters, prompt, 150, Random(3)("sample"), 1.5)
    assert text == f"def f({data.vocabulary.decode(made)}\n" and len(made) == 150
    with np.load(tmp_path / "p.npz") as file:
        x, _ = data.test.rows(0, 10)
        np.testing.assert_allclose(file["output"][:10], model.predict(parameters, x), rtol=1e-4)
        assert file["output"].shape == (data.test.examples, data.classes)

    assert "character '€' (place 2 of the text) is not in the vocabulary of 105 characters" in refused(
        tmp_path / "t", "--sample", 5, "--prompt", "a €"
    )
    with h5py.File(tmp_path / "mute.h5", "w") as file:
        for part in ("train", "test"):
            file[f"{part}/x"], file[f"{part}/y"] = np.ones((4, 64), "u1"), np.arange(4)
        file.attrs["classes"] = data.classes
    refusal = refused(tmp_path / "t", "--data", tmp_path / "mute.h5")
    assert "mute has no vocabulary, but the model was trained with another vocabulary, of 105" in refusal
    without = Checkpoint(found.vectors, found.attributes | {"meaning": Schema().describe()})
    without.write(tmp_path / "wordless.h5")
    assert "takes quantities" not in refused(tmp_path / "wordless.h5", "--sample", 5)
    other = make_model("softmax", data.features, data.classes)
    found.attributes |= {"model": "softmax", "layout": other.layout.describe(), "meaning": Schema().describe()}
    found.vectors = dict(found.vectors) | {"parameters": np.zeros(other.size, "float32")}
    found.write(tmp_path / "softmax.h5")
    assert "needs a model that writes text, as gpt" in refused(tmp_path / "softmax.h5", "--sample", 5)
    found.attributes |= {"model": spec, "layout": model.layout.describe(), "meaning": data.schema.describe()}
    found.vectors = dict(found.vectors) | {"parameters": np.full(model.size, np.nan, "float32")}
    found.write(tmp_path / "nan.h5")
    done = run_on(2, program, "nan.h5", "--sample", 5)
    assert done.returncode == 2 and "the training diverged" in done.stderr and "Traceback" not in done.stderr
