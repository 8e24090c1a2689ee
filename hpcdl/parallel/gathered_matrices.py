"""Updates of whole matrices (Muon) of which each rank holds a part: one rank gathers a weight, and hands X back.

    rank 0    U of its parts ->  weight 1 whole:  X = Newton-Schulz(U)  -> its parts of all X    W <- W - a f X
    rank 1    U of its parts ->  weight 2 whole:  X = Newton-Schulz(U)  -> its parts of all X    W <- W - a f X

The ranks that hold the same layers, copies times expert and tensor parts, share the weights out by the flops of the
iteration (hpcdl.chunks.longest_first). What each rank along the axis expert has of a tensor of experts is a weight. A
weight that is whole on each rank that has it stays there: replicas send nothing, nor do layers with one owner. Momentum
stays where it is, cut as the parameters are. A step sends, for a weight of n elements of which its owner holds o, on a
grid with c copies, those along the axis expert among them:

    to the owner        n - o values             the first rank that holds an element sends it
    from the owner      ZeRO: n - o values       stage 0: c n - o values, as each copy gets its part

With even parts o = n / ranks, and ZeRO sends 2 n (1 - 1 / ranks) values a step. A rank and an owner exchange one
message each way. A rank holds U of its own parts, what other ranks send to it, and one whole weight."""

import bisect
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdl.chunks import longest_first
from hpcdl.comm import Communicator
from hpcdl.comm.grid import place
from hpcdl.kernels.device import Array
from hpcdl.models.group import ExpertGroup
from hpcdl.models.layout import Hyperslab
from hpcdl.models.part import ModelPart
from hpcdl.optim.muon import complement, largest, matrix_flops, workspace_size
from hpcdl.parallel.zero import Shards


class Piece(NamedTuple):
    """A part of a weight that rank `rank` holds. slab: maps the rank's shard to the weight. owner: gathers the weight.
    sends: True if the owner takes these elements from this rank. at: the place in a buffer of several pieces."""

    rank: int
    weight: int
    slab: Hyperslab
    owner: int
    sends: bool
    at: slice = slice(0, 0)


