"""Stages of a module as layers (hpcdl/models/layers.py), with their tensors wherever they lie.

Each forward of a layer has an autograd graph of its own, from x, which is a leaf of it, to y. A graph keeps the weights
that its backward needs; but between forward and backward they may move (of PipeDream's stage) or be gone (of a layer
that is gathered when its turn comes). So the graph keeps, in place of a weight, which one it was, and is given the one
that backward has:

    forward      x -> y            kept: y and its graph, with "tensor 0, transposed" for the weight
    backward     dy -> dx          the graph asks for tensor 0, transposed, and gets it from backward's w
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.data import Batch
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.models.group import LayerGroup
from hpcdl.models.layers import Layer
from hpcdl.models.losses import Loss
from hpcdl.models.pool import Pool
from hpcdl.torch.buffers import statistics_of
from hpcdl.torch.tensors import TYPES, as_array, as_tensor


class TensorPool(Pool):
    """A pool that also lends what PyTorch has allocated, which goes back to PyTorch when it is given back."""

    def lend(self, tensor: Tensor) -> Array:
        """The tensor as an array, which counts as lent."""
        array = as_array(tensor, self.device)
        self.count(array.nbytes)
        return array

    def give(self, buffer: Array) -> None:
        """Take back what `take` or `lend` lent."""
        if id(buffer.base) in self.whole:
            super().give(buffer)
        else:
            self.count(-buffer.nbytes)

    def count(self, number: int) -> None:
        """So many bytes of activations more, or, where negative, less."""
        if self.memory is not None:
            self.memory.add("activations", number)


class Weight(NamedTuple):
    """What a graph keeps in place of a view of a weight."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedGraph:
    """What a layer keeps between forward and backward: the ends of its graph. It is empty once it was used."""

    def __init__(self, x: Tensor | None = None, y: Tensor | None = None, weights: Sequence[Tensor] = ()):
        self.x, self.y, self.weights, self.bytes = x, y, weights, 0
        self.places = {each.untyped_storage().data_ptr(): i for i, each in enumerate(weights) if each.numel()}
        self.counted = set(self.places) if x is None else {*self.places, x.untyped_storage().data_ptr()}

    def pack(self, tensor: Tensor) -> Any:
        """What the graph keeps of a tensor: a weight's number, or else itself."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        number = self.places.get(address)
        if number is not None:
            offset = tensor.storage_offset() - self.weights[number].storage_offset()
            return Weight(number, tensor.size(), tensor.stride(), offset)
        self.count(address, storage.nbytes())
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        """What backward is given for it."""
        if not isinstance(packed, Weight):
            return packed  # type: ignore[no-any-return]
        weight = self.weights[packed.number]
        return weight.as_strided(packed.size, packed.stride, weight.storage_offset() + packed.offset)

    def count(self, address: int, size: int) -> None:
        """So many bytes there are kept."""
        if address not in self.counted:
            self.counted.add(address)
            self.bytes += size

    def clear(self) -> None:
        """Let all of it go."""
        self.x = self.y = None
        self.weights, self.bytes = (), 0


class ModuleLayer(Layer):
    """Stages of a module that follow each other, `modules`, the trained tensors among them as w.

    model: the TorchModel. own: the tensors that it is the first to use, by their short names; others: tied ones, by
    their names in the layout. first: of all layers, whose x is a batch's and which makes no dx. extra: the names of
    what it holds beside them (TorchModel.extra).
    """

    pool: TensorPool
    told = True

    def __init__(
        self,
        model: Any,
        name: str,
        modules: list[nn.Module],
        own: dict[str, nn.Parameter],
        others: dict[str, nn.Parameter],
        extra: list[str],
        first: bool,
    ):
        super().__init__(name, model.pool, {short: tuple(each.shape) for short, each in own.items()})
        self.tied = {each: tuple(parameter.shape) for each, parameter in others.items()}
        self.model, self.modules, self.first, self.extra = model, modules, first, extra
        self.parameters = [*own.values(), *others.values()]
        self.kind = TYPES[model.dtype]
        self.drawn: dict[str, int] = {}  # how often layers before this one have had these draw, less one
        self.copies = False  # whether it changes its input in place, and is therefore given a copy
        self.taken: tuple[int, ...] = ()  # the shape of what it takes of one example, its rows first,
        self.per: tuple[int, ...] = ()  # and of what it makes
        self.w: Any = None  # what the parameters are views of now
        self.weights: list[Tensor] = []
        self.addresses: list[int] = []

    def check_cut(self, parts: int) -> None:
        """Nobody cuts within what another has written."""
        if parts > 1:
            raise UsageError(
                "tensor parallelism is hpcdl's own models' alone: a module of PyTorch's is cut between its stages, by "
                "train-pipeline, train-fully-sharded, or train-grid on data and pipeline"
            )

    def output_shape(self, rows: int, group: LayerGroup) -> tuple[int, ...]:
        """The shape of y for so many examples."""
        return rows * self.per[0], *self.per[1:]

    def state(self) -> list[Array]:
        """What a forward in training may change: the buffers."""
        buffers = {id(each): each for module in self.modules for each in module.buffers()}
        return [as_array(each, self.model.device) for each in buffers.values() if each.numel()]

    # -- forward and backward ------------------------------------------------------------------------------------------

    def forward(
        self, w: Sequence[Array], x: Array, group: LayerGroup, batch: Batch | None = None, keep: bool = True
    ) -> tuple[Array, SavedGraph]:
        """y and what backward needs, which is nothing without keep; then the module is as it evaluates."""
        if not len(x):
            return self.pool.device.empty((0, *self.per[1:]), self.pool.dtype), SavedGraph()
        self.bind(w)
        leaf = as_tensor(x)
        if self.first:
            leaf = leaf.view(-1, *self.model.features)
        device = self.model.device
        self.model.turn(keep)
        if not keep:
            with torch.no_grad():
                y = self.through(leaf)
            return as_array(y, device), SavedGraph()
        if batch is not None:
            self.model.draws.at(batch.epoch, batch.step, batch.index, self.name)
            self.model.draws.calls.update(self.drawn)
        kept = SavedGraph(leaf.requires_grad_(not self.first), None, self.weights)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            kept.y = self.through(leaf)
        self.check()
        kept.weights = ()  # they may be gone before backward has them again
        storage = kept.y.untyped_storage()
        kept.count(storage.data_ptr(), storage.nbytes())
        self.pool.count(kept.bytes)
        return as_array(kept.y, device), kept

    def through(self, x: Tensor) -> Tensor:
        """What the stages make of x: as it goes on, whole and in the type of the parameters."""
        if self.copies:
            x = x.clone()
        with self.model.autocasting(), statistics_of(self.modules, len(x)):
            for module in self.modules:
                x = module(x)
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 1:
            what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise UsageError(f"stage {self.name} makes {what}, and should hand on one tensor of rows of numbers")
        return x.to(self.kind).contiguous()

    def check(self) -> None:
        """Raise UsageError where a parameter is no longer where it was put: the module has replaced it."""
        for name, parameter, at in zip((*self.whole, *self.tied), self.parameters, self.addresses, strict=True):
            if parameter.data_ptr() != at:
                raise UsageError(f"stage {self.name} replaces its parameter {name} while it computes")

    def backward(
        self, w: Sequence[Array], saved: SavedGraph, dy: Array, g: Sequence[Array], group: LayerGroup
    ) -> Array | None:
        """dx; the gradients by the tensors are added to g by PyTorch."""
        x, y = saved.x, saved.y
        if x is None or y is None:  # no rows: dy has the shape of y, and dx that of x
            return None if self.first else self.pool.take(0, *self.taken[1:])
        self.bind(w)
        self.model.bound.forget()
        saved.weights = self.weights
        for parameter, each in zip(self.parameters, g, strict=True):
            parameter.grad = as_tensor(each)
        try:
            given = as_tensor(dy)
            if y.requires_grad:
                y.backward(given)  # type: ignore[no-untyped-call]
            found = x.grad
        finally:
            for parameter in self.parameters:
                parameter.grad = None
        self.release(saved)
        if self.first:
            return None
        if found is None:  # what it makes does not depend on x
            found = torch.zeros_like(x, requires_grad=False)
        found = found.contiguous()
        if found.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            found = found.clone()  # a view of dy, as of a stage that only reshapes; that is the caller's
        return self.pool.lend(found)

    def release(self, saved: SavedGraph) -> None:
        """Let go of the graph."""
        self.pool.count(-saved.bytes)
        if saved.x is None and saved.y is None:
            return
        saved.clear()

    # -- where the tensors are -----------------------------------------------------------------------------------------

    def bind(self, w: Sequence[Array]) -> None:
        """Let the module's parameters be views of w."""
        if self.w is w and all(p.data_ptr() == at for p, at in zip(self.parameters, self.addresses, strict=True)):
            return
        self.weights = [as_tensor(each) for each in w]
        self.addresses = [each.data_ptr() for each in self.weights]
        for parameter, each in zip(self.parameters, self.weights, strict=True):
            parameter.data = each
        self.w = w
        self.model.bound.forget()

    def unbind(self) -> None:
        """Nothing here refers to w any more, whose memory its owner wants back."""
        self.w, self.weights, self.addresses = None, [], []
        for parameter in self.parameters:
            parameter.data = nothing(parameter)


