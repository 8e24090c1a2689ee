"""The layers of a decoder-only transformer, which predicts each token of a sequence from those before it.

    Embedding      y = token[x] + position                                       x (rows, length) token numbers
    Attention      y = x + softmax(mask(q k^T / sqrt(d))) v Wo + bo              q, k, v = norm(x) Wqkv + bqkv, by heads
    FeedForward    y = x + gelu(norm(x) Wu + bu) Wd + bd                         4 * width units
    Norm           y = gain * (x - mean) / sqrt(variance + eps) + bias           over the width
    Head           z = x Wt^T                                                    Wt (vocabulary, width), often = token

Between layers there is a row for each token, (rows * length, width). A norm precedes each sublayer of a block and the
head. (Vaswani et al., "Attention is all you need", 2017; Radford et al., "Language models are
unsupervised multitask learners", 2019)

If ranks share the layers, each has some of the heads, of the units and of the vocabulary:

    by columns    Wqkv, Wu (outputs), Wt (as z's columns), token (rows: vectors of its own tokens, zero for others)
    by rows       Wo, Wd (inputs)
    f, g          f before Wqkv, Wu, Wt; g after Wo, Wd, token: for a sublayer one sum forward and one backward

With sequence parallelism each has some of the tokens in norms, residuals and biases.
(Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation", 2022)
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.errors import UsageError
from hpcdl.kernels import activation, attention, embedding, layer_norm
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import add_into
from hpcdl.models.group import LayerGroup
from hpcdl.models.layers import Gelu, Layer, check_width
from hpcdl.models.pool import Pool

DEVIATION = 0.02  # of initial weights: Radford et al., 2018


def draw(w: Array, generator: np.random.Generator, deviation: float = DEVIATION) -> None:
    """Fill w with normal random numbers."""
    w[...] = deviation * generator.standard_normal(w.shape)


class TokenLayer(Layer):
    """A layer with a row for each token: `length` tokens per example, outputs of `width`."""

    def __init__(self, name: str, pool: Pool, length: int, width: int, shapes: dict[str, tuple[int, ...]]):
        super().__init__(name, pool, shapes)
        self.length, self.width = length, width

    def output_shape(self, rows: int, group: LayerGroup) -> tuple[int, int]:
        """Return the shape of y for so many examples; with sequence parallelism, for this rank's tokens."""
        return rows * self.length // (group.size if group.sequence else 1), self.width

    def normalize(self, x: Array, gain: Array, bias: Array) -> tuple[Array, Array, Array]:
        """Return norm(x) and its data for backward besides x; all from the pool."""
        y, mean, deviation = self.pool.take(*x.shape), self.pool.take(len(x)), self.pool.take(len(x))
        layer_norm.layer_norm(x, gain, bias, y, mean, deviation)
        return y, mean, deviation

    def give(self, *buffers: Array) -> None:
        """Give buffers back to the pool."""
        for buffer in buffers:
            self.pool.give(buffer)


class Embedding(TokenLayer):
    """A vector for each token and one for its position."""

    cuts: Mapping[str, int] = {"token": 0}

    def __init__(self, name: str, pool: Pool, vocabulary: int, context: int, length: int, width: int):
        super().__init__(name, pool, length, width, {"token": (vocabulary, width), "position": (context, width)})

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        """Draw token and position vectors."""
        draw(w[0], generators[0])
        draw(w[1], generators[1])

    def at(self, y: Array, group: LayerGroup) -> int:
        """Return the number of this rank's first token."""
        return group.rank * len(y) if group.sequence else 0

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        """Return y and the data for backward."""
        (token, position), vocabulary = w, self.full_shapes["token"][0]
        y = self.pool.take(len(x) * self.length, self.width)
        first = chunk(vocabulary, self.parts, self.part).start
        if embedding.embed(x, token, first, vocabulary, y) < 0:
            raise UsageError(f"the data hold what is no token number from 0 to {vocabulary - 1}; a gpt reads text")
        y = group.g(y, self.pool)
        embedding.add_positions(y, position, self.length, self.at(y, group))
        return y, (x, y)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> None:
        """Add the gradients of the vectors to g; return None, as token numbers have no gradient."""
        x, _ = saved
        embedding.add_positions_backward(dy, g[1], self.length, self.at(dy, group))
        full_dy = group.g_backward(dy, self.pool)
        embedding.embed_backward(x, full_dy, chunk(self.full_shapes["token"][0], self.parts, self.part).start, g[0])
        if full_dy is not dy:
            self.give(full_dy)
        self.release(saved)

    def release(self, saved: Any) -> None:
        """Release the buffers of forward."""
        self.give(saved[1])


