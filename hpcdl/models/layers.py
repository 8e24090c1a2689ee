"""Layers: each computes its output and, from the gradient by its output, the gradients by its weights and its input.

    y, saved = layer.forward(w, x, group)               saved: data for backward, from the pool
    dx = layer.backward(w, saved, dy, g, group)         adds to g; consumes saved
    layer.release(saved)                                instead of backward, if only y is needed

w and g are tuples of views of tensors in the parameters and the gradient: those of `layer.shapes`, then of
`layer.tied`. x, y, dx, dy are (rows, width). A layer has no state between calls, so several micro-batches can be in
flight. y belongs to the layer until backward or release; dx, from the pool, and dy belong to the caller.

Ranks may share a layer (tensor parallelism): `layer.cut(part, parts)` is the layer with part `part` of the tensors in
`cuts`, each cut along that axis; every rank has all of the others. group (group.py) sums over the ranks.

The last layer of a model is its loss (losses.py); transformer.py has the layers of a GPT.

    Dense      y = activation(x W + b)      dz = dy * activation'       dW += x^T dz      db += sum dz      dx = dz W^T
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.csr import CSR
from hpcdl.errors import UsageError
from hpcdl.kernels import activation as kernels
from hpcdl.kernels import sparse
from hpcdl.kernels.device import Array
from hpcdl.models.group import LayerGroup
from hpcdl.models.pool import Pool


class Identity:
    """y = z + b."""

    gain = 1.0

    @staticmethod
    def forward(z: Array, b: Array, pool: Pool) -> tuple[Array, Array]:
        """Return y, in z's place, and the data for backward: y itself."""
        kernels.add_bias(z, b)
        return z, z

    @staticmethod
    def backward(y: Array, b: Array, dy: Array, gb: Array) -> Array:
        """Return dz; add the bias gradient to gb."""
        kernels.add_rows(dy, gb)
        return dy


class Relu:
    """y = max(z + b, 0)."""

    gain = 2.0  # half of the units are at zero: He et al., "Delving deep into rectifiers", 2015

    @staticmethod
    def forward(z: Array, b: Array, pool: Pool) -> tuple[Array, Array]:
        """Return y, in z's place, twice."""
        kernels.add_bias_relu(z, b)
        return z, z

    @staticmethod
    def backward(y: Array, b: Array, dy: Array, gb: Array) -> Array:
        """Return dz, in y's place; add the bias gradient to gb."""
        kernels.relu_backward(y, dy, gb)
        return y


class Tanh:
    """y = tanh(z + b)."""

    gain = 1.0

    @staticmethod
    def forward(z: Array, b: Array, pool: Pool) -> tuple[Array, Array]:
        """Return y, in z's place, twice."""
        kernels.add_bias_tanh(z, b)
        return z, z

    @staticmethod
    def backward(y: Array, b: Array, dy: Array, gb: Array) -> Array:
        """Return dz, in y's place; add the bias gradient to gb."""
        kernels.tanh_backward(y, dy, gb)
        return y


class Gelu:
    """y = gelu(z + b), in the tanh form of Hendrycks and Gimpel, "Gaussian error linear units", 2016."""

    gain = 2.0  # about half of the input passes, as with relu

    @staticmethod
    def forward(z: Array, b: Array, pool: Pool) -> tuple[Array, Array]:
        """Return y, a new array, and z for backward: the slope cannot be computed from y."""
        y = pool.take(*z.shape)
        kernels.add_bias_gelu(z, b, y)
        return y, z

    @staticmethod
    def backward(z: Array, b: Array, dy: Array, gb: Array) -> Array:
        """Return dz, in z's place; add the bias gradient to gb."""
        kernels.gelu_backward(z, b, dy, gb)
        return z


ACTIVATIONS: dict[str, Any] = {"none": Identity, "relu": Relu, "tanh": Tanh, "gelu": Gelu}


