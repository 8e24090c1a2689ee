"""Which layers a module has; what is no chain is refused in one line."""

import re

import pytest
from mpi4py import MPI

from hpcdl.errors import UsageError
from hpcdl.launch.training import Training
from hpcdl.models import make_model
from hpcdl.models.balance import cut_layers, parameter_costs
from hpcdl.models.part import ModelPart
from hpcdl.strategies import fully_sharded, pipeline, tensor_parallel

CNN = "torch:cut_nets:cnn"


def made(spec):
    return make_model(spec, (6,), 3, "float64")


def test_a_stage_without_parameters_goes_with_the_one_before():
    model = made(CNN)
    assert [layer.name for layer in model.layers] == ["1", "2", "5", "9", "11", "14", "15", "16", "loss"]
    assert [layer.output_shape(7, None) for layer in model.layers[:4]] == [(7, 4, 2, 3)] * 2 + [(7, 8), (7, 6)]
    assert list(ModelPart(model).layout.tensors) == list(model.layout.tensors) == list(model.module.state_dict())
    assert sum(parameter_costs(model)) == model.size
    with pytest.raises(UsageError, match=re.escape("9 stages are more than the model's 8 layers (1, 2, 5, 9")):
        cut_layers(model, 9)


def test_a_tied_tensor_lies_with_the_layer_that_has_its_name():
    model = made("torch:cut_nets:tied")
    shared = "last.weight"
    layers = {layer.name: layer for layer in model.layers}
    assert "weight" in layers["last"].full_shapes and shared in layers["first"].tied and shared in layers["middle"].tied
    part = ModelPart(model, [range(0, 3)])
    assert [tensor.name for tensor in part.copies] == [shared] and list(part.tied()) == [shared]


@pytest.mark.parametrize(
    "kind, words",
    [
        ("none", "PyTorch module that is an nn.Sequential or has a method stages() that lists its parts"),
        ("other", "the module's stages, run in sequence, return another output than its forward"),
        ("few", "the module's parameter one.weight is in none of its stages; put it into one"),
        ("text", "the module's stages() lists a str, not only parts of the module"),
        ("raising", "the module's stages() raises KeyError: 'where'"),
    ],
)
def test_a_module_that_is_no_chain(kind, words, follow, world):
    with pytest.raises(UsageError, match=re.escape(words)) as found:
        follow(world, pipeline.train, model=f"torch:cut_nets:whole,kind={kind}", steps=1)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("strategy, refused", [(pipeline, True), (tensor_parallel, True), (fully_sharded, False)])
def test_it_is_refused_before_rows_are_read_where_layers_are_cut(strategy, refused, monkeypatch):
    def read(*_):
        raise LookupError

    monkeypatch.setattr("hpcdl.launch.training.open_for", read)
    training = Training(strategy.STRATEGY)
    for model, error in {"whole": UsageError if refused else LookupError, "cnn": LookupError}.items():
        options = training.strategy.options_class(model=f"torch:cut_nets:{model}", progress="none")
        with pytest.raises(error, match="cuts the model by its layers" if error is UsageError else None):
            training.run(MPI.COMM_SELF, options)


@pytest.mark.mpi(min_size=2)
def test_tensor_parallelism_is_for_other_models(follow, world):
    with pytest.raises(UsageError, match="tensor parallelism is for hpcdl's own models") as found:
        follow(world, tensor_parallel.train, None, CNN, steps=1)
    assert "\n" not in str(found.value)
