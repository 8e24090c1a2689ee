"""A PyTorch module of any form as a part that ranks can shard, its children as units; a trial finds how.

    blocks.0    blocks.1    head    rest        a unit: a child that computes (those of a ModuleList count as children)

The rest holds parameters of the module itself and parameters that several children have (tied weights), and it is
gathered for the whole pass. So are children that the trial does not run. If the module computes something else in
units than as a whole, as one that reads a child's parameters outside of the child's forward, it is one unit."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.data import Batch
from hpcdl.errors import blamed_on
from hpcdl.kernels.device import Array, Device
from hpcdl.models.group import IdentityGroup
from hpcdl.models.layered import Weights
from hpcdl.models.layout import Layout
from hpcdl.models.layout import Tensor as Place
from hpcdl.models.part import ModelPart
from hpcdl.random import Random
from hpcdl.torch.tensors import as_array, as_tensor, place_of, trained
from hpcdl.torch.units import Pass, Plan, Unit

ROWS = 2  # of the trial: batch norm cannot normalize one
REST = "(rest)"  # no name of a child has parentheses


class ModuleUnits(ModelPart):
    """All of a TorchModel's module, as units; at the end of a pass its parameters have no memory."""

    model: Any

    def __init__(self, model: Any):
        self.model, self.pool, self.device, self.group = model, model.pool, model.device, IdentityGroup()
        self.rows_at_once, self.dtype, self.share, self.copies = model.rows_at_once, model.dtype, (0, 1), []
        with unchanged_parameters(model.module), unchanged_state(model.module):
            trial = UnitTrial(model)
            self.layers = units_of(model.module, trial.ran)
            if not trial.agrees(self.layers):
                self.layers = units_of(model.module, set())
                trial.run(self.layers)
        self.training, self.scoring = trial.training, trial.scoring
        places, offset = [], 0
        for unit in self.layers:
            for name, each in zip(unit.names, unit.parameters, strict=True):
                places.append(Place(name, tuple(each.shape), offset, unit.name))
                offset += each.numel()
        self.layout, self.size = Layout(places, self.dtype), offset
        self.tensors = [[self.layout.tensors[name] for name in unit.names] for unit in self.layers]
        self.cuts = [slice(each[0].offset, each[-1].slice.stop) for each in self.tensors]
        self.slices = [*self.cuts]
        self.axes: dict[str, int | None] = dict.fromkeys(self.layout.tensors)

    @property
    def extra(self) -> list[str]:
        return list(self.model.extra)

    @property
    def order(self) -> Any:
        training, scoring = (
            (each.forward, each.backward, sorted(each.arrivals.items())) for each in (self.training, self.scoring)
        )
        return [(unit.name, unit.names) for unit in self.layers], training, scoring

    def initial(self, random: Random) -> Iterator[tuple[slice, np.ndarray]]:
        values = self.model.initial_values(random)
        for name, tensor in self.layout.tensors.items():
            yield tensor.slice, np.ascontiguousarray(values[name]).reshape(-1)

    def units(self) -> list[slice]:
        return self.cuts

    def forward_backward(self, weights: Weights, batch: Batch) -> float:
        return Pass(self.model, self.layers, weights, self.training).train(batch)

    def score(self, weights: Weights, batch: Batch) -> tuple[float, float]:
        return Pass(self.model, self.layers, weights, self.scoring).score(batch)


class UnitTrial:
    """The module on two rows, whole, which is the reference, and then in units, whose plans are kept. Rows and values
    are the same on all ranks. difference: the gradient in units less that of the whole module."""

    training: Plan
    scoring: Plan

    def __init__(self, model: Any):
        random, shape, place = np.random.default_rng(0), (ROWS, *model.features), place_of(model.device)
        x = random.random(shape).astype(model.dtype)  # from [0, 1): as whole numbers, they are 0
        y = np.zeros((ROWS,), np.int64) if model.classes else np.zeros((ROWS, *model.outputs), model.dtype)
        self.model, self.rows = model, np.arange(ROWS)
        self.batch = Batch(model.device.array(x), model.device.array(y), ROWS, epoch=0, step=0, index=self.rows)
        self.ran: set[str] = set()
        drawn = model.initial_values(Random(0))
        self.values = {name: torch.tensor(drawn[name], device=place) for name in model.layout.tensors}
        del drawn  # as large as the module
        parameters = trained(model.module)
        for name, each in parameters.items():
            each.data, each.grad = self.values[name], None
        with contextlib.ExitStack() as hooks, blamed_on(f"the module cannot train on {ROWS} rows of random numbers"):
            for name, child in children_of(model.module).items():
                hook = partial(self.note, name)
                hooks.callback(child.register_forward_pre_hook(hook).remove)
            with unchanged_state(model.module):
                model.turn(training=True)
                model.draws.at(0, 0, self.rows)
                loss = model.sum_of_losses(model.output(self.batch.x), as_tensor(self.batch.y))
                if loss.requires_grad:
                    loss.backward()
            with unchanged_state(model.module), torch.no_grad():
                model.turn(training=False)
                torch.manual_seed(0)
                scored = model.sum_of_losses(model.output(self.batch.x), as_tensor(self.batch.y))
        self.losses = loss.item(), scored.item()
        self.difference = {
            name: torch.zeros_like(each) if each.grad is None else each.grad.to_dense().contiguous().neg_()
            for name, each in parameters.items()
        }
        sizes = {name: float(each.abs().max()) if each.numel() else 0.0 for name, each in self.difference.items()}
        self.rounding = {name: 1e-3 * size + 1e-6 * max(sizes.values()) for name, size in sizes.items()}

    def note(self, name: str, *_: Any) -> None:
        self.ran.add(name)

    def agrees(self, units: list[Unit]) -> bool:
        """Run the units; return True if losses and gradient are those of the whole module, and no number is missing."""
        try:
            losses = self.run(units)
        except Exception:  # a parameter that is not there may be in the way of anything
            return False
        small = [bool((each.abs() <= self.rounding[name]).all()) for name, each in self.difference.items()]
        return np.allclose(losses, self.losses, rtol=1e-3) and all(small)

    def run(self, units: list[Unit]) -> tuple[float, float]:
        """Run the units, and record their plans; return the losses in training and scoring."""
        weights = TrialWeights(units, self.values, self.difference, self.model.device)
        training, scoring = (Pass(self.model, units, weights, None) for _ in range(2))
        with unchanged_state(self.model.module):
            loss = training.train(self.batch)
        with unchanged_state(self.model.module):
            torch.manual_seed(0)
            scored, _ = scoring.score(self.batch)
        self.training, self.scoring = training.plan_made(), scoring.plan_made()
        return loss, scored


