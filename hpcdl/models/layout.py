"""Layout: the place of each tensor of a model in one flat vector.

Parameters, gradient and optimizer states of a replica are flat vectors; models work on views:

    vector   | dense1.weight (784, 256) | dense1.bias (256,) | dense2.weight (256, 10) | dense2.bias (10,) |
    layer    |<------------------ dense1 ------------------->|<----------------- dense2 ------------------>|

Tensors are contiguous, row-major and in the order of the layers: a layer is a slice, an all-reduce one call, and a
checkpoint one data set. A tensor of several layers (tied weights) lies with the first of them; the vector of a part
without this layer has a copy. `Hyperslab` maps the vector of a rank that shares a model to the full vector:

    whole   w (4, 6), by columns   . . # # . .   . . # # . .   . . # # . .   . . # # . .      stride 6, start 2
    part    w (4, 2)               # # # # # # # #                                            4 blocks of 2"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.chunks import chunk

INPUTS_FIRST, INPUTS_SECOND = "inputs first", "inputs second"
OUTPUTS_FIRST, OUTPUTS_LAST = "outputs first", "outputs last"


@dataclass(frozen=True)
class Tensor:
    """A tensor: name, shape, offset in the vector (elements), and the layer it belongs to.
    hidden: "", or the order of axes of a weight that maps to hidden units, which Muon updates as matrices:
    INPUTS_FIRST, (inputs, outputs), or (inputs, n, outputs) for n matrices; INPUTS_SECOND, the same behind a first axis
    of experts; OUTPUTS_FIRST, (outputs, inputs, ...), or OUTPUTS_LAST, (inputs, ..., outputs), for one."""

    name: str
    shape: tuple[int, ...]
    offset: int
    layer: str
    hidden: str = ""

    @cached_property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + math.prod(self.shape))

    def view(self, vector: np.ndarray) -> np.ndarray:
        return vector[self.slice].reshape(self.shape)

    def stacks(self, parts: int) -> "list[Tensor]":
        """Return the tensor as `parts` ranks share its experts evenly, one tensor for each; itself without experts."""
        if self.hidden != INPUTS_SECOND or parts == 1:
            return [self]
        shape, size = (self.shape[0] // parts, *self.shape[1:]), math.prod(self.shape) // parts
        return [replace(self, shape=shape, offset=self.offset + i * size) for i in range(parts)]

    def matrices(self, values: np.ndarray) -> list[np.ndarray]:
        """Return the matrices (outputs, inputs) of a hidden weight as views of `values`, the tensor's own, flat."""
        if self.hidden == OUTPUTS_FIRST:
            return [values.reshape(self.shape[0], -1)]
        if self.hidden == OUTPUTS_LAST:
            return [values.reshape(-1, self.shape[-1]).T]
        experts = self.shape[0] if self.hidden == INPUTS_SECOND else 1
        stacks = values.reshape(experts, self.matrix_shape[2], -1, self.shape[-1])
        return [stack[:, k].T for stack in stacks for k in range(stack.shape[1])]

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """The number of matrices of a hidden weight, and outputs and inputs of each."""
        if self.hidden == OUTPUTS_FIRST:
            return 1, self.shape[0], math.prod(self.shape[1:])
        if self.hidden == OUTPUTS_LAST:
            return 1, self.shape[-1], math.prod(self.shape[:-1])
        inputs = self.shape[1 if self.hidden == INPUTS_SECOND else 0]
        return math.prod(self.shape[:-1]) // inputs, self.shape[-1], inputs


