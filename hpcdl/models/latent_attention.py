"""Multi-head latent attention, as DeepSeek-V2 and V3 have it: keys and values of all heads come from one short vector.

    c = rms(n Wc)     kr = n Wr                n = norm(x); the latent, R numbers a token, and one key for all heads
    cq = rms(n Wdq)   q_h = cq Wuq_h           queries from a latent of their own; query-latent=0: q_h = n Wuq_h
    k_h = [rotated kr, c Wk_h]    v_h = c Wv_h                            q_h = [rotated r elements, d elements]
    a_h = softmax(mask(q_h k_h^T / sqrt(r + d))) v_h                      y = x + [a_1 ... a_heads] Wo

    tensors        q_down (width, Rq), q_up (Rq, heads (r + d)), kv_down (width, R), k_rope (width, r),
                   kv_up (R, 2, heads d), out (heads d, width), the gains of the norm and of both latents; no biases
    cache          R + r numbers a token (hpcdl/models/generation.py), where heads of their own have 2 heads d

Ranks that share the layer each have some heads: q_up, kv_up and out are cut, all else are copies. f comes after the
down-projections: its messages have Rq + R + r numbers a token, or width + R + r, where other attention has width.

Training expands k_h and v_h, so that the attention of any `ContextGroup` fits, which has one width for q, k and v: v_h
has r zeros before it. That is 2 (r + d) numbers for r + 2 d in products of scores (V3: 1.2 times the flops), and
q, k, v and a of r + d numbers a head are kept for backward. Ring attention sends expanded keys and values, too.

Elsewhere the r elements stand behind the d: another order of columns. (DeepSeek-AI, "DeepSeek-V2: a strong, economical,
and efficient mixture-of-experts language model", 2024, section 2.1; "DeepSeek-V3 technical report", 2024)"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels import rotary
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import add_into
from hpcdl.models.attention import Attention
from hpcdl.models.group import LayerGroup
from hpcdl.models.layers import check_width
from hpcdl.models.normalization import RMSNormalization
from hpcdl.models.pool import Pool
from hpcdl.models.transformer import DEVIATION, Architecture, draw


@dataclasses.dataclass(frozen=True)
class Latent:
    """The widths of latent attention. latent: of the vector of keys and values, R. queries: of the queries' own, Rq; 0:
    none. rope: elements of a head that are rotated, r; the keys' are common to all heads. head: all others, d."""

    latent: int
    queries: int
    rope: int
    head: int

    @classmethod
    def of_settings(
        cls, told: str, latent: int, query_latent: int, rope_width: int, head_width: int, width: int, heads: int
    ) -> "Latent | None":
        """Return the checked settings of a spec; None for attention without a latent. told: begins error messages."""
        settings = {"latent": latent, "query-latent": query_latent, "rope-width": rope_width, "head-width": head_width}
        for setting, value in settings.items():
            if value < 0:
                raise UsageError(f"{told}: {setting} must be 1 or more, or 0 for the default, not {value}")
        if not latent:
            if any(settings.values()):
                raise UsageError(
                    f"{told}: query-latent, rope-width and head-width are settings of latent attention: add latent=64"
                )
            return None
        head = head_width or max(1, width // heads)
        rope = rope_width or max(2, head // 4 * 2)
        if rope % 2:
            raise UsageError(f"{told}: rotary positions turn pairs, and rope-width is {rope}; take an even number")
        return cls(latent, query_latent, rope, head)


class LatentAttention(Attention):
    """Causal self-attention with `heads` heads of `size` = rope + head elements, from latent vectors."""

    cuts: Mapping[str, int] = {"q_up.weight": 1, "kv_up.weight": 2, "out.weight": 0}

    def __init__(self, name: str, pool: Pool, architecture: Architecture, latent: Latent):
        self.latent, self.after = latent, (latent.queries or architecture.width) + latent.latent
        super().__init__(name, pool, dataclasses.replace(architecture, biases=False, kv_heads=architecture.heads))

    def tensors(self, architecture: Architecture) -> tuple[int, dict[str, tuple[int, ...]], Mapping[str, int]]:
        of, width = self.latent, architecture.width
        size, columns = of.rope + of.head, self.heads * of.head
        shapes: dict[str, tuple[int, ...]] = {}
        if of.queries:
            shapes |= {"q_down.weight": (width, of.queries), "q_norm.gain": (of.queries,)}
        shapes |= {"q_up.weight": (of.queries or width, self.heads * size)}
        shapes |= {
            "kv_down.weight": (width, of.latent),
            "k_rope.weight": (width, of.rope),
            "kv_norm.gain": (of.latent,),
        }
        return size, shapes | {"kv_up.weight": (of.latent, 2, columns), "out.weight": (columns, width)}, self.cuts

    def check_cut(self, parts: int) -> None:
        check_width("heads", self.heads, parts)

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        self.normalization.initialize(w[: len(self.normalization.names)])
        for name, tensor, generator in zip(self.full_shapes, w, generators, strict=True):
            if name.endswith("_norm.gain"):
                tensor[...] = 1
            elif name.endswith("weight"):
                draw(tensor, generator, DEVIATION / (math.sqrt(self.architecture.depth) if name == "out.weight" else 1))

    def by_name(self, tensors: Sequence[Array]) -> dict[str, Array]:
        """Return the matrices and gains by name; all matrices have two axes."""
        named = dict(zip(self.shapes, tensors, strict=True))
        return named | {"kv_up.weight": named["kv_up.weight"].reshape(self.latent.latent, -1)}

    def angles(self, length: int) -> Array:
        """Return the table of a head's rotations: of the first r elements by positions, of the others none."""
        rope = self.latent.rope
        turned, table = self.turns(length), self.pool.take(length, self.size)
        table[:, :rope] = turned
        table[:, rope::2], table[:, rope + 1 :: 2] = 1, 0
        self.pool.give(turned)
        return table

    def turns(self, length: int) -> Array:
        """Return the table of rotations of the first r elements, (length, r), from the pool."""
        turned = self.pool.take(length, self.latent.rope)
        rotary.rotations(turned, self.positions(length), self.architecture.rope_base)
        return turned

    def latents(self, n: Array, w: Mapping[str, Array]) -> tuple[Array, tuple[Array, ...]]:
        """Return [cq or n, c, kr] of each token, and what their backward needs: the latents before their norms, each
        followed by its statistics."""
        of, pool, saved = self.latent, self.pool, list[Array]()
        latents = pool.take(len(n), self.after + of.rope)
        for kind, start, stop in self.normed():
            raw = self.matmul(n, w[f"{kind}_down.weight"], out=pool.take(len(n), stop - start))
            c, statistics = RMSNormalization.forward(raw, [w[f"{kind}_norm.gain"]], pool)
            latents[:, start:stop] = c
            pool.give(c)
            saved += [raw, *statistics]
        if not of.queries:
            latents[:, : self.width] = n
        self.matmul(n, w["k_rope.weight"], out=latents[:, self.after :])
        return latents, tuple(saved)

    def normed(self) -> list[tuple[str, int, int]]:
        """Return (name, first column, last column) in `latents` of those that are normalized."""
        first = self.after - self.latent.latent
        queries = [("q", 0, self.latent.queries)] if self.latent.queries else []
        return [*queries, ("kv", first, self.after)]

    def expanded(self, latents: Array, w: Mapping[str, Array]) -> Array:
        """Return q, k and v of the own heads, (tokens, 3 heads (r + d)), before rotation."""
        tokens, rope, first = len(latents), self.latent.rope, self.after - self.latent.latent
        own = self.heads // self.parts
        qkv, kv = self.pool.take(tokens, 3 * own * self.size), self.pool.take(tokens, 2 * own * self.latent.head)
        self.matmul(latents[:, :first], w["q_up.weight"], out=qkv[:, : own * self.size])
        self.matmul(latents[:, first : self.after], w["kv_up.weight"], out=kv)
        heads = qkv.reshape(tokens, 3, own, self.size)
        heads[:, 1:, :, rope:] = kv.reshape(tokens, 2, own, self.latent.head)
        heads[:, 1, :, :rope] = latents[:, self.after :].reshape(tokens, 1, rope)
        heads[:, 2, :, :rope] = 0
        self.pool.give(kv)
        return qkv

    def values(self, a: Array) -> Array:
        """Return the attention without the columns of v's zeros, (tokens, heads d)."""
        heads, u = self.heads // self.parts, self.pool.take(len(a), self.heads // self.parts * self.latent.head)
        u.reshape(len(a), heads, self.latent.head)[...] = a.reshape(len(a), heads, self.size)[:, :, self.latent.rope :]
        return u

    def attention_of(self, latents: Array, w: Mapping[str, Array], length: int) -> tuple[Array, tuple[Array, ...]]:
        """Return a of sequences of `length` tokens, and arrays saved for backward."""
        qkv = self.expanded(latents, w)
        self.rotate(qkv, length, 1)
        return self.attend(qkv, length)

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        named, pool = self.by_name(w), self.pool
        n, statistics = self.normalization.forward(x, w[: len(self.normalization.names)], pool)
        latents, of_latents = self.latents(n, named)
        full = group.f(latents, pool)
        a, of_attention = self.attention_of(full, named, self.length)
        self.give(full, unless=latents)
        u = self.values(a)
        y = group.g(self.matmul(u, named["out.weight"], out=pool.take(len(u), self.width)), pool)
        self.give(u)
        add_into(y.reshape(-1), x.reshape(-1))
        return y, (x, n, latents, a, *statistics, *of_latents, *of_attention, y)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Array:
        (x, n, latents, a, *rest, _), named, gradient, pool = saved, self.by_name(w), self.by_name(g), self.pool
        names, many = len(self.normalization.names), len(self.normalization.statistics)
        ends = many + 2 * len(self.normed())
        statistics, of_latents, of_attention = rest[:many], rest[many:ends], rest[ends:]
        full_dy, u = group.g_backward(dy, pool), self.values(a)
        self.add_product(u.T, full_dy, gradient["out.weight"])
        du = self.matmul(full_dy, named["out.weight"].T, out=pool.take(*u.shape))
        self.give(u)
        self.give(full_dy, unless=dy)
        da, own = pool.take(*a.shape), self.heads // self.parts
        by_head = da.reshape(len(a), own, self.size)
        by_head[:, :, : self.latent.rope] = 0
        by_head[:, :, self.latent.rope :] = du.reshape(len(a), own, self.latent.head)
        self.give(du)
        dqkv = self.context.attention_backward(tuple(of_attention), a, da, self.length, self.size, pool)
        self.give(da)
        self.rotate(dqkv, self.length, -1)
        full = group.f(latents, pool)
        dlatents = group.f_backward(self.expanded_backward(dqkv, full, named, gradient), pool)
        self.give(dqkv)
        self.give(full, unless=latents)
        dx = self.latents_backward(dlatents, n, of_latents, named, gradient)
        self.give(dlatents)
        self.normalization.backward(dx, x, w[:names], statistics, dx, g[:names])
        add_into(dx.reshape(-1), dy.reshape(-1))
        self.release(saved)
        return dx

    def expanded_backward(self, dqkv: Array, latents: Array, w: Mapping[str, Array], g: Mapping[str, Array]) -> Array:
        """Return the gradient by `latents`, the summand of the own heads; add those of q_up and kv_up."""
        tokens, rope, first = len(dqkv), self.latent.rope, self.after - self.latent.latent
        own, dlatents = self.heads // self.parts, self.pool.take(*latents.shape)
        dq, heads = dqkv[:, : own * self.size], dqkv.reshape(tokens, 3, own, self.size)
        self.add_product(latents[:, :first].T, dq, g["q_up.weight"])
        self.matmul(dq, w["q_up.weight"].T, out=dlatents[:, :first])
        dkv = self.pool.take(tokens, 2 * own * self.latent.head)
        dkv.reshape(tokens, 2, own, self.latent.head)[...] = heads[:, 1:, :, rope:]
        self.add_product(latents[:, first : self.after].T, dkv, g["kv_up.weight"])
        self.matmul(dkv, w["kv_up.weight"].T, out=dlatents[:, first : self.after])
        self.give(dkv)
        heads[:, 1, :, :rope].sum(axis=1, out=dlatents[:, self.after :])
        return dlatents

    def latents_backward(
        self, dlatents: Array, n: Array, saved: Sequence[Array], w: Mapping[str, Array], g: Mapping[str, Array]
    ) -> Array:
        """Return the gradient by n, from the pool; add those of the down-projections and of the gains."""
        pool, drope = self.pool, dlatents[:, self.after :]
        self.add_product(n.T, drope, g["k_rope.weight"])
        dn = self.matmul(drope, w["k_rope.weight"].T, out=pool.take(*n.shape))
        if not self.latent.queries:
            dn += dlatents[:, : self.width]
        for i, (kind, start, stop) in enumerate(self.normed()):
            (raw, *statistics), gain, down = saved[2 * i : 2 * i + 2], f"{kind}_norm.gain", f"{kind}_down.weight"
            dc = pool.take(*raw.shape)
            dc[...] = dlatents[:, start:stop]
            RMSNormalization.backward(dc, raw, [w[gain]], statistics, dc, [g[gain]])
            self.add_product(n.T, dc, g[down])
            more = self.matmul(dc, w[down].T, out=pool.take(*n.shape))
            add_into(dn.reshape(-1), more.reshape(-1))
            self.give(dc, more)
        return dn
