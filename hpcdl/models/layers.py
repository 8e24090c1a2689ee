"""Layers: each computes its output and, from the gradient by its output, the gradients by its weights and its input.

    y, saved = layer.forward(w, x, group)               saved: data for backward, from the pool
    dx = layer.backward(w, saved, dy, g, group)         adds to g, products by `add_product`; consumes saved
    layer.release(saved)                                instead of backward, if only y is needed
    Dense: y = activation(x W + b)      dz = dy * activation'       dW += x^T dz      db += sum dz      dx = dz W^T

w and g are tuples of views of tensors in the parameters and the gradient: those of `layer.shapes`, then of
`layer.tied`. x, y, dx, dy are (rows, width). A layer has no state between calls, so several micro-batches can be in
flight. y belongs to the layer until backward or release; dx, from the pool, and dy belong to the caller.

Ranks may share a layer (tensor parallelism): `layer.cut(part, parts)` has part number `part` of each tensor in `cuts`,
which maps a tensor to the axis of its cut; every rank has all other tensors. group (group.py) sums over the ranks."""

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
from hpcdl.models.layout import INPUTS_FIRST
from hpcdl.models.pool import Pool


class Activation:
    """An activation y = s(z + b), written over z. backward needs only y, writes dz over y. gain: of W's variance."""

    gain = 1.0  # of the initial W's variance
    add_bias: Any  # the two kernels
    slope: Any

    @classmethod
    def forward(cls, z: Array, b: Array, pool: Pool) -> tuple[Array, Array]:
        """Return y, and the array that backward needs."""
        cls.add_bias(z, b)
        return z, z

    @classmethod
    def backward(cls, y: Array, b: Array, dy: Array, gb: Array) -> Array:
        """Return dz; add the bias gradient to gb."""
        cls.slope(y, dy, gb)
        return y


class Identity(Activation):
    """y = z + b."""

    add_bias, slope = kernels.add_bias, kernels.add_rows

    @classmethod
    def backward(cls, y: Array, b: Array, dy: Array, gb: Array) -> Array:
        cls.slope(dy, gb)
        return dy


class Relu(Activation):
    """y = max(z + b, 0)."""

    gain = 2.0  # half of the units are at zero: He et al., "Delving deep into rectifiers", 2015
    add_bias, slope = kernels.add_bias_relu, kernels.relu_backward


class Tanh(Activation):
    """y = tanh(z + b)."""

    add_bias, slope = kernels.add_bias_tanh, kernels.tanh_backward


class Gelu(Activation):
    """y = gelu(z + b), in the tanh form of Hendrycks and Gimpel, "Gaussian error linear units", 2016.
    The slope cannot be computed from y, so y is a new array, and backward needs z."""

    gain = 2.0  # about half of the input passes, as with relu
    add_bias, slope = kernels.add_bias_gelu, kernels.gelu_backward

    @classmethod
    def forward(cls, z: Array, b: Array, pool: Pool) -> tuple[Array, Array]:
        y = pool.take(*z.shape)
        cls.add_bias(z, b, y)
        return y, z

    @classmethod
    def backward(cls, z: Array, b: Array, dy: Array, gb: Array) -> Array:
        cls.slope(z, b, dy, gb)
        return z


ACTIVATIONS: dict[str, type[Activation]] = {"none": Identity, "relu": Relu, "tanh": Tanh, "gelu": Gelu}


