"""Autoregressive generation with a GPT: each token is drawn from the model's output for the tokens before it.

    z_t = outputs after tokens s .. t             p = softmax(z_t / temperature)          token t + 1 ~ p

A model has positions for `length` tokens. When the window s .. t is full, s moves, and the later half remains:

    tokens known        1  2  3  4  5  6  7  8  9        length 4
    tokens seen         1  2  3  4  2  3  4  2  3

`full_outputs`, the reference, computes the whole window for each token. `cached_outputs` has a key-value cache: it
keeps the keys and values of earlier tokens in each attention layer (2 x width numbers a token), so that a token costs 1
row instead of `length`. When s moves, the remaining half is computed again.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels import activation, embedding
from hpcdl.kernels.device import Array
from hpcdl.models.layered import FlatWeights, Layered
from hpcdl.models.pool import Pool
from hpcdl.models.transformer import Attention, Embedding

Outputs = Callable[[Sequence[int]], Array]  # all known tokens -> z (vocabulary,), float64 on the host


def first_seen(known: int, length: int) -> int:
    """Return s, the first token of the window, for `known` tokens."""
    half = max(1, length // 2)
    return 0 if known <= length else known - half - (known - length - 1) % (length - half + 1)


def full_outputs(model: Layered, parameters: Array) -> Outputs:
    """Return the outputs after the last token, with the whole window computed for each token."""
    w, device, length = FlatWeights(model, parameters), model.device, model.features

    def outputs(tokens: Sequence[int]) -> Array:
        seen = tokens[first_seen(len(tokens), length) :]
        x = np.zeros((1, length), model.dtype)
        x[0, : len(seen)] = seen  # attention is causal: the padding has no effect
        z, saved = model.forward(w, device.array(x), range(len(model.layers) - 1), keep=False)
        found = device.host(z[len(seen) - 1]).astype(np.float64)
        model.release(saved)
        return found

    return outputs


def cached_outputs(model: Layered, parameters: Array) -> Outputs:
    """Return the outputs with a key-value cache; each call must have one token more than the last."""
    w, device, length = FlatWeights(model, parameters).w, model.device, model.features
    layers = [cached_layer(layer) for layer in model.layers[:-1]]
    before = [0, 0]  # s and the number of known tokens, in the last call

    def outputs(tokens: Sequence[int]) -> Array:
        start = first_seen(len(tokens), length)
        if start != before[0] or len(tokens) <= before[1]:
            before[1] = start
        at, new = before[1] - start, tokens[before[1] :]
        before[:] = start, len(tokens)
        x: Array = device.array(np.asarray(new, model.dtype).reshape(-1, 1))
        for layer, tensors in zip(layers, w, strict=False):
            if isinstance(layer, CachedAttention | PositionedEmbedding):
                layer.first = at
            y, saved = layer.forward(tensors, x, model.group)
            x = y.copy()
            layer.release(saved)
        return device.host(x[-1]).astype(np.float64)

    return outputs


def cached_layer(layer: Any) -> Any:
    """Return a layer for one token in a row; only the embedding and attention need one of their own."""
    if isinstance(layer, Embedding):
        shapes = layer.full_shapes
        return PositionedEmbedding(
            layer.name, layer.pool, shapes["token"][0], shapes["position"][0], layer.length, layer.width
        )
    if isinstance(layer, Attention):
        return CachedAttention(layer.name, layer.pool, layer.length, layer.width, layer.heads, layer.depth)
    return layer


class PositionedEmbedding(Embedding):
    """An embedding with one token in a row, from position `first` on."""

    first = 0

    def forward(self, w: Sequence[Array], x: Array, group: Any) -> tuple[Array, Any]:
        token, position = w
        y = self.pool.take(len(x), self.width)
        if embedding.embed(x, token, 0, len(token), y) < 0:
            raise UsageError(f"what a gpt goes on from is no token number from 0 to {len(token) - 1}")
        y += position[self.first : self.first + len(x)]
        return y, (x, y)


class CachedAttention(Attention):
    """Attention of the tokens from position `first` on, with cached keys and values of those before."""

    first = 0

    def __init__(self, name: str, pool: Pool, length: int, width: int, heads: int, depth: int):
        super().__init__(name, pool, length, width, heads, depth)
        self.keys, self.values = (pool.device.zeros((heads, length, self.size), pool.dtype) for _ in range(2))

    def inner(self, qkv: Array, b: Array) -> tuple[Array, tuple[Array, ...]]:
        """softmax(mask(q k^T / sqrt(d))) v of each head for the new rows, the mask by their positions."""
        activation.add_bias(qkv, b)
        new, xp = len(qkv), self.pool.device.xp
        q, k, v = qkv.reshape(new, 3, self.heads, self.size).transpose(1, 2, 0, 3)
        end = self.first + new
        self.keys[:, self.first : end], self.values[:, self.first : end] = k, v
        scores = self.matmul(q, self.keys[:, :end].swapaxes(1, 2)) / math.sqrt(self.size)
        scores = xp.where(xp.arange(end) <= self.first + xp.arange(new)[:, None], scores, -math.inf)
        p = xp.exp(scores - scores.max(axis=2, keepdims=True))
        p = (p / p.sum(axis=2, keepdims=True)).astype(qkv.dtype)
        a = self.pool.take(new, self.heads * self.size)
        a[...] = self.matmul(p, self.values[:, :end]).transpose(1, 0, 2).reshape(new, -1)
        return a, (qkv,)


def generate(
    outputs: Outputs, prompt: Sequence[int], count: int, random: np.random.Generator, temperature: float = 1.0
) -> list[int]:
    """Return `count` tokens that follow `prompt`, each drawn from the softmax of z / temperature.

    Temperature 0 takes the most probable token. An empty prompt is token 0. Raises UsageError if z is not finite.
    """
    tokens = list(prompt) or [0]
    start = len(tokens)
    for _ in range(count):
        z = outputs(tokens)
        if not np.isfinite(z).all():
            raise UsageError("the model's outputs are no numbers: its training diverged; take an older checkpoint")
        if temperature == 0:
            tokens.append(int(z.argmax()))
            continue
        with np.errstate(over="ignore"):  # close to temperature 0
            p = np.exp((z - z.max()) / temperature)
        tokens.append(int(random.choice(len(p), p=p / p.sum())))
    return tokens[start:]
