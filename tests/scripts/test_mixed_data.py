"""A training on a mixture of files: goes on exactly, counts the rows of each file, and is scored on the first's."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
COMMON = ["--model", "softmax", "--progress", "none", "--batch-size", "32", "--placement", "streamed"]
COMMON += ["--schedule", "constant"]


@pytest.fixture
def files(tmp_path):
    random = np.random.default_rng(0)
    for name, rows in (("a", 300), ("b", 100)):
        y = np.arange(rows) % 3
        x = random.standard_normal((rows, 6)).astype("f4") + y[:, None]
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["train/x"], file["train/y"], file["test/x"], file["test/y"] = x, y, x[:30], y[:30]
    return tmp_path


def test_a_run_that_goes_on_elsewhere_is_one_that_never_stopped(run_on, files):
    def train(ranks, *options, status=0):
        done = run_on(ranks, SCRIPTS / "train_allreduce.py", *COMMON, *options)
        assert done.returncode == status, done.stderr
        return done.stderr

    train(2, "--data", "mix:a.h5=0.6,b.h5=0.4", "--steps", "40", "--out", "whole")
    train(2, "--data", "mix:a.h5=0.6,b.h5=0.4", "--steps", "21", "--out", "cut")
    refusal = train(2, "--resume", "cut", "--steps", "40", "--shuffle-window", "3", status=2)
    assert "5 steps into an epoch of 16, with in each 1000 rows 600 of all rows by blocks of 300" in refusal
    train(3, "--resume", "cut", "--steps", "40", "--data-servers", "1")
    whole, cut = (Checkpoint.read(files / name / "checkpoint.h5").vectors["parameters"] for name in ("whole", "cut"))
    np.testing.assert_array_equal(whole[:], cut[:])
    for name in ("whole", "cut"):  # 500 rows an epoch, 16 steps: 8 steps into the third
        used = json.loads((files / name / "summary.json").read_text())["data_sources"]
        assert used["a"]["rows"] + used["b"]["rows"] == 2 * 500 + 8 * 32
        assert abs(used["a"]["rows"] - 0.6 * 1256) < 15 and used["b"]["epochs"] == used["b"]["rows"] / 100
    done = run_on(1, SCRIPTS / "evaluate.py", "whole")
    assert done.returncode == 0 and "on 30 rows of a:" in done.stdout