class ModuleLoss(Loss):
    """The loss of a TorchModel, as the layer at the end of its module."""

    pool: TensorPool
    told = True

    def __init__(self, model: Any, name: str):
        super().__init__(model.pool)
        self.model, self.name, self.outputs = model, name, model.outputs
        self.target = np.dtype(np.int64) if model.classes else model.dtype

    def forward(  # type: ignore[override]
        self, w: Sequence[Array], z: Array, group: LayerGroup, y: Array, batch: Any = None, keep: bool = True
    ) -> tuple[tuple[float, float], SavedGraph]:
        """(sum of losses, score) and what backward needs; the score without keep alone, where somebody asks for it."""
        if not len(y):
            return (0.0, 0.0), SavedGraph(self.rowless(z))
        output, target = as_tensor(z), as_tensor(y)
        if not keep:
            with torch.no_grad():
                loss = self.model.sum_of_losses(output, target).item()
                return (loss, self.model.score(output, target)), SavedGraph()
        kept = SavedGraph(output.requires_grad_())
        kept.y = self.model.sum_of_losses(output, target)
        return (kept.y.item(), 0.0), kept

    def rowless(self, z: Array) -> Tensor:
        """z without rows, which has no loss."""
        return as_tensor(self.pool.device.zeros(z.shape, z.dtype))

    def backward(  # type: ignore[override]
        self, w: Sequence[Array], saved: SavedGraph, dy: Array | None, g: Sequence[Array], group: LayerGroup
    ) -> Array:
        """dz."""
        z = saved.x
        assert z is not None
        if saved.y is not None and saved.y.requires_grad:
            saved.y.backward()  # type: ignore[no-untyped-call]
        dz = torch.zeros_like(z, requires_grad=False) if z.grad is None else z.grad
        saved.clear()
        return self.pool.lend(dz.contiguous())

    def release(self, saved: SavedGraph) -> None:  # type: ignore[override]
        """Let go of the graph."""
        saved.clear()

    def predict(self, z: Array) -> Array:
        """Class probabilities, or values."""
        return as_array(self.model.prediction(as_tensor(z)), self.model.device)


def nothing(parameter: nn.Parameter) -> Tensor:
    """Of the shape of a parameter, and without memory."""
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
