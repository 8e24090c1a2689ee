"""Work of a layer: its matrix products and kernels in forward and backward, with flops and bytes.

`rows` are examples; a gpt has `length` matrix rows for each. Every operand of every operation counts as moved, as if no
operand stayed in the caches between operations; small ones do. So the intensity, flops per byte, is a lower bound."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hpcdl.errors import UsageError
from hpcdl.kernels.intensity import COSTS, EXP
from hpcdl.models.attention import Attention
from hpcdl.models.feed_forward import FeedForward, SwiGLU
from hpcdl.models.latent_attention import LatentAttention
from hpcdl.models.layers import Dense
from hpcdl.models.losses import SoftmaxCrossEntropy, Squared
from hpcdl.models.mixture import MixtureOfExperts
from hpcdl.models.transformer import Embedding, Head, Norm


class Product(NamedTuple):
    """`batch` products of (m, k) and (k, n): 2 batch m k n flops, and batch (m k + k n + m n) elements moved.
    apart: True for the gradient by a weight, which a backward may leave for later (layered.py)."""

    m: int
    k: int
    n: int
    batch: int = 1
    apart: bool = False

    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.k * self.n

    def moved(self, itemsize: int) -> float:
        return float(itemsize * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n))


class GroupedProduct(NamedTuple):
    """Products of `groups` matrices (k, n) with the rows of each group, m rows in all. apart: as of a product; then
    they are products of (k, rows of a group) and (rows of a group, n)."""

    m: int
    k: int
    n: int
    groups: int
    apart: bool = False

    def flops(self) -> float:
        return 2.0 * self.m * self.k * self.n

    def moved(self, itemsize: int) -> float:
        return float(itemsize * (self.m * (self.k + self.n) + self.groups * self.k * self.n))


class KernelCall(NamedTuple):
    """A kernel call for a matrix of `rows` x `columns`, or for a vector of `rows` elements. apart: as of a product."""

    name: str
    rows: int
    columns: int = 1
    apart: bool = False

    def flops(self) -> float:
        return COSTS[self.name].flops(self.rows, self.columns)

    def moved(self, itemsize: int) -> float:
        return COSTS[self.name].moved(self.rows, self.columns, itemsize)


class AttentionCall(NamedTuple):
    """Attention in tiles, forward or backward, for scores of keys that are not in the future."""

    name: str
    tokens: int
    length: int
    heads: int
    kv_heads: int
    size: int
    apart: bool = False

    def products(self) -> float:
        """Return the flops of the products."""
        return (10.0 if self.name.endswith("backward") else 4.0) * self.size * self.scores()

    def scores(self) -> float:
        return self.heads * self.tokens * (self.length + 1) / 2

    def flops(self) -> float:
        """Return the flops of products, exponentials and sums or differences."""
        return self.products() + (EXP + 3) * self.scores()

    def moved(self, itemsize: int) -> float:
        """Return the bytes of q, k, v, a and lse, and backward also of their gradients, each moved once."""
        columns = (2 * self.heads + 2 * self.kv_heads) * self.size
        return float(itemsize * self.tokens * ((2 if self.name.endswith("backward") else 1) * columns + self.heads))


Operation = Product | GroupedProduct | KernelCall | AttentionCall
Operations = Sequence[Operation]
Passes = tuple[Operations, Operations]  # of a layer, for some number of examples: forward, then backward


def weight(inputs: int, rows: int, outputs: int) -> list[Operation]:
    """Return the operations that add the gradient of a weight (inputs, outputs), for `rows` matrix rows."""
    return [Product(inputs, rows, outputs, apart=True), KernelCall("add_into", inputs * outputs, apart=True)]


def dense(layer: Dense, rows: int) -> Passes:
    inputs, outputs = layer.shapes["weight"]
    made_of = layer.activation.add_bias, layer.activation.slope
    ahead, behind = (KernelCall(kernel.__name__, rows, outputs) for kernel in made_of)
    back = [] if layer.first else [Product(rows, outputs, inputs)]
    return [Product(rows, inputs, outputs), ahead], [behind, *weight(inputs, rows, outputs), *back]


def embedding(layer: Embedding, rows: int) -> Passes:
    size, learned = (rows * layer.length, layer.width), "position" in layer.shapes
    ahead, behind = [KernelCall("embed", *size)], [KernelCall("embed_backward", *size)]
    if learned:
        ahead.append(KernelCall("add_positions", *size))
        behind.append(KernelCall("add_positions_backward", *size))
    return ahead, behind


def normalized(layer: Norm | Attention | FeedForward | MixtureOfExperts, rows: int) -> tuple[KernelCall, KernelCall]:
    """Return the calls of a layer's normalization, forward and backward."""
    kind, size = layer.normalization, (rows * layer.length, layer.width)
    return KernelCall(kind.kernel.__name__, *size), KernelCall(kind.backward_kernel.__name__, *size)


