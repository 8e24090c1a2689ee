"""A mixture of experts in the place of a block's feed-forward layer: each token takes `top` of E feed-forward networks.

    n = norm(x)    z = n Wr    p = softmax(z)       router, Wr (width, E), whole on each rank
    chosen: the `top` largest z, a tie to the lower index          g_c = p_c / (sum of the chosen p); top = 1: g = p
    y = x + sum over the chosen c of g_c a(n Wu_c) Wd_c            a: gelu or swiglu (feed_forward.py), without biases
          + a(n Wu_s) Wd_s           shared=N: the experts that each token passes, one network of N times the units

    capacity=f    an expert takes at most ceil(f length top / E) choices of a sequence, the first ones in the order of
                  tokens; it drops the others, which add nothing to y
    capacity=none dropless: an expert takes all of its choices

Choices are grouped by expert (kernels/routing.py), and each expert is two products on its own rows. Rows, and sums over
a token's choices, are in the order of (sequence, token, choice), so that outputs do not depend on how a batch is cut.

The objective has two more terms for each mixture and each sequence of T tokens, so that the sums over parts of a batch
add up, as those of losses do; Switch and GShard take their means over a whole batch:

    balance E sum_e f_e P_e           f_e: share of expert e in the T top choices, before drops; P_e: mean p_e
    z mean_t (log sum_e exp z_te)^2   keeps the logits small

Their gradients are added in backward; the reported losses are cross-entropies alone. f_e has no gradient. For top = 1
the gate is p, as in Switch: a normalized gate would be 1, and the router would not learn.

If ranks share the layer, each has some of the units of every expert, and one all-reduce of (tokens, top) numbers more
completes the gates' gradients. If ranks share the tokens of sequences, by a `ContextGroup`, each knows from all how
many choices of each expert lie in the chunks before its own, and in all: the former leave the rest of the room to its
tokens, the latter are f_e. If ranks share the experts, by an `ExpertGroup`, the rows of a rank's tokens go to the ranks
of their experts, and their results come back; backward the rows of dv go with their gates, and those of dx come back
with the gradients of the gates.

(Shazeer et al., "Outrageously large neural networks: the sparsely-gated mixture-of-experts layer", ICLR 2017; Lepikhin
et al., "GShard", ICLR 2021; Fedus et al., "Switch transformers", JMLR 2022; Zoph et al., "ST-MoE", 2022; Gale et al.,
"MegaBlocks", 2022; Jiang et al., "Mixtral of experts", 2024; Dai et al., "DeepSeekMoE", 2024, for shared experts)"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels import routing
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import add_into
from hpcdl.models.feed_forward import FeedForward
from hpcdl.models.group import ExpertGroup, ExpertRows, LayerGroup
from hpcdl.models.layers import check_width
from hpcdl.models.layout import INPUTS_SECOND
from hpcdl.models.model import layers_of
from hpcdl.models.pool import Pool
from hpcdl.models.transformer import DEVIATION, Architecture, TokenLayer, draw


@dataclasses.dataclass(frozen=True)
class Experts:
    """The settings of mixtures. top: experts of a token. capacity: factor of the even share of an expert's choices in a
    sequence; 0: no limit. balance, z: coefficients of the two terms of the objective. shared: number of experts that
    each token passes beside those."""

    count: int
    top: int
    capacity: float = 0.0
    balance: float = 0.01
    z: float = 0.001
    shared: int = 0

    @classmethod
    def of_settings(
        cls, told: str, count: int, top: int, capacity: str, balance: float, z: float, shared: int
    ) -> "Experts | None":
        """Return the checked settings of a spec; None for a model without experts. told: begins error messages."""
        if count < 0:
            raise UsageError(f"{told}: experts must be 1 or more, or 0 for none, not {count}")
        if count == 0:
            return None
        if not 1 <= top <= count:
            raise UsageError(f"{told}: top {top} of {count} experts; take a top from 1 to {count}")
        try:
            factor = 0.0 if capacity == "none" else float(capacity)
        except ValueError:
            factor = math.nan
        if not (math.isfinite(factor) and (factor > 0 or capacity == "none")):
            raise UsageError(f"{told}: capacity is none or a number greater than 0, as 1.25, not {capacity!r}")
        for setting, value in {"balance": balance, "z": z}.items():
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{told}: {setting} must be a finite number of at least 0, not {value}")
        if shared < 0:
            raise UsageError(f"{told}: shared must be 1 or more, or 0 for no shared experts, not {shared}")
        return cls(count, top, factor, balance, z, shared)

    def room(self, length: int) -> int:
        """Return how many choices of a sequence of `length` tokens an expert takes at most."""
        return length if not self.capacity else min(length, math.ceil(self.capacity * length * self.top / self.count))

    def slots(self, length: int, size: int = 1) -> int:
        """Return how many choices of `length` tokens, 1 / size of a sequence, all experts take at most."""
        return min(length * self.top, self.count * min(length, self.room(size * length)))


@dataclasses.dataclass
class Routes(ExpertRows):
    """The choices of a batch's tokens, and the rows of those that are not dropped. chosen, place: (tokens, top),
    source: (slots,), int64, see kernels/routing.py. counts: (sequences, experts), choices of each expert before drops,
    of all ranks that share the sequences; own: (experts,), of this rank. ends: the end of each expert's rows."""

    chosen: Array
    place: Array
    source: Array
    counts: np.ndarray
    own: np.ndarray
    ends: list[int]


