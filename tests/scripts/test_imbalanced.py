"""A rare class, and several values to predict, as users meet them: weights, scores, goals, thresholds, pictures."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_table import prepare_table

SCRIPTS = Path(__file__).parents[2] / "scripts"
RARE = ["--data", "rare.h5", "--dtype", "float64", "--epochs", "2", "--batch-size", "40"]


def table(folder, name, label, columns):
    with open(folder / f"{name}.csv", "w", newline="") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    prepare_table(folder / f"{name}.csv", Output(folder / f"{name}.h5"), label=label)


@pytest.fixture
def train(run_on, tmp_path):
    """A function: start a program on a table of which 2 % of the rows are of class yes; return its scores and losses,
    its parameters, and what it wrote on stderr."""
    random = np.random.default_rng(0)
    x, rare = random.standard_normal((1500, 3)), np.arange(1500) % 50 == 0
    x[:, 0] += 2 * rare
    table(tmp_path, "rare", "fraud", dict(zip("abc", x.T, strict=True)) | {"fraud": np.where(rare, "yes", "no")})

    def run(ranks, name, *options, out="a"):
        done = run_on(ranks, SCRIPTS / f"train_{name}.py", *RARE, *options, "--out", out, check=0)
        found = json.loads((tmp_path / out / "summary.json").read_text())
        scores = {name: found[name] for name in found if name.startswith(("test_", "train_loss"))}
        return scores, Checkpoint.read(tmp_path / out / "checkpoint.h5").vectors["parameters"], done.stderr

    return run


def test_weights_and_scores_are_the_same_on_any_number_of_ranks(train):
    options = ["--model", "logistic", "--scores", "all", "--class-weight"]
    one, parameters, said = train(1, "allreduce", *options, "balanced", out="1")
    assert {"test_f1", "test_roc_auc", "test_brier_score"} <= {*one} and "training rows" not in said
    for ranks in (2, 3):
        found, others, _ = train(ranks, "allreduce", *options, "balanced", out=str(ranks))
        assert found == pytest.approx(one, rel=1e-10)
        np.testing.assert_allclose(others, parameters, rtol=1e-10)
    plain, unweighted, said = train(2, "allreduce", *options[:-1], out="plain")
    assert "class yes has 2.00% of the training rows (24 of 1,200)" in said and "--class-weight balanced" in said
    same, equal, _ = train(2, "allreduce", *options, "yes=1,no=1", out="equal")
    assert same == plain and np.array_equal(equal, unweighted)  # to the bit
    assert one["test_recall"] > plain["test_recall"] and one["train_loss"] > plain["train_loss"]


def test_a_resumed_run_keeps_its_weights(train, run_on):
    train(2, "allreduce", "--model", "logistic", "--class-weight", "yes=5")
    again = [SCRIPTS / "train_allreduce.py", "--resume", "a", "--epochs", "3"]
    done = run_on(2, *again, "--class-weight", "balanced", check=2)
    assert "--resume a: that run's class weight is yes=5, not balanced" in done.stderr
    run_on(3, *again, check=0)


@pytest.mark.long
def test_models_that_are_cut_or_kept_elsewhere_have_the_same_scores(train):
    options = ["--model", "mlp:8", "--scores", "f1,roc_auc,calibration_error", "--class-weight", "yes=10"]
    one, *_ = train(1, "allreduce", *options, out="one")
    for ranks, name, *more in (
        (2, "allreduce", "--data-servers", "1"),
        (2, "pipeline"),
        (2, "tensor_parallel"),
        (3, "fully_sharded"),
        (3, "parameter_server", "--servers", "1"),
    ):
        found, *_ = train(ranks, name, *options, *more, out=name)
        assert found == pytest.approx(one, rel=1e-9)


@pytest.mark.long
def test_a_run_ends_at_its_goal_and_is_judged_by_a_threshold(train, run_on, tmp_path):
    options = ["--model", "logistic", "--class-weight", "balanced"]
    found, *_ = train(2, "allreduce", *options, "--goal", "test_recall=0.5", "--epochs", "50")
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["stopped"] == "goal"
    assert found["test_recall"] >= 0.5 and "test_f1" not in found
    pytest.importorskip("matplotlib")
    evaluate = SCRIPTS / "evaluate.py"
    written = ["--predict", "p.csv", "--probabilities", "--json", "s.json", "--pictures", "pictures"]
    done = run_on(3, evaluate, "a", "--threshold", "0.25", *written, check=0)
    report = json.loads((tmp_path / "s.json").read_text())
    with open(tmp_path / "p.csv") as file:
        rows = list(csv.DictReader(file))
    assert all(row["class"] == ("yes" if float(row["p(yes)"]) >= 0.25 else "no") for row in rows)
    right = [row["class"] == row["label"] for row in rows]
    assert report["threshold"] == 0.25 and report["scores"]["accuracy"] == pytest.approx(np.mean(right))
    hits = sum(row["class"] == row["label"] == "yes" for row in rows)
    assert report["classes"][1]["recall"] == report["scores"]["recall"] == hits / 6 and "macro" in done.stdout
    names = ["precision-recall.png", "reliability.png", "roc.png"]
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == names
    assert all((tmp_path / "pictures" / name).read_bytes().startswith(b"\x89PNG") for name in names)
    done = run_on(2, evaluate, "a", "--pictures", "pictures", check=2)
    assert "pictures/roc.png exists already; give another folder, or --force" in done.stderr


def test_svm_has_no_probabilities(train, run_on):
    found, *_ = train(2, "allreduce", "--model", "svm", "--scores", "all", "--class-weight", "yes=5")
    assert "test_macro_f1" in found and "test_roc_auc" not in found and "test_log_loss" not in found
    done = run_on(1, SCRIPTS / "evaluate.py", "a", "--threshold", "0.5", check=2)
    assert "a predicts classes without probabilities" in done.stderr
    done = run_on(1, SCRIPTS / "evaluate.py", "a", "--pictures", "p", check=2)
    assert "--pictures show probabilities of classes, and this model predicts none" in done.stderr


def test_rmse_of_each_output_is_in_its_units_and_the_total_says_that_it_is_not(run_on, tmp_path):
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 2))
    values = {"mass": 5000 + 1000 * x.sum(axis=1), "height": 1.7 + 0.1 * x[:, 0]}
    table(tmp_path, "two", "mass,height", dict(zip("ab", x.T, strict=True)) | values)
    options = ["--data", "two.h5", "--model", "linear", "--epochs", "3", "--scores", "mae", "--out", "a"]
    done = run_on(2, SCRIPTS / "train_allreduce.py", *options, check=0)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    named = {name.removeprefix("test_") for name in summary if name.startswith("test_") and summary[name] is not None}
    assert named == {"loss", "rmse_standardized", "rmse_mass", "rmse_height", "mae_mass", "mae_height"}
    assert "test rmse standardized" in done.stdout and "test rmse mass" in done.stdout
    run_on(2, SCRIPTS / "evaluate.py", "a", "--json", "s.json", "--predict", "p.npz", check=0)
    report = json.loads((tmp_path / "s.json").read_text())
    with np.load(tmp_path / "p.npz") as file:
        error = file["prediction"] - file["label"]
    for output, wanted in zip(report["outputs"], np.sqrt((error**2).mean(axis=0)), strict=True):
        name = f"rmse_{output['name']}"
        assert output["rmse"] == pytest.approx(wanted, rel=1e-4)
        assert output["rmse"] == report["scores"][name] == pytest.approx(summary[f"test_{name}"], rel=1e-4)
    assert report["scores"]["rmse_standardized"] == pytest.approx(summary["test_rmse_standardized"], rel=1e-4)
    assert "rmse" not in report["scores"]
