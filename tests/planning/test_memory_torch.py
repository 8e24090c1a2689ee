"""A module of PyTorch's, whole and cut: what is foretold is what a run holds."""

import pytest

pytest.importorskip("torch")

NET = """from torch import nn


def net(features, classes, width=24):
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes)]
    return nn.Sequential(nn.Flatten(), *layers)
"""


@pytest.mark.parametrize("program", ["train-allreduce", "train-pipeline", "train-fully-sharded"])
def test_modules(foretold, tmp_path, monkeypatch, program):
    (tmp_path / "planned_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    foretold(2, program, "--model", "torch:planned_net:net", "--steps", "3")