class Hyperslab(NamedTuple):
    """The place of equal blocks of a local vector in another vector; all numbers count elements.
    Block b lies at `local` + b * `length` in the local vector, at `start` + b * `stride` in the other vector."""

    local: int
    start: int
    blocks: int
    length: int
    stride: int

    @property
    def size(self) -> int:
        """The number of elements of all blocks."""
        return self.blocks * self.length

    def within(self, part: slice) -> list["Hyperslab"]:
        """Return the elements in a slice of the local vector: at most three hyperslabs, relative to the slice."""
        start, stop = max(self.local, part.start) - self.local, min(self.local + self.size, part.stop) - self.local
        found = []
        while start < stop:
            block, past = divmod(start, self.length)
            blocks = (stop - start) // self.length if past == 0 else 0
            size = blocks * self.length or min(self.length - past, stop - start)
            where = self.local + start - part.start, self.start + block * self.stride + past
            found.append(Hyperslab(*where, max(1, blocks), size // max(1, blocks), self.stride))
            start += size
        return found


def piece(part: "Tensor", whole: "Tensor", axis: int | None, number: int, parts: int, first: int = 0) -> Hyperslab:
    """Return the place of tensor `part`, piece `number` of `parts` along `axis` (None: uncut), in `whole`'s vector.
    first: where the piece begins along axis 0, if it is cut along this axis, too."""
    start = whole.offset + first * math.prod(whole.shape[1:])
    if axis is None:
        size = math.prod(part.shape)
        return Hyperslab(part.offset, start, 1, size, size)
    cut, inner = chunk(whole.shape[axis], parts, number), math.prod(whole.shape[axis + 1 :])
    blocks, stride = math.prod(part.shape[:axis]), whole.shape[axis] * inner
    return Hyperslab(part.offset, start + cut.start * inner, blocks, (cut.stop - cut.start) * inner, stride)


class Layout:
    """The tensors of a model, in the order of its flat vector, and the vector's element type."""

    def __init__(self, tensors: Iterable[Tensor], dtype: DTypeLike):
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.dtype = np.dtype(dtype)
        self.size = sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @classmethod
    def of_layers(cls, layers: Iterable[Any], dtype: DTypeLike) -> "Layout":
        """Lay out the tensors of `layers` one by one.
        A layer has `name`, `shapes` (short tensor name -> shape), and `tied` (name of another layer's tensor -> shape).
        It may have `hidden_weights`: short names of weights that are matrices -> the order of their axes (`Tensor`).
        A tied tensor is laid out with its own layer, or else with the first of `layers` that uses it."""
        tensors, offset = {}, 0
        layers = list(layers)
        owned = {f"{layer.name}.{name}" for layer in layers for name in layer.shapes}
        for layer in layers:
            own = {f"{layer.name}.{name}": shape for name, shape in layer.shapes.items()}
            orders = getattr(layer, "hidden_weights", {})
            hidden = {f"{layer.name}.{name}": order for name, order in orders.items()}
            tied = layer.tied.items()
            copies = {name: shape for name, shape in tied if name not in tensors and name not in owned}
            for name, shape in (own | copies).items():
                tensors[name] = Tensor(name, shape, offset, layer.name, hidden.get(name, ""))
                offset += math.prod(shape)
        return cls(tensors.values(), dtype)

    def used_by(self, layer: Any) -> list[Tensor]:
        """Return the tensors that a layer uses: its own, then the tied ones."""
        return [self.tensors[name] for name in (*(f"{layer.name}.{name}" for name in layer.shapes), *layer.tied)]

    def view(self, vector: np.ndarray, name: str) -> np.ndarray:
        return self.tensors[name].view(vector)

    def views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        return {name: tensor.view(vector) for name, tensor in self.tensors.items()}

    @cached_property
    def hidden(self) -> list[Tensor]:
        """The weights that map to hidden units, in order."""
        return [tensor for tensor in self.tensors.values() if tensor.hidden]

    @cached_property
    def layer_slices(self) -> list[tuple[str, slice]]:
        """The (layer name, slice of the vector) of every layer with tensors, in order."""
        groups = groupby(self.tensors.values(), lambda tensor: tensor.layer)
        slices = [(layer, [tensor.slice for tensor in tensors]) for layer, tensors in groups]
        return [(layer, slice(own[0].start, own[-1].stop)) for layer, own in slices]

    def describe(self) -> list[dict]:
        """Return name, shape and dtype of each tensor, in order, for JSON; a checkpoint stores and compares them."""
        return [{"name": t.name, "shape": list(t.shape), "dtype": self.dtype.name} for t in self.tensors.values()]