class Layer:
    """Base of layers. full_shapes: shape of each of its tensors by short name; shapes: those of this part.

    cuts: tensor name -> axis along which it is cut if ranks share the layer. tied: layout name -> shape of tensors of
    other layers that this one also uses. divided: True if a part computes a part of the outputs.
    """

    cuts: Mapping[str, int] = {}
    tied: Mapping[str, tuple[int, ...]] = {}
    part, parts = 0, 1
    divided = False
    takes_batch = False  # True if forward takes the batch and a flag `backward follows`, too
    extra: Sequence[str] = ()  # names of the model's buffers that the layer uses

    def __init__(self, name: str, pool: Pool, full_shapes: dict[str, tuple[int, ...]]):
        self.name, self.pool, self.full_shapes, self.shapes = name, pool, full_shapes, dict(full_shapes)
        self.matmul = pool.device.xp.matmul

    def state(self) -> list[Array]:
        """Return the buffers, which forward may change."""
        return []

    def unbind(self) -> None:
        """Release the tensors of the last forward or backward, for a layer that refers to them."""

    def cut(self, part: int, parts: int) -> Self:
        """Return this layer with part `part` of `parts` of its tensors. Raises UsageError if it cannot be cut."""
        self.check_cut(parts)
        other = copy.copy(self)
        other.part, other.parts = part, parts
        other.shapes = {name: self.part_shape(name, part, parts) for name in self.full_shapes}
        return other

    def check_cut(self, parts: int) -> None:
        """Raise UsageError if the layer cannot be cut into so many parts."""

    def part_shape(self, name: str, part: int, parts: int) -> tuple[int, ...]:
        """Return the shape of a part of a tensor."""
        shape, axis = list(self.full_shapes[name]), self.cuts.get(name)
        if axis is not None:
            cut = chunk(shape[axis], parts, part)
            shape[axis] = cut.stop - cut.start
        return tuple(shape)

    def add_product(self, a: Array, b: Array, into: Array) -> None:
        """into += a b, for the gradient of a weight."""
        product = self.pool.take(a.shape[0], b.shape[1])
        self.matmul(a, b, out=product)
        into += product.reshape(into.shape)
        self.pool.give(product)


def check_width(name: str, width: int, parts: int) -> None:
    """Raise UsageError unless so many ranks can share `width` units evenly."""
    if width % parts:
        raise UsageError(f"{name} {width} cannot be divided evenly among {parts} ranks; choose a multiple of {parts}")


class Dense(Layer):
    """A fully connected layer, y = activation(x W + b), with W (inputs, outputs) and b (outputs,).

    The `first` layer of a model computes no gradient by its input: its dx is None, and x may be sparse (CSR). by: the
    cut of W if ranks share the layer; "columns": a part of the outputs, "rows": a part of the inputs.
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        activation: str,
        pool: Pool,
        first: bool = False,
        by: str = "columns",
    ):
        super().__init__(name, pool, {"weight": (inputs, outputs), "bias": (outputs,)})
        self.first, self.activation, self.divided = first, ACTIVATIONS[activation], by == "columns"
        self.cuts = {"weight": 1, "bias": 0} if self.divided else {"weight": 0}

    def check_cut(self, parts: int) -> None:
        """Raise UsageError unless the units of the hidden layer can be divided among the parts."""
        if not self.divided:
            check_width("a hidden layer's width", self.full_shapes["weight"][0], parts)

    def output_shape(self, rows: int, group: LayerGroup) -> tuple[int, int]:
        """Return the shape of y for so many examples."""
        return rows, self.shapes["weight"][1]

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        """Draw W with variance gain / inputs (gain 2 before a relu, else 1); set b to zero."""
        weight, bias = w
        deviation = math.sqrt(self.activation.gain / weight.shape[0])
        weight[...] = deviation * generators[0].standard_normal(weight.shape)
        bias[...] = 0

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        """Return y and the data for backward."""
        weight, bias = w
        y = self.pool.take(x.shape[0], weight.shape[1])
        if isinstance(x, CSR):
            sparse.sparse_dot(x.data, x.indices, x.indptr, weight, y)
        else:
            self.matmul(x, weight, out=y)
        if not self.divided:
            y = group.g(y, self.pool)
        y, activation_saved = self.activation.forward(y, bias, self.pool)
        return y, (x, y, activation_saved)

    def backward(
        self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup
    ) -> Array | None:
        """Return dx; add the gradients of W and b to g."""
        (weight, bias), (x, _, activation_saved), (weight_gradient, bias_gradient) = w, saved, g
        dz = self.activation.backward(activation_saved, bias, dy, bias_gradient)
        if isinstance(x, CSR):
            sparse.scatter_add(x.data, x.indices, x.indptr, dz, weight_gradient)
        else:
            self.add_product(x.T, dz, weight_gradient)
        dx = None
        if not self.first:
            dx = self.matmul(dz, weight.T, out=self.pool.take(*x.shape))
            if self.divided:
                dx = group.f_backward(dx, self.pool)
        self.release(saved)
        return dx

    def release(self, saved: Any) -> None:
        """Release the buffers of forward."""
        _, y, activation_saved = saved
        self.pool.give(y)
        if activation_saved is not y:
            self.pool.give(activation_saved)


def dense_layers(widths: Sequence[int], activation: str, pool: Pool) -> list[Dense]:
    """Return dense layers from widths[0] inputs to widths[-1] outputs, with the activation between them.

    If ranks share them, they are cut by columns and rows in turn: one sum for each two layers.
    """
    last = len(widths) - 1
    return [
        Dense(
            f"dense{i}",
            widths[i - 1],
            widths[i],
            activation if i < last else "none",
            pool,
            first=i == 1,
            by="columns" if i % 2 else "rows",
        )
        for i in range(1, last + 1)
    ]
