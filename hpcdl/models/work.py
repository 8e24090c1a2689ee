"""Operations of a layer: its matrix products and kernels, with their flops and bytes, forward and backward.

    product (batch, m, k, n)          2 batch m k n flops; batch (m k + k n + m n) elements moved
    kernel (name, rows, columns)      as kernels/intensity.py counts it

Every operand of every operation counts as moved, once each time: what lies between two operations of a layer is taken
to have left the caches, which a small one has not. So an intensity, flops for each byte, is the lowest there is.

`rows` are examples; a gpt has `length` rows of a matrix for each.
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
        """A multiplication and an addition for each of m k n."""
        return 2.0 * self.batch * self.m * self.k * self.n

    def moved(self, itemsize: int) -> float:
        """Bytes of both factors and the product."""
        return float(itemsize * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n))


class KernelCall(NamedTuple):
    """A kernel, called for a matrix, or for a vector of `rows` elements."""

    name: str
    rows: int
    columns: int = 1

    def flops(self) -> float:
        """As its formula has them."""
        return COSTS[self.name].flops(self.rows, self.columns)

    def moved(self, itemsize: int) -> float:
        """Bytes."""
        return COSTS[self.name].moved(self.rows, self.columns, itemsize)


Operations = Sequence[Product | KernelCall]
ACTIVATIONS = {Relu: ("add_bias_relu", "relu_backward"), Tanh: ("add_bias_tanh", "tanh_backward")}
ACTIVATIONS[Gelu] = "add_bias_gelu", "gelu_backward"


def weight(inputs: int, rows: int, outputs: int) -> list[Product | KernelCall]:
    """What is added to the gradient by a weight."""
    return [Product(inputs, rows, outputs), KernelCall("add_into", inputs * outputs)]


def dense(layer: Dense, rows: int) -> tuple[Operations, Operations]:
    """Forward and backward."""
    inputs, outputs = layer.shapes["weight"]
    forward, backward = ACTIVATIONS.get(layer.activation, ("add_bias", "add_rows"))
    back = [KernelCall(backward, rows, outputs), *weight(inputs, rows, outputs)]
    return [Product(rows, inputs, outputs), KernelCall(forward, rows, outputs)], [
        *back,
        *([] if layer.first else [Product(rows, outputs, inputs)]),
    ]


def embedding(layer: Embedding, rows: int) -> tuple[Operations, Operations]:
    """Forward and backward."""
    size = rows * layer.length, layer.width
    return [KernelCall("embed", *size), KernelCall("add_positions", *size)], [
        KernelCall("add_positions_backward", *size),
        KernelCall("embed_backward", *size),
    ]


def sublayer(layer: Any, rows: int, first: int, second: int, inner: Operations, back: Operations) -> tuple:
    """Two products, (width, first) and (second, width), with `inner` between them, and `back` backward."""
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
    """Forward and backward."""
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
    """Forward and backward."""
    units, tokens = 4 * layer.width, rows * layer.length
    inner, back = KernelCall("add_bias_gelu", tokens, units), KernelCall("gelu_backward", tokens, units)
    return sublayer(layer, rows, units, units, [inner], [back])


def norm(layer: Norm, rows: int) -> tuple[Operations, Operations]:
    """Forward and backward."""
    size = rows * layer.length, layer.width
    return [KernelCall("layer_norm", *size)], [KernelCall("layer_norm_backward", *size)]


def head(layer: Head, rows: int) -> tuple[Operations, Operations]:
    """Forward and backward."""
    tokens, width, vocabulary = rows * layer.length, layer.width, layer.vocabulary
    return [Product(tokens, width, vocabulary)], [
        *weight(vocabulary, tokens, width),
        Product(tokens, vocabulary, width),
    ]


def softmax(layer: SoftmaxCrossEntropy, rows: int) -> tuple[Operations, Operations]:
    """Forward; what backward returns is made with it."""
    rows *= layer.per
    scaled = [KernelCall("scale", rows * layer.classes)] if layer.per > 1 else []
    return [KernelCall("softmax_cross_entropy", rows, layer.classes), *scaled], []


def squared(layer: Squared, rows: int) -> tuple[Operations, Operations]:
    """Forward; what backward returns is made with it."""
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
    """What a layer does with so many examples, forward and backward; UsageError for a layer that is not known."""
    try:
        return COUNTERS[type(layer)](layer, rows)
    except KeyError:
        name = type(layer).__name__
        raise UsageError(
            f"the operations of a layer {name} are not counted; take softmax, linear, mlp or gpt"
        ) from None


def flops(operations_done: Operations) -> float:
    """Of all of them."""
    return sum(each.flops() for each in operations_done)


def moved(operations_done: Operations, itemsize: int) -> float:
    """Bytes of all of them."""
    return sum(each.moved(itemsize) for each in operations_done)


def flops_of_model(model: Any, rows: int) -> float:
    """Of a gradient of so many examples: every layer forward and backward."""
    return sum(flops(part) for layer in model.layers for part in operations(layer, rows))
