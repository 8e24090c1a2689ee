"""The interface of tensor parallelism: Megatron's operators f and g, which connect the parts of a layer.

A product with a weight cut by columns computes a part of the outputs from all inputs. A product with a weight cut by
rows computes a summand of all outputs from a part of the inputs. f precedes the first product, g follows the second:

    operator    forward                backward                with sequence parallelism
    f           x unchanged            sum of all parts' dx    all rows of x; backward: own rows of the sum
    g           sum of all parts' y    dy unchanged            own rows of the sum; backward: all rows of dy

With sequence parallelism each rank holds 1 / size of the rows of an array outside of f ... g, so f and g return another
array. (Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation", 2022)
The interface of context parallelism is `ContextGroup`: ranks that hold different tokens of the same sequences. That of
expert parallelism is `ExpertGroup`: ranks that hold different experts, and tokens of different sequences.

    method               takes                        returns
    f, g_backward        an array of the caller's     that array, or another one that the caller gives back to the pool
    g, f_backward        an array from the pool       that array, or another one from the pool in exchange"""

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from hpcdl.chunks import chunk, zigzag
from hpcdl.kernels import attention
from hpcdl.kernels.device import Array, Device
from hpcdl.models.pool import Pool


class LayerGroup(Protocol):
    """The ranks that share a layer; comm/tensor_group.py implements it. sequence: True with sequence parallelism."""

    rank: int
    size: int
    sequence: bool

    def f(self, x: Array, pool: Pool) -> Array: ...
    def f_backward(self, x: Array, pool: Pool) -> Array: ...
    def g(self, x: Array, pool: Pool) -> Array: ...
    def g_backward(self, x: Array, pool: Pool) -> Array: ...
    def all_reduce(self, array: Array, op: str = "sum") -> None: ...


class IdentityGroup:
    """The group of a layer that is not cut: all operators are identities."""

    rank, size = 0, 1
    sequence = False

    def f(self, x: Array, pool: Pool) -> Array:
        return x

    f_backward = g = g_backward = f

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Leave the array unchanged."""


class ContextGroup:
    """The ranks that share the tokens of sequences: here one that has all; ring_attention.py and ulysses.py in
    hpcdl/parallel/ share them among several. length: tokens of a sequence on this rank. chunks: those of a sequence on
    this rank, of equal lengths.
    qkv: (sequences * length, (heads + 2 kv_heads) * size), from the pool, which `attention` keeps or gives back.
    a, da: (sequences * length, heads * size)."""

    rank, size, chunks = 0, 1, 1

    def tokens(self, length: int) -> list[slice]:
        """Return this rank's tokens of a sequence of `length` tokens in all, in their order."""
        return zigzag(length, self.size, self.rank)

    def own_tokens(self, x: Array, axis: int, device: Device) -> Array:
        """Return this rank's tokens of x, an array of this device, along this axis, contiguous."""
        if self.size == 1:
            return x
        before = (slice(None),) * axis
        return device.xp.concatenate([x[(*before, part)] for part in self.tokens(x.shape[axis])], axis=axis)

    def check_heads(self, heads: int) -> None:
        """Raise UsageError if the ranks cannot share so many heads of keys."""

    def attention(self, qkv: Array, length: int, heads: int, size: int, pool: Pool) -> tuple[Array, tuple[Array, ...]]:
        """Return the attention of this rank's queries to all tokens before them, and arrays saved for backward."""
        a, lse = pool.take(len(qkv), heads * size), pool.take(len(qkv), heads)
        attention.causal_attention(qkv, length, size, 1 / math.sqrt(size), a, lse)
        return a, (qkv, lse)

    def attention_backward(
        self, saved: tuple[Array, ...], a: Array, da: Array, length: int, size: int, pool: Pool
    ) -> Array:
        """Return the gradient by qkv, from the pool."""
        qkv, lse = saved
        dqkv = pool.take(*qkv.shape)
        attention.causal_attention_backward(qkv, a, da, lse, length, size, 1 / math.sqrt(size), dqkv)
        return dqkv

    def choices(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how many choices of each expert lie in all chunks before each chunk, and in whole sequences
        (sequences, experts). counts: of this rank's chunks, int64 (sequences, chunks, experts). Collective."""
        return np.zeros_like(counts), counts.sum(axis=1)


class ExpertRows:
    """The rows of a mixture's experts, one expert's after another's. ends: the end of each expert's rows.
    forecast: True if rows have no elements: all experts then have as many, and the first one stands for all."""

    forecast = False

    def __init__(self, ends: list[int]):
        self.ends = ends

    @property
    def taken(self) -> int:
        """The number of rows."""
        return self.ends[-1]

    def by_expert(self) -> Iterator[tuple[int, slice]]:
        """Yield (expert, its rows) for each expert with rows."""
        start = 0
        for expert, end in enumerate(self.ends):
            if end > start:
                yield expert, slice(start, end)
                if self.forecast:
                    return
            start = end


class ExpertGroup:
    """The ranks that share the experts of mixtures: here one that has all; hpcdl/parallel/expert.py shares them among
    several. A rank has the experts `own` of all, in equal numbers, and sends the rows of its tokens to their owners.
    arrays: (rows, k) each, by expert; those of this rank's tokens may be longer. They are given back to the pool."""

    rank, size = 0, 1

    def clear(self) -> None:
        """Begin to count messages."""

    def note(self, mixture: str, owned: ExpertRows) -> None:
        """Note the rows of this rank's experts in a forward pass of the layer of this name."""

    def end_step(self, pool: Pool) -> None:
        """End a step of training. pool: of the activations."""

    def own(self, experts: int) -> slice:
        """Return this rank's experts of `experts` in all."""
        return chunk(experts, self.size, self.rank)

    def owned(self, sent: ExpertRows) -> ExpertRows:
        """Return the rows of this rank's experts, of all ranks' tokens. sent: of this rank's tokens. Collective."""
        return sent

    def to_owners(self, arrays: Sequence[Array], owned: ExpertRows, pool: Pool) -> list[Array]:
        """Return arrays, from the pool, with the rows `owned`, for those of this rank's tokens; collective."""
        return list(arrays)

    def to_tokens(self, arrays: Sequence[Array], owned: ExpertRows, pool: Pool) -> list[Array]:
        """Return arrays, from the pool, with the rows of this rank's tokens, for those `owned`; collective."""
        return list(arrays)
