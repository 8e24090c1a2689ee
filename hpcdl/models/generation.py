"""Autoregressive generation with a GPT (gpt.py): each token is drawn from the output for the tokens before it.

    z_t = outputs after tokens s .. t             p = softmax(z_t / temperature)          token t + 1 ~ p

A model has positions for `length` tokens. When the window s .. t is full, s moves, and the later half remains:

    tokens known        1  2  3  4  5  6  7  8  9        length 4
    tokens seen         1  2  3  4  2  3  4  2  3

A key-value cache keeps the keys and values of earlier tokens in each attention layer (2 x width x kv-heads / heads
numbers a token), so that a token costs 1 row instead of `length`. When s moves, the remaining half is computed again.
Latent attention (latent_attention.py) keeps the latents, R + r numbers a token, and does not expand them: it takes q to
the latents, and the sum of latents to the values, with two products a head for the new tokens alone:

    q_h . (c Wk_h) = (q_h Wk_h^T) . c           sum_s p_s (c_s Wv_h) = (sum_s p_s c_s) Wv_h"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels import activation, embedding, rotary
from hpcdl.kernels.device import Array
from hpcdl.models.attention import Attention
from hpcdl.models.latent_attention import Latent, LatentAttention
from hpcdl.models.layered import FlatWeights, Layered
from hpcdl.models.mixture import MixtureOfExperts, Routes
from hpcdl.models.pool import Pool
from hpcdl.models.transformer import Architecture, Embedding

Outputs = Callable[[Sequence[int]], Array]  # all known tokens -> z (vocabulary,), float64 on the host


def first_seen(known: int, length: int) -> int:
    """Return s, the number of the window's first token, for `known` tokens and a window of at most `length`."""
    half = max(1, length // 2)
    return 0 if known <= length else known - half - (known - length - 1) % (length - half + 1)


def cached_outputs(model: Layered, parameters: Array) -> Outputs:
    """Return `Outputs` with a key-value cache: more tokens than in the last call must begin with that call's."""
    w, device, length = FlatWeights(model, parameters).w, model.device, model.features
    layers = [cached_layer(layer) for layer in model.layers[:-1]]
    before = [0, 0]  # of the last call: s, and the number of known tokens

    def outputs(tokens: Sequence[int]) -> Array:
        start = first_seen(len(tokens), length)
        if start != before[0] or len(tokens) <= before[1]:
            before[1] = start
        at, new = before[1] - start, tokens[before[1] :]
        before[:] = start, len(tokens)
        x: Array = device.array(np.asarray(new, model.dtype).reshape(-1, 1))
        for layer, tensors in zip(layers, w, strict=False):
            if isinstance(layer, CachedAttention | CachedLatents | PositionedEmbedding | CountingMixture):
                layer.first = at
            y, saved = layer.forward(tensors, x, model.group)
            x = y.copy()
            layer.release(saved)
        return device.host(x[-1]).astype(np.float64)

    return outputs


def cached_layer(layer: Any) -> Any:
    """Return the same layer for one token per row: a new one for embedding and attention, else `layer` itself."""
    if isinstance(layer, Embedding):
        return PositionedEmbedding(layer.name, layer.pool, layer.full_shapes["token"][0], layer.architecture)
    if isinstance(layer, LatentAttention):
        return CachedLatents(layer.name, layer.pool, layer.architecture, layer.latent)
    if isinstance(layer, Attention):
        return CachedAttention(layer.name, layer.pool, layer.architecture)
    if isinstance(layer, MixtureOfExperts):
        return CountingMixture(layer.name, layer.pool, layer.architecture, layer.experts, type(layer.network))
    return layer


class PositionedEmbedding(Embedding):
    """An embedding of one token per row; the first row has the position `first`."""

    first = 0

    def forward(self, w: Sequence[Array], x: Array, group: Any) -> tuple[Array, Any]:
        token, *position = w
        y = self.pool.take(len(x), self.width)
        if embedding.embed(x, token, 0, len(token), y) < 0:
            raise UsageError(f"the text to continue holds a value that is no token number from 0 to {len(token) - 1}")
        for table in position:
            y += table[self.first : self.first + len(x)]
        return y, (x, y)


class CachedAttention(Attention):
    """Attention of the tokens from position `first` on, with cached keys and values of the earlier tokens."""

    first = 0

    def __init__(self, name: str, pool: Pool, architecture: Architecture):
        super().__init__(name, pool, architecture)
        shape = self.kv_heads, self.length, self.size
        self.keys, self.values = (pool.device.zeros(shape, pool.dtype) for _ in range(2))

    def positions(self, length: int) -> Array:
        return self.numbers[self.first : self.first + length]

    def inner(self, qkv: Array, b: Array | None) -> tuple[Array, tuple[Array, ...]]:
        if b is not None:
            activation.add_bias(qkv, b)
        new, xp = len(qkv), self.pool.device.xp
        self.rotate(qkv, new, 1)
        heads = qkv.reshape(new, -1, self.kv_heads, self.size).transpose(1, 2, 0, 3)
        q, (k, v), end = heads[:-2], heads[-2:], self.first + new
        self.keys[:, self.first : end], self.values[:, self.first : end] = k, v
        if self.first == 0:
            return self.attend(qkv, new)
        p = softmax_of_earlier(self.matmul(q, self.keys[:, :end].swapaxes(1, 2)) / math.sqrt(self.size), self.first, xp)
        a = self.pool.take(new, self.heads * self.size)
        a[...] = self.matmul(p, self.values[:, :end]).transpose(2, 0, 1, 3).reshape(new, -1)
        return a, (qkv,)


class CachedLatents(LatentAttention):
    """Latent attention of the tokens from position `first` on, with cached latents and rotated keys [c, kr]."""

    first = 0

    def __init__(self, name: str, pool: Pool, architecture: Architecture, latent: Latent):
        super().__init__(name, pool, architecture, latent)
        self.cache = pool.device.zeros((self.length, latent.latent + latent.rope), pool.dtype)

    def positions(self, length: int) -> Array:
        return self.numbers[self.first : self.first + length]

    def attention_of(self, latents: Array, w: Mapping[str, Array], length: int) -> tuple[Array, tuple[Array, ...]]:
        new, of, pool, end = len(latents), self.latent, self.pool, self.first + len(latents)
        common, turned = pool.take(new, of.rope), self.turns(new)
        common[...] = latents[:, self.after :]
        rotary.rotate(common, turned, of.rope, 1)
        before = self.after - of.latent
        self.cache[self.first : end, : of.latent] = latents[:, before : self.after]
        self.cache[self.first : end, of.latent :] = common
        self.give(common, turned)
        if self.first == 0:
            return super().attention_of(latents, w, new)
        q = self.matmul(latents[:, :before], w["q_up.weight"], out=pool.take(new, self.heads * self.size))
        table = self.angles(new)
        rotary.rotate(q, table, q.shape[1], 1)
        self.give(table)
        heads = q.reshape(new, self.heads, self.size).transpose(1, 0, 2)
        of_keys, of_values = w["kv_up.weight"].reshape(of.latent, 2, self.heads, of.head).transpose(1, 2, 0, 3)
        c, keys = self.cache[:end, : of.latent], self.cache[:end, of.latent :]
        scores = self.matmul(self.matmul(heads[:, :, of.rope :], of_keys.swapaxes(1, 2)), c.T)
        scores = (scores + self.matmul(heads[:, :, : of.rope], keys.T)) / math.sqrt(self.size)
        p = softmax_of_earlier(scores, self.first, pool.device.xp)
        a = pool.take(new, self.heads * self.size)
        found = self.matmul(self.matmul(p, c), of_values).transpose(1, 0, 2)
        a.reshape(new, self.heads, self.size)[:, :, of.rope :] = found
        return a, (q,)


def softmax_of_earlier(scores: Array, first: int, xp: Any) -> Array:
    """Return the softmax of scores (..., tokens from position `first` on, all tokens) over tokens not later."""
    new, end = scores.shape[-2:]
    scores = xp.where(xp.arange(end) <= first + xp.arange(new)[:, None], scores, -math.inf)
    p = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True)).astype(scores.dtype)


class CountingMixture(MixtureOfExperts):
    """A mixture of the tokens from position `first` on; the choices of earlier tokens count for the capacity."""

    first = 0

    def sequence_length(self, tokens: int) -> int:
        return tokens

    def room(self, sequences: int) -> np.ndarray:
        if self.first == 0:
            self.counted[:] = 0
        return np.maximum(0, super().room(sequences) - self.counted[0])

    def route(self, chosen: Array) -> Routes:
        routes = super().route(chosen)
        self.count(routes)
        return routes

    def slots(self, tokens: int) -> int:
        return tokens * self.experts.top