class Sublayer(TokenLayer):
    """A sublayer of a block, y = x + inner(norm(x) W1 + b1) W2 + b2, with `inner` defined by subclasses.

    tensors: gain and bias of the norm, W1, b1, W2, b2, in this order. depth: the number of residual sums in the model;
    the initial W2 are divided by its square root.

    u, saved = self.inner(z, b1)                     z = norm(x) W1, from the pool, is consumed
    dz = self.inner_backward(saved, u, b1, du, g1)   adds to the gradient of b1; dz: from the pool, or saved[0]
    """

    @abstractmethod
    def inner(self, z: Array, b: Array) -> tuple[Array, tuple[Array, ...]]:
        """Compute the part between the two products; return its output and saved data."""

    @abstractmethod
    def inner_backward(self, inner_saved: Sequence[Array], u: Array, b: Array, du: Array, gb: Array) -> Array:
        """Return the gradient by z, from that by the output of `inner`."""

    def __init__(self, name: str, pool: Pool, length: int, width: int, depth: int, shapes: dict[str, tuple[int, ...]]):
        norm = {"norm.gain": (width,), "norm.bias": (width,)}
        super().__init__(name, pool, length, width, norm | shapes)
        self.depth = depth

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        """Draw the weights; set gain to 1, biases to 0."""
        gain, bias, first, first_bias, second, second_bias = w
        gain[...] = 1
        bias[...] = first_bias[...] = second_bias[...] = 0
        draw(first, generators[2])
        draw(second, generators[4], DEVIATION / math.sqrt(self.depth))

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        """Return y and the data for backward."""
        gain, bias, first, first_bias, second, second_bias = w
        n, mean, deviation = self.normalize(x, gain, bias)
        h, first = group.f(n, self.pool), first.reshape(self.width, -1)
        z = self.matmul(h, first, out=self.pool.take(len(h), first.shape[1]))
        if h is not n:
            self.give(h)
        u, inner_saved = self.inner(z, first_bias.reshape(-1))
        y = group.g(self.matmul(u, second, out=self.pool.take(len(u), self.width)), self.pool)
        activation.add_bias(y, second_bias)
        add_into(y.reshape(-1), x.reshape(-1))
        return y, (x, n, mean, deviation, *inner_saved, u, y)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Array:
        """Return dx; add the gradients of the tensors to g."""
        (gain, _, first, first_bias, second, _), (x, n, mean, deviation, *inner_saved, u, _) = w, saved
        gain_gradient, bias_gradient, first_gradient, first_bias_gradient, second_gradient, second_bias_gradient = g
        activation.add_rows(dy, second_bias_gradient)
        full_dy = group.g_backward(dy, self.pool)
        self.add_product(u.T, full_dy, second_gradient)
        du = self.matmul(full_dy, second.T, out=self.pool.take(*u.shape))
        if full_dy is not dy:
            self.give(full_dy)
        dz = self.inner_backward(inner_saved, u, first_bias.reshape(-1), du, first_bias_gradient.reshape(-1))
        self.give(du)
        h = group.f(n, self.pool)
        self.add_product(h.T, dz, first_gradient)
        dh = self.matmul(dz, first.reshape(self.width, -1).T, out=self.pool.take(*h.shape))
        if h is not n:
            self.give(h)
        if dz is not inner_saved[0]:
            self.give(dz)
        dx = group.f_backward(dh, self.pool)
        layer_norm.layer_norm_backward(dx, x, gain, mean, deviation, dx, gain_gradient, bias_gradient)
        add_into(dx.reshape(-1), dy.reshape(-1))
        self.release(saved)
        return dx

    def release(self, saved: Any) -> None:
        """Release the buffers of forward."""
        self.give(*saved[1:])


