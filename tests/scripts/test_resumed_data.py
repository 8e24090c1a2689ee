"""A run goes on with the rows that it began with, and within an epoch in the order that it began with."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data import open_data
from hpcdl.scripts import prepare_data

SCRIPTS = Path(__file__).parents[2] / "scripts"
SOFTMAX = ["--model", "softmax", "--progress", "none", "--batch-size", "32"]  # 5 steps an epoch


@pytest.fixture
def tables(tmp_path, capsys):
    """rows.h5, and again.h5: the same rows split with another seed, and under the same name."""
    y = np.arange(200) % 3
    np.savez(tmp_path / "in.npz", x=np.random.default_rng(0).standard_normal((200, 4)) + y[:, None], y=y)
    for name, seed in (("rows", "0"), ("again", "1")):
        options = ["npz", str(tmp_path / "in.npz"), str(tmp_path / f"{name}.h5"), "--seed", seed, "--name", "rows"]
        prepare_data.main(options)
    capsys.readouterr()
    return tmp_path


@pytest.fixture
def train(run_on, tables):
    """A function: a run of so many steps in folder a, or going on from it; returns the line that refuses, or None."""

    def run(steps, *options, ranks=2, script="allreduce"):
        path = SCRIPTS / f"train_{script}.py"
        resumed = not (tables / "a").exists()
        data = ["--data", "rows.h5", "--out", "a"] if resumed else ["--resume", "a"]
        done = run_on(ranks, path, *SOFTMAX, *data, "--steps", steps, *options)
        assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr
        if done.returncode == 0:
            return None
        (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
        return line

    return run


def test_a_file_split_anew(train, tables):
    """Rows that were tested with would become rows to train with."""
    train(5)
    assert "that run's data are other ones: rows has the same name and shape, but other contents" in train(
        9, "--data", "again.h5"
    )
    shutil.copy(tables / "rows.h5", tables / "copy.h5")
    with h5py.File(tables / "copy.h5", "a") as file:
        file.attrs["source"] = "somewhere else"
    assert train(9, "--data", "copy.h5") is None
    with h5py.File(tables / "rows.h5", "a") as file:
        file["train/x"][0] += 1
    assert "other contents" in train(12, "--data", "rows.h5")
    with h5py.File(tables / "copy.h5", "a") as file:
        for name in ("train/x", "train/y"):
            rows = file[name][:100]
            del file[name]
            file[name] = rows
    assert "data are rows with 160 training rows, not rows with 100" in train(12, "--data", "copy.h5")


def test_a_checkpoint_from_before_there_were_digests(train, tables):
    train(7)
    path = tables / "a" / "checkpoint.h5"
    found = Checkpoint.read(path)
    assert found.attributes["data"].pop("digest") == open_data(tables / "rows.h5").digest
    assert found.attributes.pop("order") == "all rows in one order"
    found.write(path)
    assert train(9, "--data", "again.h5", "--placement", "streamed") is None


def test_another_order_in_the_middle_of_an_epoch(train):
    train(7)
    for options, now in [
        (["--placement", "streamed"], "all rows by blocks of 160 in windows of 8"),
        (["--partition", "by-label"], "rows divided by-label (ranks: 2)"),
        (["--placement", "partitioned"], "rows divided iid (ranks: 2)"),
    ]:
        said = f"checkpoint is 2 steps into an epoch of 5, with all rows in one order, now {now}: take"
        assert said in train(14, *options)
    assert train(10) is None  # an epoch's end
    assert train(12, "--placement", "partitioned") is None


def test_the_same_order_by_other_options(train):
    train(7, "--partition", "shards")
    assert "shards:2 (ranks: 2), now rows divided shards:3 (ranks: 2)" in train(9, "--partition", "shards:3")
    assert train(9, "--partition", "shards:2", "--placement", "partitioned") is None


def test_another_number_of_ranks_in_the_middle_of_an_epoch(train):
    train(7, "--partition", "by-label", ranks=3)
    assert "(ranks: 3), now rows divided by-label (ranks: 2)" in train(14)
    assert train(10, ranks=3) is None and train(12) is None


def test_rows_of_all_ranks_in_one_order_have_any_number_of_them(train):
    train(7, ranks=3)
    assert train(9, ranks=2) is None and train(12, ranks=1, script="sequential") is None


@pytest.mark.parametrize(("script", "roles"), [("allreduce", ["--data-servers", "1"]), ("parameter_server", [])])
def test_ranks_that_serve(train, tables, script, roles):
    """Where rank 0 of the run sees nothing of the order, or of the data, itself."""
    options = {"script": script, "ranks": 3}
    roles = roles or ["--servers", "1", "--data-servers", "1"]
    train(7, *roles, **options)
    about = Checkpoint.read(tables / "a" / "checkpoint.h5").attributes
    assert about["data"]["digest"] == open_data(tables / "rows.h5").digest and about["order"] == "all rows in one order"
    assert "other contents" in train(14, "--data", "again.h5", *roles, **options)
    assert "now all rows by blocks of 160" in train(14, "--placement", "streamed", *roles, **options)
    assert train(9, *roles, **options) is None
    assert json.loads((tables / "a" / "summary.json").read_text())["steps"] == 9


def test_clients_have_orders_of_their_own(run_on, tables):
    script, options = SCRIPTS / "train_federated.py", ["--clients", "5", "--model", "softmax", "--progress", "none"]
    run_on(2, script, *options, "--data", "rows.h5", "--rounds", 2, "--out", "a", "--partition", "by-label", check=0)
    run_on(3, script, "--resume", "a", "--rounds", 3, check=0)
