"""Stages of a module as layers (hpcdl/models/layers.py), with their tensors anywhere in memory.

Each forward of a layer has its own autograd graph, from the leaf x to y. A graph saves the weights that its backward
needs, but between forward and backward the weights may move (a PipeDream stage) or be freed (a gathered layer). So a
graph saves a description of each weight, such as "tensor 0, transposed", and backward supplies the tensor."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.data import Batch
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.models.group import ContextGroup, LayerGroup
from hpcdl.models.layers import Layer
from hpcdl.models.losses import Loss
from hpcdl.models.pool import Pool
from hpcdl.torch.buffers import statistics_of
from hpcdl.torch.sequence import shared_by
from hpcdl.torch.tensors import TYPES, as_array, as_tensor

Named = dict[str, nn.Parameter]


class TensorPool(Pool):
    """A pool that also lends tensors allocated by PyTorch, which frees them when they are given back."""

    def lend(self, tensor: Tensor) -> Array:
        """Return the tensor as an array, which counts as lent."""
        array = as_array(tensor, self.device)
        self.count(array.nbytes)
        return array

    def give(self, buffer: Array) -> None:
        if id(buffer.base) in self.bases:
            super().give(buffer)
        else:
            self.count(-buffer.nbytes)

    def count(self, number: int) -> None:
        if self.memory is not None:
            self.memory.add("activations", number)


class Weight(NamedTuple):
    """Description of a view of weight `number`, which a graph saves instead of the view."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedGraph:
    """Data of a layer between forward and backward: input and output of its graph. Empty after use."""

    def __init__(self, x: Tensor | None = None, y: Tensor | None = None, weights: Sequence[Tensor] = ()):
        self.x, self.y, self.weights, self.bytes = x, y, weights, 0
        self.places = {each.untyped_storage().data_ptr(): i for i, each in enumerate(weights) if each.numel()}
        self.counted = set(self.places) if x is None else {*self.places, x.untyped_storage().data_ptr()}

    def pack(self, tensor: Tensor) -> Any:
        """Return what the graph saves for a tensor: a Weight, or the tensor itself."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        number = self.places.get(address)
        if number is not None:
            offset = tensor.storage_offset() - self.weights[number].storage_offset()
            return Weight(number, tensor.size(), tensor.stride(), offset)
        self.count(address, storage.nbytes())
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Weight):
            return packed  # type: ignore[no-any-return]
        weight = self.weights[packed.number]
        return weight.as_strided(packed.size, packed.stride, weight.storage_offset() + packed.offset)

    def count(self, address: int, size: int) -> None:
        """Count the bytes of a saved storage, once per address."""
        if address not in self.counted:
            self.counted.add(address)
            self.bytes += size

    def clear(self) -> None:
        self.x = self.y = None
        self.weights, self.bytes = (), 0


class ModuleLayer(Layer):
    """Consecutive stages `modules` of a module; their trained tensors are w. model: the TorchModel.
    own: tensors that this layer is the first to use, by short name. others: tied tensors, by name in the layout. first:
    True for the first layer, whose x is a batch and which returns no dx. extra: names of buffers, frozen parameters."""

    pool: TensorPool
    takes_batch = True

    def __init__(
        self, model: Any, name: str, modules: list[nn.Module], own: Named, others: Named, extra: list[str], first: bool
    ):
        super().__init__(name, model.pool, {short: tuple(each.shape) for short, each in own.items()})
        self.tied = {each: tuple(parameter.shape) for each, parameter in others.items()}
        self.model, self.modules, self.first, self.extra = model, modules, first, extra
        self.parameters = [*own.values(), *others.values()]
        self.kind = TYPES[model.dtype]
        self.features, self.context = model.features, ContextGroup()
        self.drawn: dict[str, int] = {}  # by dropout layer: calls by earlier layers, less one
        self.copies = False  # True if it changes its input in place, and therefore gets a copy
        self.example_input: tuple[int, ...] = ()  # input shape for one example, rows first
        self.example_output: tuple[int, ...] = ()  # output shape for one example
        self.w: Any = None  # the arrays that the parameters are views of
        self.weights: list[Tensor] = []
        self.addresses: list[int] = []

    def check_cut(self, parts: int) -> None:
        if parts > 1:
            other = "take train-pipeline, train-fully-sharded, or train-grid with the axes data and pipeline"
            raise UsageError(f"tensor parallelism is for hpcdl's own models, not for a module of PyTorch: {other}")

    def within(self, context: ContextGroup) -> Self:
        """Return a copy of this layer for this rank's tokens of each sequence."""
        other, axis = copy.copy(self), self.model.sequence_axis
        other.context, other.features = context, cut_along((1, *self.features), axis, context.size)[1:]
        if self.example_output[axis : axis + 1] == (self.features[axis - 1],):
            other.example_output = cut_along(self.example_output, axis, context.size)
        return other

    def output_shape(self, rows: int, group: LayerGroup) -> tuple[int, ...]:
        return rows * self.example_output[0], *self.example_output[1:]

    def state(self) -> list[Array]:
        buffers = {id(each): each for module in self.modules for each in module.buffers()}
        return [as_array(each, self.model.device) for each in buffers.values() if each.numel()]

    def forward(
        self, w: Sequence[Array], x: Array, group: LayerGroup, batch: Batch | None = None, keep: bool = True
    ) -> tuple[Array, SavedGraph]:
        if not len(x):
            return self.pool.device.empty((0, *self.example_output[1:]), self.pool.dtype), SavedGraph()
        self.bind(w)
        leaf = as_tensor(x)
        if self.first:
            leaf = leaf.view(-1, *self.features)
        device = self.model.device
        self.model.turn(keep)
        if not keep:
            with torch.no_grad():
                y = self.through(leaf)
            return as_array(y, device), SavedGraph()
        if batch is not None:
            self.model.draws.at(batch.epoch, batch.step, batch.index, self.name)
            self.model.draws.calls.update(self.drawn)
        graph = SavedGraph(leaf.requires_grad_(not self.first), None, self.weights)
        with torch.autograd.graph.saved_tensors_hooks(graph.pack, graph.unpack):
            graph.y = self.through(leaf)
        self.check()
        graph.weights = ()  # they may be freed before backward supplies them again
        storage = graph.y.untyped_storage()
        graph.count(storage.data_ptr(), storage.nbytes())
        self.pool.count(graph.bytes)
        return as_array(graph.y, device), graph

    def through(self, x: Tensor) -> Tensor:
        """Return the stages' output for x, contiguous, in the parameters' type. UsageError if it is no float tensor."""
        if self.copies:
            x = x.clone()
        with self.model.autocasting(), statistics_of(self.modules, len(x)), shared_by(self.context):
            for module in self.modules:
                x = module(x)
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 1:
            what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise UsageError(f"stage {self.name} returns {what}, and should return one floating-point tensor with rows")
        return x.to(self.kind).contiguous()

    def check(self) -> None:
        """Raise UsageError if the module has replaced one of its parameters."""
        for name, parameter, at in zip((*self.full_shapes, *self.tied), self.parameters, self.addresses, strict=True):
            if parameter.data_ptr() != at:
                raise UsageError(f"stage {self.name} replaces its parameter {name} while it computes")

    def backward(
        self, w: Sequence[Array], saved: SavedGraph, dy: Array, g: Sequence[Array], group: LayerGroup
    ) -> Array | None:
        x, y = saved.x, saved.y
        if x is None or y is None:  # no rows: dy has the shape of y, and dx that of x
            return None if self.first else self.pool.take(0, *self.example_input[1:])
        self.bind(w)
        self.model.bound.forget()
        saved.weights = self.weights
        for parameter, each in zip(self.parameters, g, strict=True):
            parameter.grad = as_tensor(each)
        try:
            grad_output = as_tensor(dy)
            if y.requires_grad:
                y.backward(grad_output)  # type: ignore[no-untyped-call]
            dx = x.grad
        finally:
            for parameter in self.parameters:
                parameter.grad = None
        self.release(saved)
        if self.first:
            return None
        if dx is None:  # y does not depend on x
            dx = torch.zeros_like(x, requires_grad=False)
        dx = dx.contiguous()
        if dx.untyped_storage().data_ptr() == grad_output.untyped_storage().data_ptr():
            dx = dx.clone()  # dx is a view of the caller's dy, as for a stage that only reshapes
        return self.pool.lend(dx)

    def release(self, saved: SavedGraph) -> None:
        self.pool.count(-saved.bytes)
        saved.clear()

    def bind(self, w: Sequence[Array]) -> None:
        """Make the module's parameters views of w."""
        if self.w is w and all(p.data_ptr() == at for p, at in zip(self.parameters, self.addresses, strict=True)):
            return
        self.weights = [as_tensor(each) for each in w]
        self.addresses = [each.data_ptr() for each in self.weights]
        for parameter, each in zip(self.parameters, self.weights, strict=True):
            parameter.data = each
        self.w = w
        self.model.bound.forget()

    def unbind(self) -> None:
        self.w, self.weights, self.addresses = None, [], []
        for parameter in self.parameters:
            parameter.data = without_memory(parameter)


