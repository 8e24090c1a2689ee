"""Modules that cannot be trained: one line, on all ranks."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def examples(tmp_path):
    shutil.copy(ROOT / "docs" / "examples" / "cnn.py", tmp_path)
    shutil.copy(ROOT / "tests" / "torch_nets.py", tmp_path)
    return tmp_path


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
