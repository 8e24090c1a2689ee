"""A module that is a chain of stages as a chain of layers, so that ranks can share it: by layers, or by shards of them.

    nn.Sequential      Conv2d   ReLU   MaxPool2d   Flatten   Linear        or module.stages(), a list of its modules
    layers             |<-- layer "0" ------------------>|   |<- "4" ->|   loss

A stage without parameters goes with the one before it, the first ones with the one after them: what travels between
ranks is then what is left behind an activation and a pooling, and each layer has something to balance by. A layer has
the name of its stage, so that its tensors have the names that `state_dict` gives them. The stages are tried out with
one row, which says what shapes lie between them, and whether they make what the module makes.
"""

import inspect
from collections import Counter
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.data import Batch
from hpcdl.errors import UsageError, reason
from hpcdl.kernels.device import Array, Device
from hpcdl.models.layout import Layout
from hpcdl.models.layout import Tensor as Place
from hpcdl.torch.dropout_rng import CHANNELS, ELEMENTS
from hpcdl.torch.layers import ModuleLayer, ModuleLoss, TensorPool, nothing
from hpcdl.torch.tensors import Bound, place_of, trained


class Chain:
    """What a TorchModel has beside the rest where its module is a chain: `layers`, and what Part asks for."""

    module: nn.Module
    dtype: np.dtype
    device: Device
    layout: Layout
    bound: Bound
    sequences = False

    @cached_property
    def pool(self) -> TensorPool:
        """Where layers take buffers from."""
        return TensorPool(self.dtype, self.device)

    @cached_property
    def layers(self) -> list[Any]:
        """The layers, the loss the last. AttributeError where there are no stages."""
        stages = stages_of(self.module)
        if stages is None:
            raise AttributeError("the module is no chain of stages")
        layers: list[Any] = in_layers(self, stages)
        probe(self, layers)
        names = {layer.name for layer in layers}
        return [*layers, ModuleLoss(self, "loss" if "loss" not in names else "loss of the module")]

    def let_go(self) -> None:
        """The module's parameters have no memory, until a layer is computed or the whole module is."""
        for each in trained(self.module).values():
            each.data, each.grad = nothing(each), None
        self.bound.forget()

    def turn(self, training: bool) -> None:
        """The module computes as it trains from here on, or as it evaluates."""
        if self.module.training is not training:
            self.module.train(training)

    @property
    def tensors(self) -> list[list[Place]]:
        """The tensors that each layer uses."""
        found = ((*(f"{each.name}.{short}" for short in each.shapes), *each.tied) for each in self.layers)
        return [[self.layout.tensors[name] for name in names] for names in found]

    @property
    def target(self) -> np.dtype:
        """The type of y."""
        return self.layers[-1].target  # type: ignore[no-any-return]

    def targets(self, batch: Batch) -> Array:
        """What the loss compares its input with."""
        return batch.y

    def last_rows(self, z: Array) -> Array:
        """The rows of the loss's input that a prediction is made from."""
        return z


def stages_of(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The stages of a module, (name, module) each; None where it has none. UsageError for what are none."""
    told = getattr(module, "stages", None)
    if not inspect.ismethod(told):
        if type(module).forward is not nn.Sequential.forward:
            return None
        return [(name, each) for name, each in module._modules.items() if each is not None]
    names = {id(each): name for name, each in module.named_modules()}
    try:
        found = list(told())
    except Exception as error:
        raise UsageError(f"its stages() raises {type(error).__name__}: {reason(error)}") from None
    for each in found:
        if not isinstance(each, nn.Module) or each is module:
            raise UsageError(f"its stages() has a {type(each).__name__} in it, and should list parts of it")
        if id(each) not in names and any(True for _ in each.parameters()):
            raise UsageError(f"its stages() has a {type(each).__name__} with parameters that is no part of it")
    return [(names.get(id(each), ""), each) for each in found]


def in_layers(model: Any, stages: list[tuple[str, nn.Module]]) -> list[ModuleLayer]:
    """A layer for each stage that has parameters, together with those after it that have none."""
    groups: list[tuple[str, list[nn.Module]]] = []
    before: list[nn.Module] = []  # those that come before any that has parameters
    used: set[str] = set()
    for name, module in stages:
        if not any(True for _ in module.parameters()):
            (groups[-1][1] if groups else before).append(module)
            continue
        while name in used:  # the same module a second time
            name += "'"
        used.add(name)
        groups.append((name, [*before, module]))
        before = []
    if not groups:
        raise UsageError("its stages have no parameters")
    names = {id(each): name for name, each in trained(model.module).items()}
    extra = {id(each): name for name, each in model.module.named_buffers()}
    extra |= {id(each): name for name, each in model.module.named_parameters() if not each.requires_grad}
    dropouts = {id(each): name for name, each in model.module.named_modules() if type(each) in ELEMENTS + CHANNELS}
    layers: list[ModuleLayer] = []
    seen: set[str] = set()
    drawn: Counter[str] = Counter()
    for name, modules in groups:
        own: dict[str, nn.Parameter] = {}
        others: dict[str, nn.Parameter] = {}
        for each in (parameter for module in modules for parameter in module.parameters()):
            if not each.requires_grad:
                continue
            key = names[id(each)]
            if key.startswith(f"{name}.") and key not in seen:
                own[key.removeprefix(f"{name}.")] = each
            else:
                others[key] = each
        seen |= {f"{name}.{short}" for short in own}
        held = [*(b for m in modules for b in m.buffers()), *(p for m in modules for p in m.parameters())]
        kept = [extra[id(each)] for each in held if id(each) in extra and extra[id(each)] in model.extra]
        layers.append(ModuleLayer(model, name, modules, own, others, kept, first=not layers))
        layers[-1].drawn = {each: count - 1 for each, count in drawn.items()}
        drawn.update(dropouts[id(each)] for module in modules for each in module.modules() if id(each) in dropouts)
    if lost := [name for name in names.values() if name not in seen]:
        raise UsageError(f"its parameter {lost[0]} is in none of its stages, which are all that is cut")
    return layers


def probe(model: Any, layers: list[ModuleLayer]) -> None:
    """Find the shapes between the layers with one row; UsageError where they do not make what the module makes."""
    module, was = model.module, model.module.training
    x = torch.randn((1, *model.features), generator=torch.Generator().manual_seed(0)).to(place_of(model.device))
    x = x.to(layers[0].kind)
    module.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            with torch.no_grad(), model.autocasting():
                wanted = module(x.clone())
            y = x
            for layer in layers:
                y = try_out(layer, y)
    except UsageError:
        raise
    except Exception as error:
        shape = " x ".join(map(str, model.features))
        raise UsageError(f"its stages cannot take an example of {shape}: {reason(error)}") from error
    finally:
        module.train(was)
    if y.shape != wanted.shape or not torch.allclose(y, wanted.to(y.dtype), rtol=0.01, atol=1e-5, equal_nan=True):
        raise UsageError("its stages, one after the other, do not make what its forward makes")


def try_out(layer: ModuleLayer, x: Tensor) -> Tensor:
    """What a layer makes of a row; it is told its shapes, and whether it changes its input in place."""
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
        raise UsageError(f"stage {layer.name} makes no rows of one")
    layer.taken, layer.per = tuple(x.shape), tuple(y.shape)
    return y.detach()
