"""Many runs of a module: a search, an ensemble, a comparison."""

import sys

import pytest

torch = pytest.importorskip("torch")

from in_process import ends  # noqa: E402

NETS = """
from torch import nn

def small(features, classes, width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))
"""
MODEL = ["--model", "torch:nets_of_many:small,width=4"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    (tmp_path / "nets_of_many.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("nets_of_many", None)


def test_a_search_over_it(folder):
    """Settings of the module and rules of PyTorch's are values like others."""
    models, rules = f"model={MODEL[1][:-8]}|{MODEL[1]}", "optimizer=torch:AdamW,betas=(0.9,0.95)|momentum"
    told = ["--space", models, "--space", rules, "--method", "grid", "--epochs", "1", "--batch-size", "256"]
    told += ["--out", "found"]
    assert ends("search", ["train-allreduce", *told])[0] == 0
    assert len([*(folder / "found").glob("trials/*/*/summary.json")]) == 4


def test_an_ensemble_of_it(folder):
    told = ["--members", "2", "--model", MODEL[1], "--epochs", "1", "--batch-size", "256", "--out", "many"]
    assert ends("train_ensemble", ["train-allreduce", *told])[0] == 0
    assert ends("evaluate", ["many", "--trust", "many", "--json", "many.json"])[0] == 0


@pytest.mark.long
def test_compared(folder):
    told = ["train-sequential", "train-allreduce", *MODEL, "--epochs", "1", "--batch-size", "256", "--out", "c"]
    assert ends("compare", told)[0] == 0