class Layer:
    """Base of layers. full_shapes: short tensor name -> shape. shapes: the same for the parts that this rank has.
    cuts: tensor name -> axis along which the tensor is cut if ranks share the layer. tied: layout name -> shape, for
    tensors of other layers that this one also uses. divided: True if each rank computes only some of the outputs.
    hidden: True if the layer's weights map to hidden units: no embedding, and no output layer (`hidden_weights`)."""

    cuts: Mapping[str, int] = {}
    tied: Mapping[str, tuple[int, ...]] = {}
    part, parts = 0, 1
    divided = False
    hidden = False
    takes_batch = False  # True if forward also takes the batch, and a flag: True if backward follows
    extra: Sequence[str] = ()  # names of the model's buffers that the layer uses

    def __init__(self, name: str, pool: Pool, full_shapes: dict[str, tuple[int, ...]]):
        self.name, self.pool, self.full_shapes, self.shapes = name, pool, full_shapes, dict(full_shapes)
        self.matmul = pool.device.xp.matmul

    @property
    def hidden_weights(self) -> dict[str, str]:
        """Short names of a hidden layer's matrices, tensors called weight, and the order of their axes (layout.py): by
        default (inputs, outputs), or (inputs, n, outputs) for n matrices. Muon (optim/muon.py) orthogonalizes their
        updates."""
        names = [name for name in self.full_shapes if self.hidden and name.rpartition(".")[2] == "weight"]
        return dict.fromkeys(names, INPUTS_FIRST)

    def state(self) -> list[Array]:
        """Return the buffers: arrays, beside the parameters, that forward may change."""
        return []

    def unbind(self) -> None:
        """Drop the layer's references to tensors of the last forward or backward, if any."""

    def cut(self, part: int, parts: int) -> Self:
        """Return a copy whose tensors in `cuts` are chunk `part` of `parts` each. UsageError if that is impossible."""
        self.check_cut(parts)
        other = copy.copy(self)
        other.part, other.parts = part, parts
        for name, axis in self.cuts.items():
            if shape := self.full_shapes.get(name):
                own = chunk(shape[axis], parts, part)
                other.shapes = other.shapes | {name: (*shape[:axis], own.stop - own.start, *shape[axis + 1 :])}
        return other

    def check_cut(self, parts: int) -> None:
        """Raise UsageError if the layer cannot be cut into `parts` parts."""

    def add_product(self, a: Array, b: Array, into: Array) -> None:
        """Add the product a b to `into`, the gradient of a weight; or leave it for later, as the pool says."""
        if self.pool.later is not None:
            self.pool.pin(a)
            self.pool.pin(b)
            self.pool.later.append((self, a, b, into))
            return
        product = self.pool.take(a.shape[0], b.shape[1])
        self.matmul(a, b, out=product)
        into += product.reshape(into.shape)
        self.pool.give(product)


def check_width(name: str, width: int, parts: int) -> None:
    """Raise UsageError unless `parts` ranks can share `width` units evenly."""
    if width % parts:
        raise UsageError(f"{name} {width} cannot be divided evenly among {parts} ranks; choose a multiple of {parts}")


class Dense(Layer):
    """A fully connected layer, y = activation(x W + b), with W (inputs, outputs) and b (outputs,).
    kind: name of the activation. first: True for a model's first layer, which computes no gradient by its input (dx is
    None) and takes sparse x (CSR), too. by: the axis by which ranks that share the layer cut W, "columns" or "rows"."""

    def __init__(
        self, name: str, inputs: int, outputs: int, kind: str, pool: Pool, first: bool = False, by: str = "columns"
    ):
        super().__init__(name, pool, {"weight": (inputs, outputs), "bias": (outputs,)})
        self.first, self.activation, self.divided = first, ACTIVATIONS[kind], by == "columns"
        self.hidden = kind != "none"  # without an activation it is the output layer
        self.cuts = {"weight": 1, "bias": 0} if self.divided else {"weight": 0}

    def check_cut(self, parts: int) -> None:
        if not self.divided:
            check_width("a hidden layer's width", self.full_shapes["weight"][0], parts)

    def output_shape(self, rows: int, group: LayerGroup) -> tuple[int, int]:
        return rows, self.shapes["weight"][1]

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        """Draw W with variance gain / inputs (gain 2 before a relu, else 1); set b to zero."""
        weight, bias = w
        deviation = math.sqrt(self.activation.gain / weight.shape[0])
        weight[...] = deviation * generators[0].standard_normal(weight.shape)
        bias[...] = 0

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
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

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Any:
        (weight, bias), (x, _, activation_saved), (weight_gradient, bias_gradient) = w, saved, g
        over = self.pool.writable(activation_saved)  # pinned where it is the input of the next layer
        dz = self.activation.backward(over, bias, dy, bias_gradient)
        if isinstance(x, CSR):
            sparse.scatter_add(x.data, x.indices, x.indptr, dz, weight_gradient)
        else:
            self.add_product(x.T, dz, weight_gradient)
        dx = None
        if not self.first:
            dx = self.matmul(dz, weight.T, out=self.pool.take(*x.shape))
            if self.divided:
                dx = group.f_backward(dx, self.pool)
        if over is not activation_saved:
            self.pool.give(over)
        self.release(saved)
        return dx

    def release(self, saved: Any) -> None:
        _, y, activation_saved = saved
        self.pool.give(y)
        if activation_saved is not y:
            self.pool.give(activation_saved)


def dense_layers(widths: Sequence[int], activation: str, pool: Pool) -> list[Dense]:
    """Return dense layers from widths[0] inputs to widths[-1] outputs, with the activation between them.
    If ranks share the layers, W is cut by columns and by rows in turn: one sum for each two layers."""
    layers, last = [], len(widths) - 1
    for i in range(1, last + 1):
        kind, by = activation if i < last else "none", "columns" if i % 2 else "rows"
        layers.append(Dense(f"dense{i}", widths[i - 1], widths[i], kind, pool, first=i == 1, by=by))
    return layers
