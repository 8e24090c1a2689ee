"""Bad input on 4 ranks: one clear line on rank 0, status 2, nothing written, no hang."""

from pathlib import Path

import h5py
import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_allreduce.py"


def file(path, change=None, **replaced):
    """A small data file; `replaced` changes a data set, `change` the open file."""
    arrays = {"train/x": np.ones((20, 3), "f4"), "train/y": np.arange(20) % 2}
    arrays |= {"test/x": np.ones((6, 3), "f4"), "test/y": np.arange(6) % 2}
    arrays |= {name.replace("_", "/"): value for name, value in replaced.items()}
    with h5py.File(path, "w") as made:
        for name, array in arrays.items():
            if array is not None:
                made[name] = array
        made.attrs["classes"] = 2
        if change:
            change(made)


DATA = {
    "labels outside the classes": ({"train_y": np.arange(20)}, "label"),
    "NaN in the data": ({"train_x": np.full((20, 3), np.nan)}, "NaN|not finite"),
    "without the groups": ({"train_x": None, "train_y": None}, "train"),
    "other lengths of x and y": ({"train_y": np.arange(19) % 2}, "20.*19|19.*20"),
    "the wrong type": ({"train_x": np.full((20, 3), b"text")}, "type|integers or floats"),
}


def refused(launch, tmp_path, words, *options):
    import re

    before = {path for path in tmp_path.rglob("*")}
    done = launch(4, SCRIPT, *options, timeout=60)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("train-allreduce: error: ")]
    assert done.returncode == 2, done.stderr
    assert len(ours) == 1 and re.search(words, ours[0]), done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert {path for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("what", sorted(DATA))
def test_data_files(launch, tmp_path, what):
    replaced, words = DATA[what]
    file(tmp_path / "bad.h5", **replaced)
    refused(launch, tmp_path, words, "--data", tmp_path / "bad.h5", "--model", "softmax")


def test_what_is_no_hdf5_at_all(launch, tmp_path):
    (tmp_path / "bad.h5").write_text("x,y\n1,2\n")
    refused(launch, tmp_path, "not an HDF5 file", "--data", tmp_path / "bad.h5")


@pytest.mark.parametrize(
    "options, words",
    [
        (["--allreduce", "rings"], "unknown all-reduce algorithm 'rings'.*direct, mpi, naive.*ring, tree"),
        (["--model", "mlq"], "unknown model 'mlq'.*linear, logistic, mlp, softmax"),
        (["--data", "digit"], "unknown data set 'digit'.*digits"),
        (["--lr", "-0.1"], "--lr must be greater than 0"),
        (["--batch-size", "0"], "--batch-size must be greater than 0"),
        (["--out", "/proc/run"], "--out /proc/run cannot be written"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options(launch, tmp_path, options, words):
    refused(launch, tmp_path, words, *options)


def test_an_out_folder_with_another_run_and_a_resume_folder_of_another_model(launch, tmp_path):
    launch(4, SCRIPT, "--epochs", "1", "--out", "a", check=0)
    refused(launch, tmp_path, "--out a holds another run; .*--resume a", "--out", "a")
    refused(launch, tmp_path, "that run's model is mlp with 9610 parameters", "--resume", "a", "--model", "mlp:32")


def test_sequential_training_on_several_ranks(launch, tmp_path):
    done = launch(4, SCRIPT.with_name("train_sequential.py"))
    assert done.returncode == 2
    assert "train-sequential: error: this strategy runs on 1 rank, not on 4" in done.stderr
