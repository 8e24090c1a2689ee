"""A module that is a chain of stages, made a chain of layers that ranks can share: each has some, or shards of all.

    nn.Sequential      Conv2d   ReLU   MaxPool2d   Flatten   Linear        or module.stages(), a list of its modules
    layers             |<-- layer "0" ------------------>|   |<- "4" ->|   loss

A stage without parameters joins the stage before it; leading ones join the stage after them. So messages between
ranks carry outputs of activations and pooling, and each layer has parameters to balance by. A layer has the name of its
stage, so its tensors have their names in `state_dict`."""

import contextlib
import inspect
from collections import Counter
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.data import Batch
from hpcdl.errors import UsageError, blamed_on, reason
from hpcdl.kernels.device import Array, Device
from hpcdl.models.layout import Layout
from hpcdl.models.layout import Tensor as Place
from hpcdl.models.part import ModelPart
from hpcdl.torch.dropout_rng import CHANNELS, ELEMENTS
from hpcdl.torch.layers import ModuleLayer, ModuleLoss, Named, TensorPool, without_memory
from hpcdl.torch.module_units import ModuleUnits
from hpcdl.torch.sequence import axis_of, check_layers, check_tokens
from hpcdl.torch.tensors import FlatBinding, place_of, trained


class Chain:
    """The part of a TorchModel for modules that are chains: `layers`, and the other members that ModelPart needs."""

    module: nn.Module
    dtype: np.dtype
    device: Device
    layout: Layout
    bound: FlatBinding
    sequences = False

    @cached_property
    def pool(self) -> TensorPool:
        return TensorPool(self.dtype, self.device)

    @cached_property
    def layers(self) -> Any:
        """The layers, the loss last; None if the module has no stages."""
        stages = stages_of(self.module)
        if stages is None:
            return None
        layers: list[Any] = in_layers(self, stages)
        probe(self, layers)
        names = {layer.name for layer in layers}
        return [*layers, ModuleLoss(self, "loss" if "loss" not in names else "loss of the module")]

    @cached_property
    def whole_part(self) -> ModelPart:
        """The module as a part that has all of it: its layers, or its children if it is no chain of layers."""
        with contextlib.suppress(UsageError):  # raised if it is none, or its stages are invalid
            return ModelPart(self)  # type: ignore[arg-type]
        return ModuleUnits(self)

    @property
    def sequence_axis(self) -> int:
        return axis_of(self)

    def check_layers(self) -> None:
        check_layers(self)

    def check_tokens(self, context: Any) -> None:
        check_tokens(self, context)

    def let_go(self) -> None:
        """Free the memory of the module's parameters until a layer or the whole module is computed."""
        for each in trained(self.module).values():
            each.data, each.grad = without_memory(each), None
        self.bound.forget()

    def turn(self, training: bool) -> None:
        if self.module.training is not training:
            self.module.train(training)

    @property
    def tensors(self) -> list[list[Place]]:
        names_by_layer = ((*(f"{each.name}.{short}" for short in each.shapes), *each.tied) for each in self.layers)
        return [[self.layout.tensors[name] for name in names] for names in names_by_layer]

    @property
    def target(self) -> np.dtype:
        return self.layers[-1].target  # type: ignore[no-any-return]

    def targets(self, batch: Batch) -> Array:
        return batch.y

    def last_rows(self, z: Array) -> Array:
        return z


