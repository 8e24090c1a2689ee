"""Work of a layer: its matrix products and kernels in forward and backward, with flops and bytes.

    product (batch, m, k, n)          2 batch m k n flops; batch (m k + k n + m n) elements moved
    kernel (name, rows, columns)      counted by kernels/intensity.py

Every operand of every operation counts as moved, as if it had left the caches between operations, which small ones have
not. So the intensity, flops per byte, is a lower bound.

`rows` are examples; a gpt has `length` matrix rows for each.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hpcdl.errors import UsageError
from hpcdl.kernels.intensity import COSTS
from hpcdl.models.layers import Dense, Gelu, Relu, Tanh
from hpcdl.models.losses import SoftmaxCrossEntropy, Squared
from hpcdl.models.transformer import Attention, Embedding, FeedForward, Head, Norm


class Product(NamedTuple):
    """`batch` products of (m, k) and (k, n)."""

    m: int
    k: int
    n: int
    batch: int = 1

    def flops(self) -> float:
        """Return flops: a multiplication and an addition for each of batch m k n."""
        return 2.0 * self.batch * self.m * self.k * self.n

    def moved(self, itemsize: int) -> float:
        """Return the bytes of both factors and the product."""
        return float(itemsize * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n))


class KernelCall(NamedTuple):
    """A kernel call for a matrix, or for a vector of `rows` elements."""

    name: str
    rows: int
    columns: int = 1

    def flops(self) -> float:
        """Return flops by the kernel's formula."""
        return COSTS[self.name].flops(self.rows, self.columns)

    def moved(self, itemsize: int) -> float:
        """Return the bytes moved."""
        return COSTS[self.name].moved(self.rows, self.columns, itemsize)


Operations = Sequence[Product | KernelCall]
ACTIVATIONS = {Relu: ("add_bias_relu", "relu_backward"), Tanh: ("add_bias_tanh", "tanh_backward")}
ACTIVATIONS[Gelu] = "add_bias_gelu", "gelu_backward"


def weight(inputs: int, rows: int, outputs: int) -> list[Product | KernelCall]:
    """Return the operations of the gradient of a weight."""
    return [Product(inputs, rows, outputs), KernelCall("add_into", inputs * outputs)]


def dense(layer: Dense, rows: int) -> tuple[Operations, Operations]:
    """Return the operations of forward and backward."""
    inputs, outputs = layer.shapes["weight"]
    forward, backward = ACTIVATIONS.get(layer.activation, ("add_bias", "add_rows"))
    back = [KernelCall(backward, rows, outputs), *weight(inputs, rows, outputs)]
    return [Product(rows, inputs, outputs), KernelCall(forward, rows, outputs)], [
        *back,
        *([] if layer.first else [Product(rows, outputs, inputs)]),
    ]


def embedding(layer: Embedding, rows: int) -> tuple[Operations, Operations]:
    """Return the operations of forward and backward."""
    size = rows * layer.length, layer.width
    return [KernelCall("embed", *size), KernelCall("add_positions", *size)], [
        KernelCall("add_positions_backward", *size),
        KernelCall("embed_backward", *size),
    ]


def sublayer(layer: Any, rows: int, first: int, second: int, inner: Operations, back: Operations) -> tuple:
    """Return the operations of two products, (width, first) and (second, width), with `inner` between them."""
    tokens, width = rows * layer.length, layer.width
    ahead = [KernelCall("layer_norm", tokens, width), Product(tokens, width, first), *inner]
    ahead += [
        Product(tokens, second, width),
        KernelCall("add_bias", tokens, width),
        KernelCall("add_into", tokens * width),
    ]
    behind = [
        KernelCall("add_rows", tokens, width),
        *weight(second, tokens, width),
        Product(tokens, width, second),
        *back,
    ]
    behind += [*weight(width, tokens, first), Product(tokens, first, width)]
    behind += [KernelCall("layer_norm_backward", tokens, width), KernelCall("add_into", tokens * width)]
    return ahead, behind


def attention(layer: Attention, rows: int) -> tuple[Operations, Operations]:
    """Return the operations of forward and backward."""
    length, width, size, batch = layer.length, layer.width, layer.size, rows * layer.heads
    tall, wide = Product(length, size, length, batch), Product(length, length, size, batch)
    scores = batch * length, length
    inner: list[Product | KernelCall]
    back: list[Product | KernelCall]
    inner = [KernelCall("add_bias", rows * length, 3 * width), tall, KernelCall("causal_softmax", *scores), wide]
    back = [wide, tall, KernelCall("causal_softmax_backward", *scores), wide, wide]
    back.append(KernelCall("add_rows", rows * length, 3 * width))
    return sublayer(layer, rows, 3 * width, width, inner, back)


def feed_forward(layer: FeedForward, rows: int) -> tuple[Operations, Operations]:
    """Return the operations of forward and backward."""
    units, tokens = 4 * layer.width, rows * layer.length
    inner, back = KernelCall("add_bias_gelu", tokens, units), KernelCall("gelu_backward", tokens, units)
    return sublayer(layer, rows, units, units, [inner], [back])


def norm(layer: Norm, rows: int) -> tuple[Operations, Operations]:
    """Return the operations of forward and backward."""
    size = rows * layer.length, layer.width
    return [KernelCall("layer_norm", *size)], [KernelCall("layer_norm_backward", *size)]


def head(layer: Head, rows: int) -> tuple[Operations, Operations]:
    """Return the operations of forward and backward."""
    tokens, width, vocabulary = rows * layer.length, layer.width, layer.vocabulary
    return [Product(tokens, width, vocabulary)], [
        *weight(vocabulary, tokens, width),
        Product(tokens, vocabulary, width),
    ]


def softmax(layer: SoftmaxCrossEntropy, rows: int) -> tuple[Operations, Operations]:
    """Return the operations of forward, which also computes the gradient."""
    rows *= layer.per
    scaled = [KernelCall("scale", rows * layer.classes)] if layer.per > 1 else []
    return [KernelCall("softmax_cross_entropy", rows, layer.classes), *scaled], []


def squared(layer: Squared, rows: int) -> tuple[Operations, Operations]:
    """Return the operations of forward, which also computes the gradient."""
    return [KernelCall("squared", rows * math.prod(layer.outputs))], []


COUNTERS: dict[type, Callable[[Any, int], tuple[Operations, Operations]]] = {
    Dense: dense,
    Embedding: embedding,
    Attention: attention,
    FeedForward: feed_forward,
    Norm: norm,
    Head: head,
    SoftmaxCrossEntropy: softmax,
    Squared: squared,
}


def operations(layer: Any, rows: int) -> tuple[Operations, Operations]:
    """Return forward and backward operations of a layer for so many examples; UsageError for an unknown layer."""
    try:
        return COUNTERS[type(layer)](layer, rows)
    except KeyError:
        name = type(layer).__name__
        raise UsageError(
            f"the operations of a layer {name} are not counted; take softmax, linear, mlp or gpt"
        ) from None


def flops(work: Operations) -> float:
    """Return the flops of all operations."""
    return sum(each.flops() for each in work)


def moved(work: Operations, itemsize: int) -> float:
    """Return the bytes moved by all operations."""
    return sum(each.moved(itemsize) for each in work)


def flops_of_model(model: Any, rows: int) -> float:
    """Return the flops of a gradient of so many examples: all layers forward and backward."""
    return sum(flops(part) for layer in model.layers for part in operations(layer, rows))
