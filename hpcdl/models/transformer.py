"""The layers of a decoder-only transformer, which predicts each token of a sequence from the tokens before it.

    Embedding      y = token[x] + position                                       x (rows, length) token numbers
    Attention      y = x + softmax(mask(q k^T / sqrt(d))) v Wo + bo              q, k, v = norm(x) Wqkv + bqkv, by heads
    FeedForward    y = x + gelu(norm(x) Wu + bu) Wd + bd                         4 * width units
    Norm           y = gain * (x - mean) / sqrt(variance + eps) + bias           over the width
    Head           z = x Wt^T                                                    Wt (vocabulary, width), often = token

Between layers there is a row for each token, (rows * length, width). If ranks share the layers, each has some of the
heads, of the units and of the vocabulary; with sequence parallelism, some of the tokens in norms, residuals, biases:

    by columns    Wqkv, Wu (outputs), Wt (as z's columns), token (rows: vectors of its own tokens, zero for others)
    by rows       Wo, Wd (inputs)
    f, g          f before Wqkv, Wu, Wt; g after Wo, Wd, token: for a sublayer one sum forward and one backward

(Vaswani et al., "Attention is all you need", 2017; Radford et al., "Language models are unsupervised multitask
learners", 2019; Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation", 2022)"""

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
    """Fill w with normal random numbers of mean 0 and this standard deviation."""
    w[...] = deviation * generator.standard_normal(w.shape)


class TokenLayer(Layer):
    """A layer with a row for each token: `length` tokens an example, outputs with `width` columns."""

    def __init__(self, name: str, pool: Pool, length: int, width: int, shapes: dict[str, tuple[int, ...]]):
        super().__init__(name, pool, shapes)
        self.length, self.width = length, width

    def output_shape(self, rows: int, group: LayerGroup) -> tuple[int, int]:
        """Return the shape of y for `rows` examples; with sequence parallelism, for this rank's tokens."""
        return rows * self.length // (group.size if group.sequence else 1), self.width

    def normalize(self, x: Array, gain: Array, bias: Array) -> tuple[Array, Array, Array]:
        """Return norm(x), and of each row the mean and 1 / deviation, for backward; all three are from the pool."""
        y, mean, deviation = self.pool.take(*x.shape), self.pool.take(len(x)), self.pool.take(len(x))
        layer_norm.layer_norm(x, gain, bias, y, mean, deviation)
        return y, mean, deviation

    def give(self, *buffers: Array, unless: Any = None) -> None:
        """Give buffers back to the pool, except the array `unless`: an operator may return its argument itself."""
        for buffer in buffers:
            if buffer is not unless:
                self.pool.give(buffer)

    def release(self, saved: Any) -> None:
        self.give(*saved[1:])  # all but x


class Embedding(TokenLayer):
    """The sum of a vector for each token and a vector for its position."""

    cuts: Mapping[str, int] = {"token": 0}

    def __init__(self, name: str, pool: Pool, vocabulary: int, context: int, length: int, width: int):
        super().__init__(name, pool, length, width, {"token": (vocabulary, width), "position": (context, width)})

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        draw(w[0], generators[0])
        draw(w[1], generators[1])

    def at(self, y: Array, group: LayerGroup) -> int:
        return group.rank * len(y) if group.sequence else 0

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        (token, position), vocabulary = w, self.full_shapes["token"][0]
        y = self.pool.take(len(x) * self.length, self.width)
        first = chunk(vocabulary, self.parts, self.part).start
        if embedding.embed(x, token, first, vocabulary, y) < 0:
            raise UsageError(
                f"the data hold a value that is no token number from 0 to {vocabulary - 1}; a gpt reads text"
            )
        y = group.g(y, self.pool)
        embedding.add_positions(y, position, self.length, self.at(y, group))
        return y, (x, y)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> None:
        x, _ = saved
        embedding.add_positions_backward(dy, g[1], self.length, self.at(dy, group))
        full_dy = group.g_backward(dy, self.pool)
        embedding.embed_backward(x, full_dy, chunk(self.full_shapes["token"][0], self.parts, self.part).start, g[0])
        self.give(full_dy, unless=dy)
        self.release(saved)


