"""The layers of a decoder-only transformer, which predicts each token of a sequence from the tokens before it.

    Embedding      y = token[x] + position                                       x (rows, length) token numbers
    Attention      y = x + softmax(mask(q k^T / sqrt(d))) v Wo + bo              attention.py, latent_attention.py
    FeedForward    y = x + gelu(norm(x) Wu + bu) Wd + bd                         feed_forward.py
    Norm           y = norm(x)                                                   normalization.py
    Head           z = x Wt^T                                                    Wt (vocabulary, width), often = token

`Architecture` holds the settings that layers share: with rotary positions there is no `position`, and without biases no
bqkv, bo, bu, bd. Between layers there is a row for each token, (rows * length, width). If ranks share the layers, each
has some of the heads, of the units and of the vocabulary; with sequence parallelism, some of the tokens in norms,
residuals, biases:

    by columns    Wqkv, Wu (outputs), Wt (as z's columns), token (rows: vectors of its own tokens, zero for others)
    by rows       Wo, Wd (inputs)
    f, g          f before Wqkv, Wu, Wt; g after Wo, Wd, token: for a sublayer one sum forward and one backward

(Vaswani et al., "Attention is all you need", 2017; Radford et al., "Language models are unsupervised multitask
learners", 2019; Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation", 2022)"""

import contextlib
import copy
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.errors import UsageError
from hpcdl.kernels import activation, embedding
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import add_into
from hpcdl.models.group import ContextGroup, LayerGroup
from hpcdl.models.layers import Layer
from hpcdl.models.normalization import LayerNormalization
from hpcdl.models.pool import Pool

DEVIATION = 0.02  # of initial weights: Radford et al., 2018


@dataclass(frozen=True)
class Architecture:
    """The settings of a transformer's layers. length: tokens of a sequence. context: rows of the table of positions.
    kv_heads: heads of keys and values. units: of a feed-forward layer. depth: number of residual sums in the model.
    rope_base: of the angles of rotary positions; 0: learned positions. biases: False if products have none."""

    length: int
    width: int
    heads: int
    kv_heads: int
    units: int
    context: int
    depth: int
    normalization: type[LayerNormalization] = LayerNormalization
    rope_base: float = 0.0
    biases: bool = True


def draw(w: Array, generator: np.random.Generator, deviation: float = DEVIATION) -> None:
    """Fill w with normal random numbers of mean 0 and this standard deviation."""
    w[...] = deviation * generator.standard_normal(w.shape)


class TokenLayer(Layer):
    """A layer with a row for each token: `length` tokens an example, outputs with `width` columns.
    context: the ranks that share the tokens of a sequence, of which each has `length`."""

    context: ContextGroup = ContextGroup()

    def __init__(self, name: str, pool: Pool, architecture: Architecture, shapes: dict[str, tuple[int, ...]]):
        super().__init__(name, pool, shapes)
        self.architecture, self.length, self.width = architecture, architecture.length, architecture.width
        self.normalization = architecture.normalization

    def within(self, context: ContextGroup) -> Self:
        """Return a copy of this uncut layer for this rank's tokens of each sequence."""
        other = copy.copy(self)
        other.context, other.length = context, self.length // context.size
        return other

    def output_shape(self, rows: int, group: LayerGroup) -> tuple[int, int]:
        """Return the shape of y for `rows` examples; with sequence parallelism, for this rank's tokens."""
        return rows * self.length // (group.size if group.sequence else 1), self.width

    def give(self, *buffers: Array, unless: Any = None) -> None:
        """Give buffers back to the pool, except the array `unless`: an operator may return its argument itself."""
        for buffer in buffers:
            if buffer is not unless:
                self.pool.give(buffer)

    def release(self, saved: Any) -> None:
        self.give(*saved[1:])  # all but x


