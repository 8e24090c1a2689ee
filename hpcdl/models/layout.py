"""Where each tensor of a model lies in one flat vector.

A replica's parameters are one flat vector, and so are its gradient and every optimizer state; models work on views:

    vector   | dense1.weight (784, 256) | dense1.bias (256,) | dense2.weight (256, 10) | dense2.bias (10,) |
    layer    |<------------------ dense1 ------------------->|<----------------- dense2 ------------------>|

Tensors follow each other without gaps, in the order of the layers and row-major, so a layer is a slice, an all-reduce
is one call, and a checkpoint is one data set.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from hpcdl.chunks import chunk


@dataclass(frozen=True)
class Tensor:
    """One tensor: its name, its shape, where it starts in the vector (in elements), and the layer it belongs to."""

    name: str
    shape: tuple[int, ...]
    offset: int
    layer: str

    @cached_property
    def slice(self) -> slice:
        """The tensor's elements in the vector."""
        return slice(self.offset, self.offset + math.prod(self.shape))

    def view(self, vector: np.ndarray) -> np.ndarray:
        """The tensor in a flat vector, as a view."""
        return vector[self.slice].reshape(self.shape)


class Layout:
    """The tensors of a model, in the order of its flat vector, and the vector's element type."""

    def __init__(self, tensors: Iterable[Tensor], dtype):
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.dtype = np.dtype(dtype)
        self.size = sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @classmethod
    def of_layers(cls, layers, dtype) -> "Layout":
        """Lay out the tensors of `layers` (each with a `name` and `shapes`, short tensor name -> shape) one by one."""
        tensors, offset = [], 0
        for layer in layers:
            for name, shape in layer.shapes.items():
                tensors.append(Tensor(f"{layer.name}.{name}", shape, offset, layer.name))
                offset += math.prod(shape)
        return cls(tensors, dtype)

    def view(self, vector: np.ndarray, name: str) -> np.ndarray:
        """The tensor `name` of a flat vector, as a view."""
        return self.tensors[name].view(vector)

    def views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Every tensor of a flat vector by name, as views."""
        return {name: tensor.view(vector) for name, tensor in self.tensors.items()}

    @cached_property
    def layer_slices(self) -> list[tuple[str, slice]]:
        """(layer name, slice of the vector) of every layer that has tensors, in order."""
        groups = groupby(self.tensors.values(), lambda tensor: tensor.layer)
        slices = [(layer, [tensor.slice for tensor in tensors]) for layer, tensors in groups]
        return [(layer, slice(own[0].start, own[-1].stop)) for layer, own in slices]

    def cut(self, name: str, axis: int, part: int, parts: int) -> Callable[[np.ndarray], np.ndarray]:
        """The function from a flat vector to the view of part `part` of `parts` of a tensor, cut along `axis`.

        Cut along axis 0 the view is contiguous, along another one it is strided (a row-parallel part of a weight).
        """
        tensor = self.tensors[name]
        index = (slice(None),) * axis + (chunk(tensor.shape[axis], parts, part),)
        return lambda vector: tensor.view(vector)[index]

    def describe(self) -> list[dict]:
        """What a checkpoint stores and compares: name, shape and dtype of each tensor, in order, for JSON."""
        return [{"name": t.name, "shape": list(t.shape), "dtype": self.dtype.name} for t in self.tensors.values()]
