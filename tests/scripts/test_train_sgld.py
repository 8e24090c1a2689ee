"""The program as its user starts it: what it draws and writes, what is scored with it, and what it refuses."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from written_runs import lines, summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data import open_data
from hpcdl.models import make_model

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "train_sgld.py"
SMALL = ["--data", "digits", "--model", "softmax", "--lr", "0.001", "--epochs", "8", "--seed", "1"]


@pytest.mark.long
def test_samples_are_drawn_and_scored_together(run_on, tmp_path):
    printed = run_on(4, SCRIPT, *SMALL, "--chains", "2", "--thin", "9", "--out", "a", check=0).stdout
    found = summary(tmp_path / "a")
    assert found["strategy"] == "sgld" and found["replicas_agree"] is True
    assert (found["chains"], found["burn_in"], found["thin"], found["samples"]) == (2, 225, 9, 2 * 15)
    assert "30 of 2 chains" in printed and f"{found['r_hat_max']:.3f} at its largest" in printed
    assert [line["epoch"] for line in lines(tmp_path / "a") if "r_hat_max" in line] == [6, 7, 8]
    with h5py.File(tmp_path / "a/samples.h5") as file:
        samples = file["samples"][()]
        assert samples.shape == (2, 15, 650) and file["steps"][()].tolist() == list(range(234, 361, 9))
    parameters = Checkpoint.read(tmp_path / "a").vectors["parameters"]
    assert np.abs(samples.mean(axis=(0, 1), dtype=float) - parameters).max() < 1e-6

    model, test = make_model("softmax", (64,), 10), open_data("digits").test
    x, y = test.rows(0, test.examples)
    p = np.mean([model.predict(each, x) for each in samples.reshape(-1, 650)], axis=0, dtype=float)
    for ranks in (1, 3):
        said = run_on(ranks, SCRIPTS / "evaluate.py", "a", "--samples", "--json", f"{ranks}.json", check=0).stdout
        assert "(posterior mean)" in said and "(mean over 30 samples)" in said
        scored = json.loads((tmp_path / f"{ranks}.json").read_text())
        assert scored["samples"] == 30
        assert scored["point_estimate"]["loss"] == pytest.approx(found["test_loss"], rel=1e-4)
        assert scored["scores"]["loss"] == pytest.approx(-np.log(p[np.arange(len(y)), y]).mean(), rel=1e-5)
        assert scored["scores"]["accuracy"] == pytest.approx((p.argmax(axis=1) == y).mean())
        assert {*scored["scores"]} == {*scored["point_estimate"]} >= {"loss", "calibration_error", "roc_auc"}
    np.savez(tmp_path / "new.npz", x=16 * x[:5])  # as pixels, before they are scaled
    run_on(2, SCRIPTS / "predict.py", "a", "new.npz", "--samples", "--out", "p.npz", check=0)
    with np.load(tmp_path / "p.npz") as file:
        assert np.abs(file["output"] - p[:5]).max() < 1e-6
    run_on(2, SCRIPTS / "evaluate.py", "a", "--samples", "--predict", "q.npz", "--export", "w.npz", check=0)
    with np.load(tmp_path / "q.npz") as file:
        assert np.abs(file["output"] - p).max() < 1e-6


def test_samples_are_replaced(run_on, tmp_path):
    options = [*SMALL, "--thin", "10"]
    run_on(2, SCRIPT, *options, "--epochs", "6", "--out", "b", check=0)
    run_on(2, SCRIPT, *options, "--epochs", "1", "--out", "b", "--force", check=0)  # no sample yet
    with h5py.File(tmp_path / "b/samples.h5") as file:
        assert file["samples"].shape == (1, 0, 650)
    done = run_on(1, SCRIPTS / "evaluate.py", "b", "--samples", check=2)
    assert "b has no samples up to step 45; see --burn-in and --thin" in done.stderr
    plain = ["--model", "softmax", "--epochs", "1", "--out", "b", "--force"]
    run_on(1, SCRIPTS / "train_sequential.py", *plain, check=0)
    assert (tmp_path / "b/checkpoint.h5").exists() and not (tmp_path / "b/samples.h5").exists()
