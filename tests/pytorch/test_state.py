"""A module trained here is one of plain PyTorch's afterwards, key by key; one of PyTorch's is where a run begins."""

import sys

import numpy as np
import pytest
import torch
from in_process import ends
from safetensors.numpy import load_file as arrays_in
from safetensors.torch import load_file, save_file

from hpcdl.errors import UsageError
from hpcdl.inference.pretrained import read_tensors
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.torch import TorchModel

NETS = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self, features, classes, width=6):
        super().__init__()
        self.first = nn.Linear(features, width)
        self.norm = nn.BatchNorm1d(width)
        self.encoder = nn.Linear(width, width)
        self.decoder = nn.Linear(width, width, bias=False)
        self.decoder.weight = self.encoder.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, classes)
    def forward(self, x):
        x = self.norm(self.first(x.flatten(1))).relu()
        return self.head(self.frozen(self.decoder(self.encoder(x).relu())))

def tied(features, classes, width=6):
    n = 1
    for each in features:
        n *= each
    return Tied(n, classes, width)
"""
TOLD = ["--model", "torch:nets_of_state:tied", "--progress", "none", "--batch-size", "64"]
STILL = [*TOLD, "--steps", "1", "--lr", "1e-30"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of three steps, and its weights exported, in a folder with the module's file, which is the current one."""
    folder = tmp_path_factory.mktemp("state")
    (folder / "nets_of_state.py").write_text(NETS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        assert ends("train_allreduce", [*TOLD, "--steps", "3", "--out", "a"]) == (0, "")
        for file in ("w.safetensors", "w.npz"):
            assert ends("evaluate", ["a", "--trust", "a", "--export", file]) == (0, "")
        yield folder
    sys.modules.pop("nets_of_state", None)


def fresh():
    from nets_of_state import tied

    return tied((8, 8), 10)


def test_plain_pytorch_loads_what_was_exported(folder):
    """Strictly: tied weights under each of their names, statistics of batch norm, frozen parameters."""
    module, wanted = fresh(), TorchModel.state_dict("a", trust=["a"])
    assert set(load_file("w.safetensors")) == set(wanted) == set(module.state_dict())
    module.load_state_dict(load_file("w.safetensors"), strict=True)
    assert all(torch.equal(each, wanted[name]) for name, each in module.state_dict().items())
    assert module.norm.num_batches_tracked.shape == () and module.norm.num_batches_tracked > 0
    module.load_state_dict({name: torch.from_numpy(each) for name, each in np.load("w.npz").items()}, strict=True)
    model, x = TrainedModel("a", ["a"]), np.random.default_rng(0).standard_normal((5, 64)).astype("float32")
    with torch.no_grad():
        plain = module.eval()(torch.from_numpy(x)).softmax(1).numpy()
    np.testing.assert_allclose(model.model().predict(model.parameters, x), plain, rtol=1e-6)


@pytest.mark.parametrize("file", ["b.pth", "b.safetensors", "w.npz", "a", "a/checkpoint.h5", "half.pt"])
def test_a_run_begins_with_a_file(folder, file):
    torch.manual_seed(1)
    module = fresh()
    if file == "b.safetensors":  # which holds a tied tensor once
        state = {name: each.clone() for name, each in module.state_dict().items() if name != "encoder.weight"}
        save_file(state, file)
    elif file == "half.pt":
        module.bfloat16()
        torch.save(module.state_dict(), file)
    elif file.startswith("b"):
        torch.save(module.state_dict(), file)
    else:
        module.load_state_dict(load_file("w.safetensors"))
    wanted = {name: each.clone() for name, each in module.state_dict().items()}
    assert ends("train_allreduce", [*STILL, "--initial", file, "--out", "c", "--force"]) == (0, "")
    found = TorchModel.state_dict("c", trust=["nets_of_state:tied"])
    assert found.keys() == wanted.keys()
    for name, each in found.items():
        if "running" not in name and "tracked" not in name:  # which a step changes
            assert torch.allclose(each, wanted[name].to(each.dtype), rtol=0, atol=1e-29), name
    assert found["norm.num_batches_tracked"] == wanted["norm.num_batches_tracked"] + 1


def test_keys_that_do_not_fit_are_listed_in_a_line(folder):
    state = fresh().state_dict()
    state["other"] = state.pop("norm.weight")
    state["head.bias"] = torch.zeros(3)
    del state["norm.running_var"]
    torch.save(state, "bad.pt")
    status, said = ends("train_allreduce", [*STILL, "--initial", "bad.pt"])
    assert status == 2 and said.count("\n") == 1
    assert "missing: norm.weight, norm.running_var; unexpected: other; of another shape: head.bias (3, not 10)" in said


def test_what_is_no_state_dict_is_refused_and_nothing_in_it_is_run(folder):
    torch.save(fresh(), "whole.pt")
    torch.save({"epoch": 3, "model": fresh().state_dict()}, "nested.pt")
    (folder / "text.pt").write_text("no")
    for file, words in (
        ("whole.pt", "holds more than tensors, and is not read: write torch.save(module.state_dict(), FILE)"),
        ("nested.pt", "holds no state_dict, a dictionary of tensors by name; it holds epoch, model"),
        ("text.pt", "--initial text.pt "),
    ):
        with pytest.raises(UsageError) as refused:
            read_tensors(file)
        assert words in str(refused.value) and "\n" not in str(refused.value)


def test_types_that_numpy_lacks_are_read_from_safetensors(folder):
    save_file({"w": torch.ones(2, dtype=torch.bfloat16)}, "half.safetensors")
    assert read_tensors("half.safetensors")["w"].tolist() == [1, 1]
    assert arrays_in("w.safetensors").keys() == read_tensors("w.safetensors").keys()


def test_a_module_that_cannot_be_imported_from_here_may_be_given(folder, monkeypatch, tmp_path):
    run = str(folder / "a")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "nets_of_state", None)
    for trust, words in (([], "names nets_of_state:tied"), ([run], "nets_of_state")):
        with pytest.raises(UsageError, match=words):
            TorchModel.state_dict(run, trust=trust)
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert TorchModel.state_dict(run, fresh()).keys() == fresh().state_dict().keys()
    with pytest.raises(UsageError, match="there is no checkpoint"):
        TorchModel.state_dict("nothing")