class Sublayer(TokenLayer):
    """A sublayer of a block, y = x + inner(norm(x) W1 + b1) W2 + b2, with `inner` defined by subclasses.
    Its tensors are gain and bias of the norm, W1, b1, W2, b2, in this order. depth: number of residual sums in the
    model; the initial W2 is divided by sqrt(depth). `inner` consumes z = norm(x) W1, which is from the pool."""

    hidden = True

    @abstractmethod
    def inner(self, z: Array, b: Array) -> tuple[Array, tuple[Array, ...]]:
        """Return u, the factor of W2, from z = norm(x) W1 and b, which is b1; and arrays saved for `inner_backward`."""

    @abstractmethod
    def inner_backward(self, inner_saved: Sequence[Array], u: Array, b: Array, du: Array, gb: Array) -> Array:
        """Return dz, computed from du, in a buffer of the pool or in inner_saved[0]; add the gradient of b to gb."""

    def __init__(self, name: str, pool: Pool, length: int, width: int, depth: int, shapes: dict[str, tuple[int, ...]]):
        norm = {"norm.gain": (width,), "norm.bias": (width,)}
        super().__init__(name, pool, length, width, norm | shapes)
        self.depth = depth

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        gain, bias, first, first_bias, second, second_bias = w
        gain[...] = 1
        bias[...] = first_bias[...] = second_bias[...] = 0
        draw(first, generators[2])
        draw(second, generators[4], DEVIATION / math.sqrt(self.depth))

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        gain, bias, first, first_bias, second, second_bias = w
        n, mean, deviation = self.normalize(x, gain, bias)
        h, first = group.f(n, self.pool), first.reshape(self.width, -1)
        z = self.matmul(h, first, out=self.pool.take(len(h), first.shape[1]))
        self.give(h, unless=n)
        u, inner_saved = self.inner(z, first_bias.reshape(-1))
        y = group.g(self.matmul(u, second, out=self.pool.take(len(u), self.width)), self.pool)
        activation.add_bias_residual(y, second_bias, x)
        return y, (x, n, mean, deviation, *inner_saved, u, y)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Array:
        (gain, _, first, first_bias, second, _), (x, n, mean, deviation, *inner_saved, u, _) = w, saved
        gain_gradient, bias_gradient, first_gradient, first_bias_gradient, second_gradient, second_bias_gradient = g
        activation.add_rows(dy, second_bias_gradient)
        full_dy = group.g_backward(dy, self.pool)
        self.add_product(u.T, full_dy, second_gradient)
        du = self.matmul(full_dy, second.T, out=self.pool.take(*u.shape))
        self.give(full_dy, unless=dy)
        dz = self.inner_backward(inner_saved, u, first_bias.reshape(-1), du, first_bias_gradient.reshape(-1))
        self.give(du)
        h = group.f(n, self.pool)
        self.add_product(h.T, dz, first_gradient)
        dh = self.matmul(dz, first.reshape(self.width, -1).T, out=self.pool.take(*h.shape))
        self.give(h, unless=n)
        self.give(dz, unless=inner_saved[0])
        dx = group.f_backward(dh, self.pool)
        layer_norm.layer_norm_backward(dx, x, gain, mean, deviation, dx, gain_gradient, bias_gradient)
        add_into(dx.reshape(-1), dy.reshape(-1))
        self.release(saved)
        return dx