def sublayer(layer: Any, rows: int, first: int, second: int, inner: Operations, back: Operations) -> Passes:
    """Return a sublayer's passes, with weights (width, first) and (second, width); inner, back: operations between."""
    tokens, width, (norm_ahead, norm_behind) = rows * layer.length, layer.width, normalized(layer, rows)
    add = KernelCall("add_into", tokens * width)
    residual, bias_behind = add, list[KernelCall]()
    if layer.architecture.biases:
        residual, bias_behind = KernelCall("add_bias_residual", tokens, width), [KernelCall("add_rows", tokens, width)]
    ahead = [norm_ahead, Product(tokens, width, first), *inner, Product(tokens, second, width), residual]
    behind = [*bias_behind, *weight(second, tokens, width), Product(tokens, width, second), *back]
    return ahead, [*behind, *weight(width, tokens, first), Product(tokens, first, width), norm_behind, add]


def biased(layer: Any, ahead: Operations, behind: Operations, tokens: int, columns: int) -> Passes:
    """Return the operations before b1 and after its gradient, with those for b1 if the architecture has biases."""
    if not layer.architecture.biases:
        return ahead, behind
    return [KernelCall("add_bias", tokens, columns), *ahead], [*behind, KernelCall("add_rows", tokens, columns)]


def attention(layer: Attention, rows: int) -> Passes:
    tokens, kv_columns = rows * layer.length, layer.kv_heads * layer.size
    sizes = tokens, layer.length, layer.heads, layer.kv_heads, layer.size
    inner: Operations = [AttentionCall("causal_attention", *sizes)]
    back: Operations = [AttentionCall("causal_attention_backward", *sizes)]
    if layer.architecture.rope_base:
        turned = KernelCall("rotate", tokens, layer.width + kv_columns)
        inner, back = [turned, *inner], [*back, turned]
    columns = layer.width + 2 * kv_columns
    return sublayer(layer, rows, columns, layer.width, *biased(layer, inner, back, tokens, columns))


def latent_attention(layer: LatentAttention, rows: int) -> Passes:
    """Return latent attention's passes. Copies of q, k and v into one matrix, and sums over heads of the common key's
    gradient, are not counted."""
    of, tokens, width, heads = layer.latent, rows * layer.length, layer.width, layer.heads
    columns, values = heads * layer.size, heads * of.head
    normed = [(stop - start) for _, start, stop in layer.normed()]
    turned, add = KernelCall("rotate", tokens, 2 * columns), KernelCall("add_into", tokens * width)
    sizes = tokens, layer.length, heads, heads, layer.size
    norm_ahead, norm_behind = normalized(layer, rows)
    up = [(of.queries or width, columns), (of.latent, 2 * values)]
    ahead: list[Operation] = [norm_ahead, Product(tokens, width, of.rope), turned]
    behind: list[Operation] = [*weight(values, tokens, width), Product(tokens, width, values)]
    behind += [AttentionCall("causal_attention_backward", *sizes), turned]
    for inputs, outputs in up:
        ahead.append(Product(tokens, inputs, outputs))
        behind += [*weight(inputs, tokens, outputs), Product(tokens, outputs, inputs)]
    behind += [*weight(width, tokens, of.rope), Product(tokens, of.rope, width)]
    for size in normed:
        ahead += [Product(tokens, width, size), KernelCall("rms_norm", tokens, size)]
        behind += [KernelCall("rms_norm_backward", tokens, size), *weight(width, tokens, size)]
        behind += [Product(tokens, size, width), add]
    ahead += [AttentionCall("causal_attention", *sizes), Product(tokens, values, width), add]
    return ahead, [*behind, norm_behind, add]


def feed_forward(layer: FeedForward, rows: int) -> Passes:
    units, tokens = layer.units, rows * layer.length
    inner, back = KernelCall("add_bias_gelu", tokens, units), KernelCall("gelu_backward", tokens, units)
    return sublayer(layer, rows, units, units, [inner], [back])


def swiglu(layer: SwiGLU, rows: int) -> Passes:
    units, tokens = layer.units, rows * layer.length
    inner, back = ([KernelCall(name, tokens, units)] for name in ("swiglu", "swiglu_backward"))
    return sublayer(layer, rows, 2 * units, units, *biased(layer, inner, back, tokens, 2 * units))


