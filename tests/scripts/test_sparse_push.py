"""Sparse data of one's own in the programs: --sparse-push as it is started, and what is refused in one line."""

import json
import re
import sys
from pathlib import Path

import pytest
from in_process import ends

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
MODULE = """
import numpy as np
from hpcdl.csr import CSR
from hpcdl.models.losses import Hinge
from hpcdl.models.mlp import MLP

class Dense(MLP):
    def __init__(self, features, dtype):
        super().__init__([features[0], 1], "none", Hinge, dtype)

class Sparse(Dense):
    sparse = True

def documents(rows=240, words=400, length=9):
    random = np.random.default_rng(5)
    x = np.zeros((rows, words), np.float32)
    for row in x:
        row[((words + 1) ** random.random(length)).astype(int) - 1] = 1
    y = (x @ random.standard_normal(words) > 0).astype(np.int64)
    return CSR.of(x[60:]), y[60:], CSR.of(x[:60]), y[:60]
"""
DATA = ["--data", "of_mine:documents", "--progress", "none"]
SERVERS = [*DATA, "--model", "logistic", "--optimizer", "adagrad", "--batch-size", "12", "--epochs", "1"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with a module of one's own."""
    (tmp_path / "of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("of_mine", None)


@pytest.mark.parametrize("how", [["--consistency", "bsp"], ["--consistency", "async"]], ids=lambda how: how[-1])
def test_only_what_is_touched_travels(run_on, mine, how):
    for name, more in (("all", []), ("touched", ["--sparse-push"])):
        run_on(3, SCRIPTS / "train_parameter_server.py", *SERVERS, *how, *more, "--out", name, check=0)
    whole, touched = (json.loads((mine / name / "summary.json").read_text()) for name in ("all", "touched"))
    assert touched["steps"] == whole["steps"] == 15 and touched["options"]["sparse_push"] is True
    assert set(touched) == set(whole)
    servers = touched["servers"]
    assert sum(touched["bytes_sent_per_rank"][servers:]) < 0.75 * sum(whole["bytes_sent_per_rank"][servers:])
    if how[1] == "bsp":
        assert touched["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-5)
        assert abs(Checkpoint.read(mine / "touched").vectors["optimizer/sum_of_squares"]).max() > 0
    done = run_on(3, SCRIPTS / "evaluate.py", "touched", "--trust", "touched", "--export", "touched.npz", check=0)
    (scored,) = re.findall(r"test_loss ([\d.]+)", done.stdout)
    assert float(scored) == pytest.approx(touched["test_loss"], abs=1e-5)


def test_refused_by_all_ranks_in_one_line(run_on, mine):
    plain = "take --optimizer sgd or adagrad, without these two options"
    for options, words in [
        *((options, plain) for options in ("--optimizer momentum", "--weight-decay 0.1", "--average")),
        ("--data digits --model softmax", "--sparse-push is for sparse data"),
        ("--model of_mine:Sparse --servers 401", "no worker is left over"),
    ]:
        arguments = [*SERVERS, "--sparse-push", *options.split(), "--out", "none"]
        done = run_on(3, SCRIPTS / "train_parameter_server.py", *arguments, check=2, timeout=30)
        said = [line for line in done.stderr.splitlines() if line.startswith("train-parameter-server: error: ")]
        assert len(said) == 1 and words in said[0] and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "model, words",
    [
        ("gpt", "reads sequences of tokens, and the data are sparse rows; take softmax or mlp"),
        ("of_mine:Dense", "of_mine:Dense is not for sparse data; set sparse = True in the class"),
    ],
)
def test_models_that_take_no_sparse_rows(mine, model, words):
    status, said = ends("train_sequential", [*DATA, "--model", model, "--out", "none"])
    assert status == 2 and said.count("\n") == 1 and words in said


def test_a_model_of_ones_own_that_takes_them(mine):
    assert ends("train_sequential", [*DATA, "--model", "of_mine:Sparse", "--steps", "3", "--out", "a"]) == (0, "")
    assert ends("evaluate", ["a", "--trust", "a"]) == (0, "")