class Attention(Sublayer):
    """The first sublayer of a block: causal self-attention with `heads` heads of width / heads elements."""

    cuts: Mapping[str, int] = {"qkv.weight": 2, "qkv.bias": 1, "out.weight": 0}

    def __init__(self, name: str, pool: Pool, length: int, width: int, heads: int, depth: int):
        shapes = {"qkv.weight": (width, 3, width), "qkv.bias": (3, width), "out.weight": (width, width)}
        super().__init__(name, pool, length, width, depth, shapes | {"out.bias": (width,)})
        self.heads, self.size = heads, width // heads

    def check_cut(self, parts: int) -> None:
        check_width("heads", self.heads, parts)

    def inner(self, qkv: Array, b: Array) -> tuple[Array, tuple[Array, ...]]:
        activation.add_bias(qkv, b)
        return self.attend(qkv, self.length)

    def attend(self, qkv: Array, length: int) -> tuple[Array, tuple[Array, ...]]:
        """Return the attention of q, k and v in sequences of `length` tokens, and what backward needs."""
        a = self.pool.take(len(qkv), qkv.shape[1] // 3)
        lse = self.pool.take(len(qkv), self.heads // self.parts)
        attention.causal_attention(qkv, length, self.size, 1 / math.sqrt(self.size), a, lse)
        return a, (qkv, lse)

    def inner_backward(self, inner_saved: Sequence[Array], a: Array, b: Array, da: Array, gb: Array) -> Array:
        qkv, lse = inner_saved
        dqkv, scale = self.pool.take(*qkv.shape), 1 / math.sqrt(self.size)
        attention.causal_attention_backward(qkv, a, da, lse, self.length, self.size, scale, dqkv)
        activation.add_rows(dqkv, gb)
        return dqkv


class FeedForward(Sublayer):
    """The second sublayer of a block: two dense layers with a gelu between them."""

    cuts: Mapping[str, int] = {"up.weight": 1, "up.bias": 0, "down.weight": 0}

    def __init__(self, name: str, pool: Pool, length: int, width: int, depth: int):
        shapes = {"up.weight": (width, 4 * width), "up.bias": (4 * width,), "down.weight": (4 * width, width)}
        super().__init__(name, pool, length, width, depth, shapes | {"down.bias": (width,)})

    def check_cut(self, parts: int) -> None:
        check_width("4 x width =", 4 * self.width, parts)

    def inner(self, z: Array, b: Array) -> tuple[Array, tuple[Array, ...]]:
        u, z = Gelu.forward(z, b, self.pool)
        return u, (z,)

    def inner_backward(self, inner_saved: Sequence[Array], u: Array, b: Array, du: Array, gb: Array) -> Array:
        return Gelu.backward(inner_saved[0], b, du, gb)


class Norm(TokenLayer):
    """Layer norm (Ba, Kiros and Hinton, "Layer normalization", 2016)."""

    def __init__(self, name: str, pool: Pool, length: int, width: int):
        super().__init__(name, pool, length, width, {"gain": (width,), "bias": (width,)})

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        w[0][...], w[1][...] = 1, 0

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        y, mean, deviation = self.normalize(x, *w)
        return y, (x, mean, deviation, y)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Array:
        x, mean, deviation, _ = saved
        dx = self.pool.take(*x.shape)
        layer_norm.layer_norm_backward(dy, x, w[0], mean, deviation, dx, *g)
        self.release(saved)
        return dx


class Head(TokenLayer):
    """The output layer: z for each token of the vocabulary. token: the tied tensor's name; "": a weight of its own."""

    divided = True

    def __init__(self, name: str, pool: Pool, vocabulary: int, length: int, width: int, token: str = ""):
        shape = vocabulary, width
        super().__init__(name, pool, length, width, {} if token else {"weight": shape})
        self.vocabulary, self.cuts = vocabulary, {token or "weight": 0}
        self.tied = {token: shape} if token else {}

    def cut(self, part: int, parts: int) -> Self:
        other, own = super().cut(part, parts), chunk(self.vocabulary, parts, part)
        other.tied = dict.fromkeys(self.tied, (own.stop - own.start, self.width))
        return other

    def output_shape(self, rows: int, group: LayerGroup) -> tuple[int, int]:
        own = chunk(self.vocabulary, self.parts, self.part)
        return rows * self.length, own.stop - own.start

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        draw(w[0], generators[0])

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        h = group.f(x, self.pool)
        z = self.matmul(h, w[0].T, out=self.pool.take(len(h), len(w[0])))
        self.give(h, unless=x)
        return z, (x, z)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Array:
        x, _ = saved
        h = group.f(x, self.pool)
        self.add_product(dy.T, h, g[0])
        dh = self.matmul(dy, w[0], out=self.pool.take(*h.shape))
        self.give(h, unless=x)
        self.release(saved)
        return group.f_backward(dh, self.pool)
