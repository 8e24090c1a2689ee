"""Modules that cannot be trained: one line, on all ranks."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
CNN = "torch:cnn:make,width=4,hidden=16,kernel=3"


@pytest.fixture
def examples(tmp_path):
    shutil.copy(ROOT / "docs" / "examples" / "cnn.py", tmp_path)
    shutil.copy(ROOT / "tests" / "torch_nets.py", tmp_path)
    return tmp_path


def refused(done, *words):
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize(
    "model, more, words",
    [
        ("torch:torch_nets:lazy", [], "gets its shape from the first batch"),
        ("torch:torch_nets:raising", [], "ValueError: no such width (torch_nets.py, line"),
        ("torch:torch_nets:absent", [], "has no attribute 'absent'"),
        ("torch:nowhere:make", [], "No module named 'nowhere'"),
        ("torch:cnn", [], "should be an importable package.module:name"),
        (f"{CNN},depth=3", [], "there is no setting 'depth'; it takes features, classes, width"),
        (f"{CNN},buffers=none", [], "unknown way with buffers 'none'"),
        ("mlp:8", ["--dtype", "bfloat16"], "is for a module of PyTorch's"),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_status_2(model, more, words, run_on, examples):
    refused(run_on(2, SCRIPTS / "train_allreduce.py", "--model", model, *more, "--out", "none"), words)


def test_what_a_step_shows_on_one_rank_ends_all(launch, examples):
    (examples / "late.py").write_text(
        "from mpi4py import MPI\nfrom torch import nn\n\nclass Late(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.head = nn.Linear(64, 10)\n"
        "    def forward(self, x):\n        if self.training and MPI.COMM_WORLD.rank == 1:\n"
        "            raise ValueError('only here')\n        return self.head(x.flatten(1))\n\n"
        "def make():\n    return Late()\n"
    )
    done = launch(2, SCRIPTS / "train_allreduce.py", "--model", "torch:late:make", "--out", "none", cwd=examples)
    assert done.returncode == 1 and "rank 1 of 2 failed" in done.stderr and "ValueError: only here" in done.stderr
