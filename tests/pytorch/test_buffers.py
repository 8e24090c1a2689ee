"""Buffers and frozen parameters: by the keys of state_dict, in the module's own memory, saved and given back."""

import numpy as np
import pytest
import torch
import torch_nets
from mpi4py import MPI
from torch import nn

from hpcdl.comm import Communicator
from hpcdl.data import from_arrays
from hpcdl.errors import UsageError
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.models import for_data
from hpcdl.random import Random
from hpcdl.runs import Options, Run
from hpcdl.strategies import sequential
from hpcdl.torch import TorchModel


def of(module, **settings):
    return TorchModel(module, features=(6,), classes=3, **settings)


def test_by_the_keys_of_state_dict():
    made = of(torch_nets.tied((6,), 3))
    assert made.extra.keys() == {"mask", "count", "frozen.weight", "frozen.bias"}
    assert made.averaged == ["mask", "count"] and of(torch_nets.tied((6,), 3), buffers="local").averaged == []
    keys = made.module.state_dict().keys()
    assert keys >= made.extra.keys() | made.layout.tensors.keys()
    assert keys - made.extra.keys() - made.layout.tensors.keys() == {"second.weight"}
    assert of(torch_nets.mlp((6,), 3)).extra == {}


def test_they_share_memory_with_the_module():
    made = of(torch_nets.normed((6,), 3), dtype="float64")
    made.extra["1.running_mean"][...] = 3
    made.extra["1.num_batches_tracked"][...] = 7
    assert (made.module[1].running_mean == 3).all() and made.module[1].num_batches_tracked == 7
    assert made.extra["1.num_batches_tracked"].shape == (1,)


def test_a_buffer_that_is_replaced_keeps_its_memory():
    made = of(torch_nets.tied((6,), 3))
    array = made.extra["count"]
    made.module.train()
    made.module(torch.zeros(2, 6))
    assert array[0] == 0 and made.extra["count"] is array and array[0] == 1
    made.module(torch.zeros(2, 6))
    assert made.extra["count"][0] == made.module.count == 2
    made.module.count = torch.zeros(3)
    with pytest.raises(UsageError, match="changes the shape of its buffer count"):
        _ = made.extra


def test_one_that_has_no_memory_of_its_own_gets_some():
    module = nn.Linear(6, 3)
    module.register_buffer("positions", torch.arange(4).expand(2, 4))
    made = of(module)
    made.extra["positions"][0] = 9
    assert module.positions.tolist() == [[9] * 4, [0, 1, 2, 3]]


@pytest.fixture
def trained(tmp_path):
    """A function: train a net with batch norm for so many steps; the run's buffers and parameters."""
    random = np.random.default_rng(4)
    y = random.integers(0, 3, 29)
    data = from_arrays(random.standard_normal((29, 6)) + y[:, None], y, dtype="float32")

    def train(steps, name="normed", **options):
        made = for_data(f"torch:torch_nets:{name}", data, "float32")
        options = Options(batch_size=13, steps=steps, schedule="constant", progress="none", **options)
        with Run(Communicator(MPI.COMM_SELF), options) as run:
            w = sequential.train(run.comm, made, data, run.make_optimizer(made, data), run)
        return {name: array.copy() for name, array in made.extra.items()}, w

    train.data = data
    return train


@pytest.mark.parametrize("name", ["normed", "tied"])
def test_resumed_is_never_stopped_to_the_bit(name, trained, tmp_path):
    whole = trained(6, name)
    assert (whole[0]["1.num_batches_tracked"] == 6).all() if name == "normed" else whole[0]["count"] == 6
    folder = str(tmp_path / "run")
    trained(2, name, out=folder)
    again = trained(6, name, resume=folder)
    assert np.array_equal(again[1], whole[1]) and again[0].keys() == whole[0].keys()
    assert all(np.array_equal(again[0][key], whole[0][key]) for key in whole[0])


def test_what_is_trained_has_them(trained, tmp_path):
    beside, w = trained(4, out=str(tmp_path / "run"))
    found = TrainedModel(str(tmp_path / "run"))
    assert {f"extra/{name}" for name in beside} == found.extra.keys()
    made = found.model("torch:torch_nets:normed")
    assert all(np.array_equal(made.extra[key], beside[key]) for key in beside)
    x = np.ones((2, 6), np.float32)
    other = for_data("torch:torch_nets:normed", trained.data, "float32")
    assert not np.array_equal(made.predict(w, x), other.predict(w, x))
    with pytest.raises(UsageError, match=r"only one of them has 1\.num_batches_tracked"):
        found.model("torch:torch_nets:normed,norm=group")


def test_a_checkpoint_of_other_buffers_is_refused(trained, tmp_path):
    trained(2, out=str(tmp_path / "run"))
    with pytest.raises(UsageError, match=r"state is extra/1\.num_batches_tracked"):
        trained(4, "normed,norm=group", resume=str(tmp_path / "run"))


def test_the_seed_makes_them():
    made = of(torch_nets.normed((6,), 3, "frozen"), make=lambda: torch_nets.normed((6,), 3, "frozen"))
    found = []
    for seed in (1, 1, 2):
        made.initialize(Random(seed))
        found.append(made.extra["1.running_mean"].copy())
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])