class ModuleLoss(Loss):
    """The loss of a TorchModel, as the last layer of its module."""

    pool: TensorPool

    def __init__(self, model: Any, name: str):
        super().__init__(model.pool)
        self.model, self.name, self.outputs = model, name, model.outputs
        self.target = np.dtype(np.int64) if model.classes else model.dtype
        self.counts = True  # False on ranks that share the rows of another one, whose output is taken

    def within(self, context: ContextGroup) -> Self:
        other = copy.copy(self)
        other.counts = context.rank == 0
        return other

    def forward(
        self, w: Sequence[Array], z: Array, group: LayerGroup, y: Array, batch: Any = None, keep: bool = True
    ) -> tuple[tuple[float, float], SavedGraph]:
        """Return ((sum of losses, score), saved graph); the score is 0 unless keep is False."""
        if not len(y) or not self.counts:
            return (0.0, 0.0), SavedGraph(as_tensor(self.pool.device.zeros(z.shape, z.dtype)))
        output, target = as_tensor(z), as_tensor(y)
        if not keep:
            with torch.no_grad():
                loss = self.model.sum_of_losses(output, target).item()
                if self.watch is not None:
                    self.watch(self.pool.device.host(y), self.pool.device.host(self.predict(z)))
                return (loss, self.model.score(output, target)), SavedGraph()
        graph = SavedGraph(output.requires_grad_())
        graph.y = self.model.sum_of_losses(output, target, self.model.training_loss)
        return (graph.y.item(), 0.0), graph

    def backward(  # type: ignore[override]
        self, w: Sequence[Array], saved: SavedGraph, dy: Array | None, g: Sequence[Array], group: LayerGroup
    ) -> Array:
        z = saved.x
        assert z is not None
        if saved.y is not None and saved.y.requires_grad:
            saved.y.backward()  # type: ignore[no-untyped-call]
        dz = torch.zeros_like(z, requires_grad=False) if z.grad is None else z.grad
        saved.clear()
        return self.pool.lend(dz.contiguous())

    def release(self, saved: SavedGraph) -> None:  # type: ignore[override]
        saved.clear()

    def predict(self, z: Array) -> Array:
        return as_array(self.model.prediction(as_tensor(z)), self.model.device)


def without_memory(parameter: nn.Parameter) -> Tensor:
    """Return a tensor of a parameter's shape that takes no memory; NaN, so that no one uses it unseen."""
    return torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def cut_along(shape: tuple[int, ...], axis: int, parts: int) -> tuple[int, ...]:
    """Return the shape of one of `parts` equal parts along this axis."""
    return *shape[:axis], shape[axis] // parts, *shape[axis + 1 :]