class TrialWeights(Weights):
    """`Weights` by name, which adds to `gradient`. Values of a closed unit are NaN: a late reader is seen."""

    def __init__(self, units: list[Unit], values: dict[str, Tensor], gradient: dict[str, Tensor], device: Device):
        self.units, self.values, self.sums, self.device = units, values, gradient, device
        self.copies: dict[int, list[Tensor]] = {}  # of open units

    def open(self, i: int, following: int | None) -> tuple[Array, ...]:
        self.copies[i] = [self.values[name].clone() for name in self.units[i].names]
        return self.arrays(self.copies[i])

    def close(self, i: int) -> None:
        for each in self.copies.pop(i):
            each.fill_(torch.nan)

    def gradient(self, i: int) -> tuple[Array, ...]:
        return self.arrays([self.sums[name] for name in self.units[i].names])

    def arrays(self, tensors: list[Tensor]) -> tuple[Array, ...]:
        """Return the tensors as arrays of the same shapes, also of single numbers, which share their memory."""
        return tuple(as_array(each, self.device).reshape(tuple(each.shape)) for each in tensors)

    def ready(self, i: int) -> None:
        """No effect."""

    reduce = ready

    def finish(self) -> None:
        """No effect."""


@contextlib.contextmanager
def unchanged_parameters(module: nn.Module) -> Iterator[None]:
    """Context that gives the module its parameters' memory and its mode again at the end."""
    training, memory = module.training, [(each, each.data) for each in module.parameters()]
    try:
        yield
    finally:
        module.train(training)
        for parameter, each in memory:
            parameter.data, parameter.grad = each, None


@contextlib.contextmanager
def unchanged_state(module: nn.Module) -> Iterator[None]:
    """Context that restores buffers, also replaced ones, frozen parameters, and PyTorch's generator at its end."""
    owned = [(owner, *each) for owner in module.modules() for each in owner._buffers.items()]
    tensors = {id(each): each for *_, each in owned if each is not None}
    tensors |= {id(each): each for each in module.parameters() if not each.requires_grad}
    before = [(each, each.detach().clone()) for each in tensors.values()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for owner, name, each in owned:
                setattr(owner, name, each)
            with torch.no_grad():
                for each, values in before:
                    if not torch.equal(each, values):  # one that cannot be written to has not changed
                        each.copy_(values)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return by name the children that compute; of a child without a forward, such as a ModuleList, its children. An
    only child is a wrapped module: its children are returned, if it has some."""
    found: dict[nn.Module, str] = {}
    for name, child in module.named_children():
        computes = type(child).forward is not nn.Module.forward
        for at, key in {child: name}.items() if computes else children_named(child, name):
            found.setdefault(at, key)
    only = [children_named(child, name) for child, name in found.items()] if len(found) == 1 else []
    return {name: child for child, name in (only[0] if only and only[0] else found.items())}


def children_named(module: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """Return the children of module `name`, each with its name below the module's parent."""
    return [(child, f"{name}.{below}") for below, child in children_of(module).items()]


def units_of(module: nn.Module, ran: set[str]) -> list[Unit]:
    """Return the units: the children `ran` with the parameters that no other part of the module has, and the rest."""
    children = children_of(module)
    inside = {id(each) for child in children.values() for each in child.modules()}
    owners: defaultdict[int, set[str]] = defaultdict(set)
    for name, child in children.items():
        for each in child.parameters():
            owners[id(each)].add(name)
    for outside in module.modules():
        if id(outside) not in inside:
            for each in outside.parameters(recurse=False):
                owners[id(each)].add(REST)
    parameters: dict[str, dict[str, nn.Parameter]] = {name: {} for name in (*children, REST)}
    for key, each in trained(module).items():
        (owner,) = owners[id(each)] if len(owners[id(each)]) == 1 else (REST,)
        parameters[owner if owner in ran else REST][key] = each
    return [Unit(name, children.get(name), own) for name, own in parameters.items() if own]