def stages_of(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return (name, module) of each stage; None if the module has no stages. Raises UsageError for invalid stages."""
    stages = getattr(module, "stages", None)
    if not inspect.ismethod(stages):
        if type(module).forward is not nn.Sequential.forward:
            return None
        return [(name, each) for name, each in module._modules.items() if each is not None]
    names = {id(each): name for name, each in module.named_modules()}
    try:
        listed = list(stages())
    except Exception as error:
        raise UsageError(f"the module's stages() raises {type(error).__name__}: {reason(error)}") from None
    for each in listed:
        if not isinstance(each, nn.Module) or each is module:
            raise UsageError(f"the module's stages() lists a {type(each).__name__}, not only parts of the module")
        if id(each) not in names and any(True for _ in each.parameters()):
            raise UsageError(f"the module's stages() lists a {type(each).__name__} with parameters of its own")
    return [(names.get(id(each), ""), each) for each in listed]


def in_layers(model: Any, stages: list[tuple[str, nn.Module]]) -> list[ModuleLayer]:
    """Return a layer for each stage with parameters; the stages without parameters that follow it join the layer."""
    groups: list[tuple[str, list[nn.Module]]] = []
    leading: list[nn.Module] = []  # leading stages without parameters
    used: set[str] = set()
    for name, module in stages:
        if not any(True for _ in module.parameters()):
            (groups[-1][1] if groups else leading).append(module)
            continue
        while name in used:  # a module that occurs twice
            name += "'"
        used.add(name)
        groups.append((name, [*leading, module]))
        leading = []
    if not groups:
        raise UsageError("the stages of the module have no parameters")
    names = {id(each): name for name, each in trained(model.module).items()}
    extra = {id(each): name for name, each in model.module.named_buffers()}
    extra |= {id(each): name for name, each in model.module.named_parameters() if not each.requires_grad}
    dropouts = {id(each): name for name, each in model.module.named_modules() if type(each) in ELEMENTS + CHANNELS}
    layers: list[ModuleLayer] = []
    seen: set[str] = set()
    drawn: Counter[str] = Counter()
    for name, modules in groups:
        own, others = Named(), Named()
        for each in (parameter for module in modules for parameter in module.parameters() if parameter.requires_grad):
            key = names[id(each)]
            if key.startswith(f"{name}.") and key not in seen:
                own[key.removeprefix(f"{name}.")] = each
            else:
                others[key] = each
        seen |= {f"{name}.{short}" for short in own}
        members = [*(b for m in modules for b in m.buffers()), *(p for m in modules for p in m.parameters())]
        names_of_extra = [extra[id(each)] for each in members if id(each) in extra and extra[id(each)] in model.extra]
        layers.append(ModuleLayer(model, name, modules, own, others, names_of_extra, first=not layers))
        layers[-1].drawn = {each: count - 1 for each, count in drawn.items()}
        drawn.update(dropouts[id(each)] for module in modules for each in module.modules() if id(each) in dropouts)
    if lost := [name for name in names.values() if name not in seen]:
        raise UsageError(f"the module's parameter {lost[0]} is in none of its stages; put it into one, or freeze it")
    return layers


def probe(model: Any, layers: list[ModuleLayer]) -> None:
    """Find the shapes between the layers by one row. Raises UsageError if the result differs from the module's."""
    module, was_training = model.module, model.module.training
    x = torch.rand((1, *model.features), generator=torch.Generator().manual_seed(0)).to(place_of(model.device))
    x = x.to(layers[0].kind)
    shape = " x ".join(map(str, model.features))
    module.eval()
    try:
        with torch.random.fork_rng(devices=[]), blamed_on(f"the module's stages cannot compute an example of {shape}"):
            with torch.no_grad(), model.autocasting():
                expected = module(x.clone())
            y = x
            for layer in layers:
                y = try_out(layer, y)
    finally:
        module.train(was_training)
    if y.shape != expected.shape or not torch.allclose(y, expected.to(y.dtype), rtol=0.01, atol=1e-5, equal_nan=True):
        raise UsageError("the module's stages, run in sequence, return another output than its forward")


def try_out(layer: ModuleLayer, x: Tensor) -> Tensor:
    """Return a layer's output for a row; set its shapes, and `copies` if it changes its input in place."""
    leaf = x.detach().clone().requires_grad_(not layer.first)
    try:
        y = layer.through(leaf)
        layer.copies = not torch.equal(leaf.detach(), x)
    except RuntimeError as error:
        if "in-place" not in str(error):
            raise
        layer.copies = True
    if layer.copies:
        y = layer.through(x)
    if not len(y):
        raise UsageError(f"stage {layer.name} returns no rows for an input of one row")
    layer.example_input, layer.example_output = tuple(x.shape), tuple(y.shape)
    return y.detach()