class GatheredMatrices:
    """The weights that `shards.optimizer` updates as whole matrices, and of which rank `rank` of `size` holds parts.
    own: this rank's pieces, in the order of the buffer `sent`. owned: other ranks' pieces of the weights that this rank
    gathers, in the order of the buffer `received`. A buffer has the pieces of one peer together."""

    def __init__(self, shards: Shards, rank: int, size: int):
        self.shards, self.rank = shards, rank
        self.rule: Any = shards.optimizer  # a Muon; in a forecast, what stands for it
        rules: Any = shards.rules
        parts = shards.part.experts.size
        self.weights = [each for weight in self.rule.weights for each in weight.stacks(parts)]
        pieces = self._assigned(self._of_all(size))
        self.own, sent = packed([each for each in pieces if each.rank == rank], lambda each: each.owner)
        mine = [each for each in pieces if each.owner == rank != each.rank]
        self.owned, received = packed(mine, lambda each: each.rank)
        make, hold = shards.device.empty, shards.memory.hold
        self.sent = hold("optimizer", make(sent, shards.part.dtype))
        self.received = hold("optimizer", make(received, shards.part.dtype))
        gathers = sorted({each.weight for each in pieces if each.owner == rank})
        self.gathers = [self.weights[number] for number in gathers]
        room = workspace_size(self.gathers) if gathers else 0
        self.workspace = hold("optimizer", make(room, shards.part.dtype))
        self.local = [(each, *self._place_of(each.slab)) for each in self.own]
        for u, rule in enumerate(rules):
            taken = sorted((at for _, unit, at in self.local if unit == u), key=lambda at: at.start)
            rule.rest = complement(taken, rule.size)

    def _of_all(self, size: int) -> list[tuple[int, int, Hyperslab]]:
        """Return (rank, number of the weight, slab) of each piece on the ranks with the same layers as this rank."""
        shards, starts = self.shards, [each.offset for each in self.weights]
        copies, (t, parts) = shards.group.size, shards.part.share
        context, experts = shards.part.context.size, shards.part.experts.size
        shape = copies // context, size // (copies * experts * parts), context, experts, parts
        _, p, _, e, _ = place(self.rank, shape)
        found = []
        for expert, other in np.ndindex(experts, parts):
            part = shards.part
            if (expert, other) != (e, t):
                group = ExpertGroup()
                group.rank, group.size = expert, experts
                part = ModelPart(part.model, part.chunks, (other, parts), experts=group)
            for d in range(copies):
                rank = int(np.ravel_multi_index((d // context, p, d % context, expert, other), shape))
                for slab, _ in shards.units_of(part, d).pieces(part.pieces()):
                    number = bisect.bisect(starts, slab.start) - 1
                    if number >= 0 and slab.size and slab.start < self.weights[number].slice.stop:
                        inside = slab._replace(start=slab.start - starts[number])
                        found.append((rank, number, inside))
        return found

    def _assigned(self, found: list[tuple[int, int, Hyperslab]]) -> list[Piece]:
        """Return the pieces with their owners, in the order of weights and ranks."""
        ranks = sorted({rank for rank, _, _ in found})
        shared = sorted({number for _, number, slab in found if slab.size < math.prod(self.weights[number].shape)})
        costs = [matrix_flops(self.weights[number]) for number in shared]
        owners = {number: ranks[k] for number, k in zip(shared, longest_first(costs, len(ranks)), strict=True)}
        first: dict[tuple[int, Hyperslab], int] = {}  # the rank that sends these elements
        for rank, number, slab in found:
            key = number, slab._replace(local=0)
            if rank == owners.get(number):
                first[key] = rank
            else:
                first.setdefault(key, rank)
        pieces = []
        for rank, number, slab in sorted(found, key=lambda each: (each[1], each[0], each[2].local)):
            owner = owners.get(number, rank)
            sends = owner == rank or first[number, slab._replace(local=0)] == rank
            pieces.append(Piece(rank, number, slab, owner, sends))
        return pieces

    def _place_of(self, slab: Hyperslab) -> tuple[int, slice]:
        """Return the unit of this rank's shard that has the piece, and the piece's slice of its part of the unit."""
        u = next(u for u, at in enumerate(self.shards.units.in_shard) if at.start <= slab.local < at.stop)
        start = slab.local - self.shards.units.in_shard[u].start
        return u, slice(start, start + slab.size)

    @property
    def messages(self) -> tuple[list[tuple[int, slice]], list[tuple[int, slice]]]:
        """The messages to owners, (owner, slice of `sent`), and back from this rank, (rank, slice of `received`)."""
        to = regions([each for each in self.own if each.sends and each.owner != self.rank], lambda each: each.owner)
        return to, regions(self.owned, lambda each: each.rank)

    def update(self, comm: Communicator, scale: float, norm: float | None) -> None:
        """Update this rank's parts of the weights, and their momentum, by scale * gradient; `Shards.update` follows.
        norm: of the full gradient, for clipping. comm: all ranks; collective."""
        rule, shards = self.rule, self.shards
        scale = rule.clipped(scale, norm) if rule.clip_norm > 0 else scale
        rate, momentum = rule.schedule(rule.step), rule.state["momentum"]
        for piece, u, at in self.local:
            v = momentum[piece.slab.local :][: piece.slab.size]
            rule.accumulate(self.sent[piece.at], shards.owned_gradients[u][at], v, scale)
        to, back = self.messages
        arriving = regions([each for each in self.owned if each.sends], lambda each: each.rank)
        exchange(comm, [(o, self.sent[at]) for o, at in to], [(r, self.received[at]) for r, at in arriving])
        self._orthogonalize()
        handed = regions([each for each in self.own if each.owner != self.rank], lambda each: each.owner)
        exchange(comm, [(r, self.received[at]) for r, at in back], [(o, self.sent[at]) for o, at in handed])
        for piece, u, at in self.local:
            rule.move(self.weights[piece.weight], shards.owned_parameters[u][at], self.sent[piece.at], rate)

    def _orthogonalize(self) -> None:
        """Replace U by X in the pieces of all weights that this rank owns."""
        pieces = [(each, self.sent) for each in self.own if each.owner == self.rank]
        pieces += [(each, self.received) for each in self.owned]
        pieces.sort(key=lambda each: each[0].weight)
        most = largest(self.gathers) if self.gathers else 0
        for number, group in itertools.groupby(pieces, key=lambda each: each[0].weight):
            weight, parts = self.weights[number], list(group)
            u = self.workspace[: math.prod(weight.shape)]
            for piece, buffer in parts:
                if piece.sends:
                    view = within(u, piece.slab)
                    view[...] = buffer[piece.at].reshape(view.shape)
            self.rule.orthogonalize(weight, u, self.workspace[most:])
            for piece, buffer in parts:
                view = within(u, piece.slab)
                buffer[piece.at].reshape(view.shape)[...] = view


def packed(pieces: list[Piece], peer: Callable[[Piece], int]) -> tuple[list[Piece], int]:
    """Return the pieces in the order of a buffer, with their places, and its length: those of a peer are together, and
    among these those that are sent to the owner come first."""
    ordered, start = [], 0
    for each in sorted(pieces, key=lambda each: (peer(each), not each.sends, each.weight, each.slab.local)):
        ordered.append(each._replace(at=slice(start, start + each.slab.size)))
        start += each.slab.size
    return ordered, start


def regions(pieces: list[Piece], peer: Callable[[Piece], int]) -> list[tuple[int, slice]]:
    """Return (peer, slice of the buffer) for packed pieces, which lie without gaps for each peer."""
    groups = [(rank, list(group)) for rank, group in itertools.groupby(pieces, key=peer)]
    return [(rank, slice(group[0].at.start, group[-1].at.stop)) for rank, group in groups]


def exchange(comm: Communicator, going: list[tuple[int, Array]], coming: list[tuple[int, Array]]) -> None:
    """Send each array to its rank, and receive each from its rank."""
    requests = [comm.iwait(array, rank) for rank, array in coming]
    requests += [comm.ipush(array, rank) for rank, array in going]
    for request in requests:
        request.wait()


def within(whole: Array, slab: Hyperslab) -> Array:
    """Return the elements of a slab as a view of a weight's vector: (blocks, length)."""
    row, column = divmod(slab.start, slab.stride)
    return whole.reshape(-1, slab.stride)[row : row + slab.blocks, column : column + slab.length]