class Attention(Sublayer):
    """The first of a block: causal self-attention with `heads` heads of width / heads elements."""

    cuts: Mapping[str, int] = {"qkv.weight": 2, "qkv.bias": 1, "out.weight": 0}

    def __init__(self, name: str, pool: Pool, length: int, width: int, heads: int, depth: int):
        shapes = {"qkv.weight": (width, 3, width), "qkv.bias": (3, width), "out.weight": (width, width)}
        super().__init__(name, pool, length, width, depth, shapes | {"out.bias": (width,)})
        self.heads, self.size = heads, width // heads

    def check_cut(self, parts: int) -> None:
        """Raise UsageError unless the heads can be divided among the parts."""
        check_width("heads", self.heads, parts)

    def by_heads(self, array: Array, count: int) -> Array:
        """Return views (rows, heads, length, size) of `count` arrays that are columns of (tokens, count * own)."""
        own = self.heads // self.parts
        split = array.reshape(len(array) // self.length, self.length, count, own, self.size)
        return split.transpose(2, 0, 3, 1, 4)

    def inner(self, qkv: Array, b: Array) -> tuple[Array, tuple[Array, ...]]:
        """Return softmax(mask(q k^T / sqrt(d))) v of each head; saves qkv and the softmax."""
        activation.add_bias(qkv, b)
        q, k, v = self.by_heads(qkv, 3)
        p = self.pool.take(*q.shape[:3], self.length)
        self.matmul(q, k.swapaxes(2, 3), out=p)
        attention.causal_softmax(p.reshape(-1, self.length), self.length, 1 / math.sqrt(self.size))
        a = self.pool.take(len(qkv), qkv.shape[1] // 3)
        self.matmul(p, v, out=self.by_heads(a, 1)[0])
        return a, (qkv, p)

    def inner_backward(self, inner_saved: Sequence[Array], a: Array, b: Array, da: Array, gb: Array) -> Array:
        """Return the gradient by qkv."""
        qkv, p = inner_saved
        dqkv, dp = self.pool.take(*qkv.shape), self.pool.take(*p.shape)
        (q, k, v), (dq, dk, dv), (da_by_heads,) = self.by_heads(qkv, 3), self.by_heads(dqkv, 3), self.by_heads(da, 1)
        self.matmul(p.swapaxes(2, 3), da_by_heads, out=dv)
        self.matmul(da_by_heads, v.swapaxes(2, 3), out=dp)
        rows = -1, self.length
        attention.causal_softmax_backward(p.reshape(rows), dp.reshape(rows), self.length, 1 / math.sqrt(self.size))
        self.matmul(dp, k, out=dq)
        self.matmul(dp.swapaxes(2, 3), q, out=dk)
        self.give(dp)
        activation.add_rows(dqkv, gb)
        return dqkv


class FeedForward(Sublayer):
    """The second of a block: two dense layers, a gelu between them."""

    cuts: Mapping[str, int] = {"up.weight": 1, "up.bias": 0, "down.weight": 0}

    def __init__(self, name: str, pool: Pool, length: int, width: int, depth: int):
        shapes = {"up.weight": (width, 4 * width), "up.bias": (4 * width,), "down.weight": (4 * width, width)}
        super().__init__(name, pool, length, width, depth, shapes | {"down.bias": (width,)})

    def check_cut(self, parts: int) -> None:
        """Raise UsageError unless the units can be divided among the parts."""
        check_width("4 x width =", 4 * self.width, parts)

    def inner(self, z: Array, b: Array) -> tuple[Array, tuple[Array, ...]]:
        """Return gelu(z + b); saves z."""
        u, z = Gelu.forward(z, b, self.pool)
        return u, (z,)

    def inner_backward(self, inner_saved: Sequence[Array], u: Array, b: Array, du: Array, gb: Array) -> Array:
        """Return the gradient by z, in z's place."""
        return Gelu.backward(inner_saved[0], b, du, gb)


class Norm(TokenLayer):
    """Layer norm (Ba, Kiros and Hinton, "Layer normalization", 2016)."""

    def __init__(self, name: str, pool: Pool, length: int, width: int):
        super().__init__(name, pool, length, width, {"gain": (width,), "bias": (width,)})

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        """Set gain to 1, bias to 0."""
        w[0][...], w[1][...] = 1, 0

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        """Return y and the data for backward."""
        y, mean, deviation = self.normalize(x, *w)
        return y, (x, mean, deviation, y)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Array:
        """Return dx; add the gradients of gain and bias to g."""
        x, mean, deviation, _ = saved
        dx = self.pool.take(*x.shape)
        layer_norm.layer_norm_backward(dy, x, w[0], mean, deviation, dx, *g)
        self.release(saved)
        return dx

    def release(self, saved: Any) -> None:
        """Release the buffers of forward."""
        self.give(*saved[1:])


class Head(TokenLayer):
    """The output layer: z for each token of the vocabulary; its weight is tied to `token`, or its own without one."""

    divided = True

    def __init__(self, name: str, pool: Pool, vocabulary: int, length: int, width: int, token: str = ""):
        shape = vocabulary, width
        super().__init__(name, pool, length, width, {} if token else {"weight": shape})
        self.vocabulary, self.cuts = vocabulary, {token or "weight": 0}
        self.tied = {token: shape} if token else {}

    def cut(self, part: int, parts: int) -> Self:
        """Return the head for a part of the vocabulary."""
        other, own = super().cut(part, parts), chunk(self.vocabulary, parts, part)
        other.tied = dict.fromkeys(self.tied, (own.stop - own.start, self.width))
        return other

    def output_shape(self, rows: int, group: LayerGroup) -> tuple[int, int]:
        """Return the shape of z: all tokens, this part of the vocabulary."""
        own = chunk(self.vocabulary, self.parts, self.part)
        return rows * self.length, own.stop - own.start

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        """Draw its own weight, if it has one."""
        draw(w[0], generators[0])

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        """Return z and the data for backward."""
        h = group.f(x, self.pool)
        z = self.matmul(h, w[0].T, out=self.pool.take(len(h), len(w[0])))
        if h is not x:
            self.give(h)
        return z, (x, z)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Array:
        """Return dx; add the gradient of the weight to g."""
        x, _ = saved
        h = group.f(x, self.pool)
        self.add_product(dy.T, h, g[0])
        dh = self.matmul(dy, w[0], out=self.pool.take(*h.shape))
        if h is not x:
            self.give(h)
        self.release(saved)
        return group.f_backward(dh, self.pool)

    def release(self, saved: Any) -> None:
        """Release the buffers of forward."""
        self.give(saved[1])