class Embedding(TokenLayer):
    """The sum of a vector for each token and, unless positions are rotary, a vector for its position."""

    cuts: Mapping[str, int] = {"token": 0}

    def __init__(self, name: str, pool: Pool, vocabulary: int, architecture: Architecture):
        shapes: dict[str, tuple[int, ...]] = {"token": (vocabulary, architecture.width)}
        if not architecture.rope_base:
            shapes["position"] = architecture.context, architecture.width
        super().__init__(name, pool, architecture, shapes)

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        for tensor, generator in zip(w, generators, strict=True):
            draw(tensor, generator)

    def at(self, y: Array, group: LayerGroup) -> int:
        return group.rank * len(y) if group.sequence else 0

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        (token, *position), vocabulary = w, self.full_shapes["token"][0]
        y = self.pool.take(len(x) * self.length, self.width)
        first = chunk(vocabulary, self.parts, self.part).start
        if embedding.embed(x, token, first, vocabulary, y) < 0:
            raise UsageError(
                f"the data hold a value that is no token number from 0 to {vocabulary - 1}; a gpt reads text"
            )
        y = group.g(y, self.pool)
        for table in position:
            with self.own_positions(table) as own:
                embedding.add_positions(y, own, self.length, self.at(y, group))
        return y, (x, y)

    @contextlib.contextmanager
    def own_positions(self, table: Array, changed: bool = False) -> Iterator[Array]:
        """Context with the rows of `table` of this rank's tokens of a sequence, (length, width). changed: the rows are
        written back at the end."""
        if self.context.size == 1:
            yield table
            return
        own, start = self.pool.take(self.length, self.width), 0
        places = []
        for tokens in self.context.tokens(self.length * self.context.size):
            places.append((tokens, slice(start, start + tokens.stop - tokens.start)))
            start = places[-1][1].stop
        for tokens, place in places:
            own[place] = table[tokens]
        yield own
        for tokens, place in places if changed else ():
            table[tokens] = own[place]
        self.pool.give(own)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> None:
        x, _ = saved
        for table in g[1:]:
            with self.own_positions(table, changed=True) as own:
                embedding.add_positions_backward(dy, own, self.length, self.at(dy, group))
        full_dy = group.g_backward(dy, self.pool)
        embedding.embed_backward(x, full_dy, chunk(self.full_shapes["token"][0], self.parts, self.part).start, g[0])
        self.give(full_dy, unless=dy)
        self.release(saved)