class MixtureOfExperts(TokenLayer):
    """A mixture of the feed-forward networks `made_of`. counted: (2, experts), the choices and the drops of each expert
    in all backward passes of this rank, shared by copies of the layer. owners: the ranks that share the experts."""

    hidden = True
    stacked: Sequence[str] = ("up.weight", "down.weight")  # tensors whose axis 0 is the expert
    owners: ExpertGroup = ExpertGroup()

    def __init__(self, name: str, pool: Pool, architecture: Architecture, experts: Experts, made_of: type[FeedForward]):
        self.experts, self.units, width = experts, architecture.units, architecture.width
        self.network = made_of(name, pool, dataclasses.replace(architecture, biases=False))
        up = made_of.up(self.units)
        shapes: dict[str, tuple[int, ...]] = {f"norm.{each}": (width,) for each in architecture.normalization.names}
        shapes |= {"router": (width, experts.count), "up.weight": (experts.count, width, *up)}
        shapes |= {"down.weight": (experts.count, self.units, width)}
        if experts.shared:
            units = experts.shared * self.units
            shapes |= {"shared.up.weight": (width, *made_of.up(units)), "shared.down.weight": (units, width)}
        super().__init__(name, pool, architecture, shapes)
        self.cuts = {"up.weight": 1 + len(up), "down.weight": 1, "shared.up.weight": len(up), "shared.down.weight": 0}
        self.counted = np.zeros((2, experts.count), np.int64)

    @property
    def hidden_weights(self) -> dict[str, str]:
        return super().hidden_weights | dict.fromkeys(self.stacked, INPUTS_SECOND)

    def check_cut(self, parts: int) -> None:
        check_width("the experts' units", self.units, parts)

    def among(self, owners: ExpertGroup) -> Self:
        """Return a copy of this layer with this rank's experts alone."""
        other, own = copy.copy(self), owners.own(self.experts.count)
        other.owners, cut = owners, {name: (own.stop - own.start, *self.shapes[name][1:]) for name in self.stacked}
        other.shapes = self.shapes | cut
        return other

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        norms = len(self.normalization.names)
        self.normalization.initialize(w[:norms])
        for name, tensor, generator in list(zip(self.full_shapes, w, generators, strict=True))[norms:]:
            residual = math.sqrt(self.architecture.depth) if name.endswith("down.weight") else 1
            draw(tensor, generator, DEVIATION / residual)

    def matrices(self, tensors: Sequence[Array]) -> tuple[Sequence[Array], Array, Array, Array]:
        """Return the tensors of the norm, Wr, and for each own expert Wu (width, outputs) and Wd (units, width)."""
        norms = len(self.normalization.names)
        router, up, down = tensors[norms : norms + 3]
        return tensors[:norms], router, up.reshape(len(up), self.width, -1), down

    def of_shared(self, tensors: Sequence[Array]) -> tuple[Array, Array]:
        """Return Wu (width, outputs) and Wd (inputs, width) of the shared experts."""
        return tensors[-2].reshape(self.width, -1), tensors[-1]

    def sequence_length(self, tokens: int) -> int:
        """Return the length of this rank's part of a sequence."""
        return self.length

    def room(self, sequences: int) -> np.ndarray:
        """Return how many choices each expert takes of each sequence, (sequences, experts)."""
        return np.full((sequences, self.experts.count), self.experts.room(self.length * self.context.size))

    def route(self, chosen: Array) -> Routes:
        """Return the routes of chosen experts (tokens, top): which choices are taken, in which rows."""
        device, (tokens, top), count = self.pool.device, chosen.shape, self.experts.count
        length, size, chunks = self.sequence_length(tokens), self.context.size, self.context.chunks
        sequences = tokens // length if length else 0
        groups, each = sequences * chunks, length // chunks  # the rows of an expert are in the order of chunks
        counts = device.empty(groups * count, np.int64)
        routing.count_choices(counts, chosen, each, count)
        if hasattr(counts, "outlined"):  # a forecast's array has no elements: each expert gets an even share
            _, found = self.context.choices(np.zeros((sequences, chunks, count), np.int64))
            taken = sequences * self.experts.slots(length * size) // size
            ends = [taken * k // count for k in range(1, count + 1)]
            source = device.empty(tokens * top, np.int64)
            routes = Routes(chosen, chosen, source, found, found.sum(axis=0), ends)
            routes.forecast = True
            return routes
        own = device.host(counts).reshape(sequences, chunks, count).copy()
        before, found = self.context.choices(own)
        room = np.maximum(0, self.room(sequences)[:, None] - before)
        by_expert = np.minimum(own, room).reshape(groups, count).T.reshape(-1)
        starts = (np.cumsum(by_expert) - by_expert).reshape(count, groups).T.reshape(-1).copy()
        source, place = device.empty(tokens * top, np.int64), device.empty(chosen.shape, np.int64)
        limits = device.array(room.reshape(-1))
        routing.place_choices(device.array(starts), limits, chosen, each, count, place, source)
        ends = np.cumsum(by_expert.reshape(count, groups).sum(axis=1)).tolist()
        return Routes(chosen, place, source, found, own.sum(axis=(0, 1)), ends)

    def slots(self, tokens: int) -> int:
        """Return the number of rows for the choices of so many tokens: the same for all routes."""
        length = self.sequence_length(tokens)
        return tokens // length * self.experts.slots(length, self.context.size) if tokens else 0

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        (norm, router, up, down), pool, top = self.matrices(w), self.pool, self.experts.top
        away = self.owners.size > 1
        n, statistics = self.normalization.forward(x, norm, pool)
        h = group.f(n, pool)
        p = self.matmul(h, router, out=pool.take(len(h), self.experts.count))
        lse, gates = pool.take(len(h)), pool.take(len(h), top)
        chosen = pool.device.empty((len(h), top), np.int64)
        routing.choose_experts(lse, p, chosen, gates)
        routes, slots = self.route(chosen), self.slots(len(h))
        rows = self.gathered(h, routes, slots)
        common: tuple[Array, ...] = ()
        if self.experts.shared:
            wide, narrow = self.of_shared(w)
            common = pool.take(len(h), wide.shape[1]), pool.take(len(h), len(narrow))
            self.network.activate(self.matmul(h, wide, out=common[0]), None, common[1])
        self.give(h, unless=n)
        owned = self.owners.owned(routes)
        self.owners.note(self.name, owned)
        (rows,) = self.owners.to_owners((rows,), owned, pool)
        z, u = pool.take(len(rows), up.shape[2]), pool.take(len(rows), down.shape[1])
        for e, own in owned.by_expert():
            self.network.activate(self.matmul(rows[own], up[e], out=z[own]), None, u[own])
        v = pool.take(*rows.shape) if away else rows  # rows that have travelled are kept, so that they do so once
        for e, own in owned.by_expert():
            self.matmul(u[own], down[e], out=v[own])
        (v,) = self.owners.to_tokens((v,), owned, pool)
        y = self.added(v, routes, gates)
        self.give(v)
        if common:
            of_all = self.matmul(common[1], narrow, out=pool.take(*y.shape))
            add_into(y.reshape(-1), of_all.reshape(-1))
            self.give(of_all)
        y = group.g(y, pool)
        add_into(y.reshape(-1), x.reshape(-1))
        return y, (x, routes, owned, n, *statistics, *common, *([rows] if away else []), lse, p, gates, z, u, y)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Array:
        (norm, router, up, down), pool = self.matrices(w), self.pool
        norm_gradient, router_gradient, up_gradient, down_gradient = self.matrices(g)
        x, routes, owned, n, *rest, lse, p, gates, z, u, _ = saved
        many, tokens, slots = len(self.normalization.statistics), len(gates), self.slots(len(gates))
        beyond = many + (2 if self.experts.shared else 0)
        statistics, common, kept = rest[:many], rest[many:beyond], rest[beyond:]
        self.count(routes)
        full_dy = group.g_backward(dy, pool)
        if common:
            (wide, narrow), (wide_gradient, narrow_gradient) = self.of_shared(w), self.of_shared(g)
            self.add_product(common[1].T, full_dy, narrow_gradient)
            back = self.matmul(full_dy, narrow.T, out=pool.take(*common[1].shape))
            dwide = common[0] if self.network.in_place else pool.take(*common[0].shape)
            self.network.activate_backward(common[0], None, back, None, dwide)
            self.give(back)
        dv, du, dgates = self.gathered(full_dy, routes, slots), pool.take(*u.shape), pool.take(*gates.shape)
        self.give(full_dy, unless=dy)
        place, source, factors, dots = routes.place.reshape(-1), routes.source, gates.reshape(-1, 1), dgates
        if kept:  # a row has its gate, and the sum for it, beside it
            factors = pool.take(slots, 1)
            routing.gather_choices(factors[: routes.taken], gates.reshape(-1, 1), source, 1)
            dv, factors = self.owners.to_owners((dv, factors), owned, pool)
            place = source = pool.device.array(np.arange(owned.taken))
            dots = pool.take(owned.taken, 1)
        for e, own in owned.by_expert():
            self.matmul(dv[own], down[e].T, out=du[own])
        routing.dot_choices(dots.reshape(-1), place, u, du)  # v . dv = (u Wd) . dv = u . (dv Wd^T): v need not be kept
        for rows in (dv, du):
            routing.scale_choices(rows[: owned.taken], factors.reshape(-1), source)
        dz = z if self.network.in_place else pool.take(*z.shape)
        for e, own in owned.by_expert():
            self.add_product(u[own].T, dv[own], down_gradient[e])
            self.network.activate_backward(z[own], None, du[own], None, dz[own])
        self.give(dv, du)
        if kept:
            self.give(factors)
            (rows,) = kept
        if common or not kept:
            h = group.f(n, pool)
            rows = rows if kept else self.gathered(h, routes, slots)
            if common:
                self.add_product(h.T, dwide, wide_gradient)
                of_all = self.matmul(dwide, wide.T, out=pool.take(*h.shape))
                self.give(dwide, unless=common[0])
            self.give(h, unless=n)
        for e, own in owned.by_expert():
            self.add_product(rows[own].T, dz[own], up_gradient[e])
        if not kept:
            self.give(rows)
        drows = pool.take(len(u), self.width)
        for e, own in owned.by_expert():
            self.matmul(dz[own], up[e].T, out=drows[own])
        self.give(dz, unless=z)
        ones = pool.take(*gates.shape)
        ones[...] = 1
        if kept:
            drows, dots = self.owners.to_tokens((drows, dots), owned, pool)
            routing.dot_choices(dgates.reshape(-1), routes.place.reshape(-1), dots, ones.reshape(-1, 1))
            self.give(dots)
        group.all_reduce(dgates)
        dh = self.added(drows, routes, ones)
        if common:
            add_into(dh.reshape(-1), of_all.reshape(-1))
            self.give(of_all)
        dx = group.f_backward(dh, pool)
        self.give(drows, ones)
        dlogits = self.router_backward(routes, lse, p, gates, dgates)
        self.give(dgates)
        first = group.rank * len(n) if group.sequence else 0
        own_logits = dlogits[first : first + len(n)] if len(n) < tokens else dlogits
        self.add_product(n.T, own_logits, router_gradient)
        dn = self.matmul(own_logits, router.T, out=pool.take(*n.shape))
        add_into(dx.reshape(-1), dn.reshape(-1))
        self.give(dlogits, dn)
        self.normalization.backward(dx, x, norm, statistics, dx, norm_gradient)
        add_into(dx.reshape(-1), dy.reshape(-1))
        self.release(saved)
        return dx

    def release(self, saved: Any) -> None:
        self.give(*saved[3:])  # all but x and the routes

    def router_backward(self, routes: Routes, lse: Array, p: Array, gates: Array, dgates: Array) -> Array:
        """Return the gradient by the router's logits, from the pool: that of the gates, and of the objective's terms.
        The latter are of the mean over a sequence's tokens, as its loss is."""
        of, whole, dlogits = self.experts, self.length * self.context.size, self.pool.take(*p.shape)
        share = self.pool.device.array((routes.counts / (whole * of.top)).astype(self.pool.dtype))
        factors = of.balance * of.count / whole, 2 * of.z / whole
        routing.choose_experts_backward(lse, p, routes.chosen, gates, dgates, share, self.length, *factors, dlogits)
        return dlogits

    def gathered(self, x: Array, routes: Routes, slots: int) -> Array:
        """Return the row of x of each taken choice, in the order of experts, in an array of `slots` rows."""
        rows = self.pool.take(slots, self.width)
        routing.gather_choices(rows[: routes.taken], x, routes.source, self.experts.top)
        return rows

    def added(self, rows: Array, routes: Routes, factors: Array) -> Array:
        """Return for each token the sum of its choices' rows, times their factors (tokens, top), in their order."""
        y = self.pool.take(len(factors), self.width)
        y[...] = 0
        for c in range(self.experts.top):
            routing.add_placed(y, rows, routes.place, factors, c)
        return y

    def count(self, routes: Routes) -> None:
        """Count the choices and the drops; if ranks share the layer, the first of them counts."""
        if self.part == 0:
            self.counted += [routes.own, routes.own - np.diff(routes.ends, prepend=0)]


def counted_choices(model: Any) -> dict[str, np.ndarray]:
    """Return `counted` of each mixture in the model, by the layer's name; {} for a model without experts."""
    return {layer.name: layer.counted for layer in mixtures_of(model)}


def mixtures_of(model: Any) -> list[MixtureOfExperts]:
    """Return the model's mixtures; [] for a model without experts."""
    return [layer for layer in layers_of(model) or () if isinstance(layer, MixtureOfExperts)]