def mixture(layer: MixtureOfExperts, rows: int) -> Passes:
    """Return a mixture's passes, with as many choices as experts have room for in all; each expert has some. The
    router's softmax and choice, which work on E numbers a token, are not counted."""
    tokens, width, units, of = rows * layer.length, layer.width, layer.units, layer.experts
    taken, first = rows * of.slots(layer.length), math.prod(layer.network.up(layer.units))
    names = ("add_bias_gelu", "gelu_backward") if layer.network.in_place else ("swiglu", "swiglu_backward")
    inner, back = (KernelCall(name, taken, units) for name in names)
    (norm_ahead, norm_behind), add = normalized(layer, rows), KernelCall("add_into", tokens * width)
    gathered, added = KernelCall("gather_choices", taken, width), KernelCall("add_placed", taken, width)
    ahead: list[Operation] = [norm_ahead, Product(tokens, width, of.count), gathered]
    ahead += [GroupedProduct(taken, width, first, of.count), inner, GroupedProduct(taken, units, width, of.count)]
    ahead += [added, add]
    common, wide = of.shared * units, of.shared * first
    if common:
        ahead += [Product(tokens, width, wide), KernelCall(names[0], tokens, common)]
        ahead += [Product(tokens, common, width), add]

    def weights(inputs: int, outputs: int) -> list[Operation]:
        product = GroupedProduct(taken, inputs, outputs, of.count, apart=True)
        return [product, KernelCall("add_into", of.count * inputs * outputs, apart=True)]

    behind: list[Operation] = [gathered, GroupedProduct(taken, width, units, of.count)]
    behind += [Product(1, units, 1, taken)]  # dot_choices
    behind += [KernelCall("scale_choices", taken, columns) for columns in (width, units)]
    behind += [*weights(units, width), back, gathered, *weights(width, first)]
    behind += [GroupedProduct(taken, first, width, of.count), added]
    behind += weight(width, tokens, of.count)
    if common:
        behind += [*weight(common, tokens, width), Product(tokens, width, common)]
        behind += [KernelCall(names[1], tokens, common), *weight(width, tokens, wide)]
        behind += [Product(tokens, wide, width), add]
    return ahead, [*behind, Product(tokens, of.count, width), add, norm_behind, add]


def norm(layer: Norm, rows: int) -> Passes:
    ahead, behind = normalized(layer, rows)
    return [ahead], [behind]


def head(layer: Head, rows: int) -> Passes:
    tokens, width, vocabulary = rows * layer.length, layer.width, layer.vocabulary
    back = [*weight(vocabulary, tokens, width), Product(tokens, vocabulary, width)]
    return [Product(tokens, width, vocabulary)], back


def softmax(layer: SoftmaxCrossEntropy, rows: int) -> Passes:
    """Return the passes of the loss: forward also computes the gradient, and backward does nothing."""
    rows *= layer.per
    scaled = [KernelCall("scale", rows * layer.classes)] if layer.per > 1 else []
    return [KernelCall("softmax_cross_entropy", rows, layer.classes), *scaled], []


def squared(layer: Squared, rows: int) -> Passes:
    """Return the passes of the loss: forward also computes the gradient, and backward does nothing."""
    return [KernelCall("squared", rows * math.prod(layer.outputs))], []


COUNTERS: dict[type, Callable[[Any, int], Passes]] = {
    Dense: dense,
    SoftmaxCrossEntropy: softmax,
    Squared: squared,
    Embedding: embedding,
    Attention: attention,
    LatentAttention: latent_attention,
    FeedForward: feed_forward,
    SwiGLU: swiglu,
    MixtureOfExperts: mixture,
    Norm: norm,
    Head: head,
}


def operations(layer: Any, rows: int) -> Passes:
    """Return forward and backward operations of a layer for `rows` examples. Raises UsageError for an unknown layer."""
    try:
        return COUNTERS[type(layer)](layer, rows)
    except KeyError:
        what = f"the operations of a layer of type {type(layer).__name__} are not counted"
        raise UsageError(f"{what}; take a model softmax, linear, mlp, gpt or llama") from None


def apart(work: Operations) -> Operations:
    """Return the operations that a backward may leave for later."""
    return [each for each in work if each.apart]


def flops(work: Operations) -> float:
    """Return the flops of all operations."""
    return sum(each.flops() for each in work)


def moved(work: Operations, itemsize: int) -> float:
    """Return the bytes moved by all operations."""
    return sum(each.moved(itemsize) for each in work)