class Sublayer(TokenLayer):
    """A sublayer of a block, y = x + inner(norm(x) W1 + b1) W2 + b2, with `inner` defined by subclasses.
    Its tensors are those of the norm, W1, b1, W2, b2, in this order; b1 and b2 only if the architecture has biases. The
    initial W2 is divided by the root of the architecture's depth. `inner` consumes z = norm(x) W1, from the pool."""

    hidden = True

    @abstractmethod
    def inner(self, z: Array, b: Array | None) -> tuple[Array, tuple[Array, ...]]:
        """Return u, the factor of W2, from z = norm(x) W1 and b, which is b1; and arrays saved for `inner_backward`."""

    @abstractmethod
    def inner_backward(
        self, inner_saved: Sequence[Array], u: Array, b: Array | None, du: Array, gb: Array | None
    ) -> Array:
        """Return dz, computed from du, in a buffer of the pool or in inner_saved[0]; add the gradient of b to gb."""

    def __init__(self, name: str, pool: Pool, architecture: Architecture, shapes: dict[str, tuple[int, ...]]):
        norm = {f"norm.{each}": (architecture.width,) for each in architecture.normalization.names}
        if not architecture.biases:
            shapes = {each: shape for each, shape in shapes.items() if not each.endswith(".bias")}
        super().__init__(name, pool, architecture, norm | shapes)

    def parts_of(self, tensors: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Return (those of the norm, of W1, b1, W2, b2); None for the biases if there are none."""
        n = len(self.normalization.names)
        if self.architecture.biases:
            first, first_bias, second, second_bias = tensors[n:]
            return tensors[:n], first, first_bias, second, second_bias
        return tensors[:n], tensors[n], None, tensors[n + 1], None

    def matrices(self, tensors: Sequence[Array]) -> tuple[Any, Array, Array | None, Array, Array | None]:
        """Return `parts_of` tensors, W1 (width, outputs), b1 (outputs,), W2 (inputs, width)."""
        norm, first, first_bias, second, second_bias = self.parts_of(tensors)
        flat = None if first_bias is None else first_bias.reshape(-1)
        return norm, first.reshape(self.width, -1), flat, second.reshape(-1, self.width), second_bias

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        norm, first, first_bias, second, second_bias = self.parts_of(w)
        _, of_first, _, of_second, _ = self.parts_of(generators)
        self.normalization.initialize(norm)
        draw(first, of_first)
        draw(second, of_second, DEVIATION / math.sqrt(self.architecture.depth))
        if self.architecture.biases:
            first_bias[...] = second_bias[...] = 0

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        norm, first, first_bias, second, second_bias = self.matrices(w)
        n, statistics = self.normalization.forward(x, norm, self.pool)
        h = group.f(n, self.pool)
        z = self.matmul(h, first, out=self.pool.take(len(h), first.shape[1]))
        self.give(h, unless=n)
        u, inner_saved = self.inner(z, first_bias)
        y = group.g(self.matmul(u, second, out=self.pool.take(len(u), self.width)), self.pool)
        if second_bias is None:
            add_into(y.reshape(-1), x.reshape(-1))
        else:
            activation.add_bias_residual(y, second_bias, x)
        return y, (x, n, *statistics, *inner_saved, u, y)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Array:
        (norm, first, first_bias, second, _), (x, n, *rest, u, _) = self.matrices(w), saved
        norm_gradient, first_gradient, first_bias_gradient, second_gradient, second_bias_gradient = self.matrices(g)
        many = len(self.normalization.statistics)
        statistics, inner_saved = rest[:many], rest[many:]
        if second_bias_gradient is not None:
            activation.add_rows(dy, second_bias_gradient)
        full_dy = group.g_backward(dy, self.pool)
        self.add_product(u.T, full_dy, second_gradient)
        du = self.matmul(full_dy, second.T, out=self.pool.take(*u.shape))
        self.give(full_dy, unless=dy)
        dz = self.inner_backward(inner_saved, u, first_bias, du, first_bias_gradient)
        self.give(du)
        h = group.f(n, self.pool)
        self.add_product(h.T, dz, first_gradient)
        dh = self.matmul(dz, first.T, out=self.pool.take(*h.shape))
        self.give(h, unless=n)
        self.give(dz, unless=inner_saved[0])
        dx = group.f_backward(dh, self.pool)
        self.normalization.backward(dx, x, norm, statistics, dx, norm_gradient)
        add_into(dx.reshape(-1), dy.reshape(-1))
        self.release(saved)
        return dx


class Norm(TokenLayer):
    """The normalization of each token, without a sublayer."""

    def __init__(self, name: str, pool: Pool, architecture: Architecture):
        shapes: dict[str, tuple[int, ...]] = {each: (architecture.width,) for each in architecture.normalization.names}
        super().__init__(name, pool, architecture, shapes)

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        self.normalization.initialize(w)

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        y, statistics = self.normalization.forward(x, w, self.pool)
        return y, (x, *statistics, y)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Array:
        x, *statistics, _ = saved
        dx = self.pool.take(*x.shape)
        self.normalization.backward(dy, x, w, statistics, dx, g)
        self.release(saved)
        return dx


class Head(TokenLayer):
    """The output layer: z for each token of the vocabulary. token: the tied tensor's name; "": a weight of its own."""

    divided = True

    def __init__(self, name: str, pool: Pool, vocabulary: int, architecture: Architecture, token: str = ""):
        shape = vocabulary, architecture.width
        super().__init__(name, pool, architecture, {} if token else {"weight": shape})
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
