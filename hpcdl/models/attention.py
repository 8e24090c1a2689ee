"""Causal self-attention, the first sublayer of a transformer's block: multi-head, grouped-query, with rotary positions.

    q, k, v = norm(x) Wqkv + bqkv, by heads        q, k <- rotated by their positions, or as they are
    a_h = softmax(mask(q_h k_g^T / sqrt(d))) v_g   g = h mod kv                 y = x + [a_1 ... a_heads] Wo + bo

    kv = heads        multi-head          Vaswani et al., "Attention is all you need", 2017
    kv < heads        grouped-query       heads / kv queries share a key and a value: Ainslie et al., "GQA: training
                                          generalized multi-query transformer models", EMNLP 2023
    rotary            by token's position Su et al., "RoFormer", 2021 (kernels/rotary.py)

Wqkv is (width, heads / kv + 2, kv d): the heads of q in rows of kv heads, then those of k and of v. So a cut along the
last axis gives a rank whole groups, and the layer of a rank is the same layer with fewer groups. Another order of the
query heads in a group, as h div (heads / kv) elsewhere, permutes columns of Wqkv and rows of Wo."""

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels import activation, rotary
from hpcdl.kernels.device import Array
from hpcdl.models.group import ContextGroup
from hpcdl.models.layers import check_width
from hpcdl.models.layout import OUTPUTS_LAST
from hpcdl.models.pool import Pool
from hpcdl.models.transformer import Architecture, Sublayer


class Attention(Sublayer):
    """Causal self-attention: `heads` heads of `size` = width / heads elements, and `kv_heads` of keys and values."""

    def __init__(self, name: str, pool: Pool, architecture: Architecture):
        self.heads, self.kv_heads = architecture.heads, architecture.kv_heads
        self.size, shapes, self.cuts = self.tensors(architecture)
        super().__init__(name, pool, architecture, shapes)
        self.numbers = pool.device.array(np.arange(self.length))

    def tensors(self, architecture: Architecture) -> tuple[int, dict[str, tuple[int, ...]], Mapping[str, int]]:
        """Return the elements of a head, and the shapes and cuts of the layer's tensors but for its norm's."""
        width, group = architecture.width, self.heads // self.kv_heads
        size = width // self.heads
        columns = self.kv_heads * size
        shapes = {"qkv.weight": (width, group + 2, columns), "qkv.bias": (group + 2, columns)}
        shapes |= {"out.weight": (group, columns, width) if group > 1 else (width, width), "out.bias": (width,)}
        return size, shapes, {"qkv.weight": 2, "qkv.bias": 1, "out.weight": 1 if group > 1 else 0}

    @property
    def hidden_weights(self) -> dict[str, str]:
        return super().hidden_weights | {"out.weight": OUTPUTS_LAST}

    def within(self, context: ContextGroup) -> Self:
        other = super().within(context)
        places = [np.arange(part.start, part.stop) for part in context.tokens(self.length)]
        other.numbers = self.pool.device.array(np.concatenate(places))
        return other

    def check_cut(self, parts: int) -> None:
        if self.kv_heads == self.heads:
            check_width("heads", self.heads, parts)
        elif self.kv_heads % parts:
            ranks = " or ".join(str(n) for n in range(1, self.kv_heads + 1) if self.kv_heads % n == 0)
            fit = " or ".join(str(n) for n in range(parts, self.heads + 1, parts) if self.heads % n == 0)
            instead = f"kv-heads={fit}" if fit else f"heads and kv-heads that are multiples of {parts}"
            raise UsageError(
                f"kv-heads {self.kv_heads} cannot be divided evenly among {parts} ranks; "
                f"take {ranks} ranks for each layer, or {instead}"
            )

    def positions(self, length: int) -> Array:
        """Return the positions of the `length` tokens of a sequence, in the order of the rows, int64 (length,)."""
        return self.numbers[:length]

    def rotate(self, qkv: Array, length: int, sign: int) -> None:
        """Rotate q and k, or their gradients, in place by the positions' angles (sign 1), or back (sign -1)."""
        if self.architecture.rope_base:
            table = self.angles(length)
            rotary.rotate(qkv, table, (self.heads + self.kv_heads) // self.parts * self.size, sign)
            self.give(table)

    def angles(self, length: int) -> Array:
        """Return the table of a head's rotations (kernels/rotary.py), (length, size), from the pool."""
        table = self.pool.take(length, self.size)
        rotary.rotations(table, self.positions(length), self.architecture.rope_base)
        return table

    def inner(self, qkv: Array, b: Array | None) -> tuple[Array, tuple[Array, ...]]:
        if b is not None:
            activation.add_bias(qkv, b)
        self.rotate(qkv, self.length, 1)
        return self.attend(qkv, self.length)

    def attend(self, qkv: Array, length: int) -> tuple[Array, tuple[Array, ...]]:
        """Return the attention a of q, k and v in sequences of `length` tokens, and arrays saved for backward."""
        return self.context.attention(qkv, length, self.heads // self.parts, self.size, self.pool)

    def inner_backward(
        self, inner_saved: Sequence[Array], a: Array, b: Array | None, da: Array, gb: Array | None
    ) -> Array:
        dqkv = self.context.attention_backward(tuple(inner_saved), a, da, self.length, self.size, self.pool)
        self.rotate(dqkv, self.length, -1)
        if gb is not None:
            activation.add_rows(dqkv, gb)
        return dqkv
