"""Fully sharded weights (FSDP): layers are gathered one by one, and gradients reduced layer by layer.

    forward     | gather 1 | layer 1 | layer 2 | layer 3 |           each during the layer before:
                           | gather 2| gather 3|                     at most two layers are gathered
    backward    | gather 3 | layer 3 | layer 2 | layer 1 |
                           | gather 2| gather 1, scatter 3 | ...     the gradient of 3 is freed before that of 2

From stage 2 of ZeRO (zero.py) a layer's gradient has its own buffer, and is reduced when it is final; at stage 3 layers
are gathered for forward and again for backward. Where the products of a backward are left for later, the gradient of a
layer stays whole until no micro-batch has any left: one reduction for all of them.
(Zhao et al., "PyTorch FSDP", VLDB 2023)"""

import dataclasses
from collections import Counter
from typing import Any

from hpcdl.comm.requests import Request
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import add_into
from hpcdl.models.layered import FlatWeights, Weights
from hpcdl.models.layout import Tensor
from hpcdl.parallel.zero import Shards


def weights_of(shards: Shards) -> Weights:
    """Return the `Weights` of the part's layers (hpcdl/models/layered.py)."""
    if shards.stage >= 2:
        return ShardedWeights(shards)
    return FlatWeights(shards.part, shards.parameters, shards.gradient)


class ShardedWeights:
    """`Weights` of a part whose gradients (from stage 2) and parameters (at stage 3) are whole only layer by layer.
    Buffers hold at most parameters of the two largest layers, a gradient of the largest, unless more are open at once,
    as of a module's units (hpcdl/torch/units.py); `finish` frees buffers."""

    leaving: Any = None  # the gradient in reduction: buffer, and (unit, its sum, request)

    def __init__(self, shards: Shards):
        self.shards, part, units = shards, shards.part, shards.units
        self.w = part.views(shards.parameters) if shards.stage < 3 else None
        self.places: list[dict[int, slice]] = []  # of each layer: slices of its units in a buffer,
        self.tensors: list[list[Tensor]] = []  # and its tensors there
        for tensors in part.tensors:
            of = [units.unit_of(tensor.slice) for tensor in tensors]
            places, start = {}, 0
            for u in dict.fromkeys(u for u in of if u is not None):
                places[u] = slice(start, start + units.units[u].stop - units.units[u].start)
                start = places[u].stop
            self.places.append(places)
            pairs = list(zip(tensors, of, strict=True))
            starts = [0 if u is None else places[u].start + t.offset - units.units[u].start for t, u in pairs]
            self.tensors.append([dataclasses.replace(t, offset=at) for t, at in zip(tensors, starts, strict=True)])
        self.lengths = [max((place.stop for place in places.values()), default=0) for places in self.places]
        sizes = sorted(self.lengths)
        self.buffer_limits = {"parameters": sum(sizes[-2:]), "gradients": sum(sizes[-1:])}  # elements, of each kind
        self.free: dict[str, list[Array]] = {"parameters": [], "gradients": []}
        self.buffered = {"parameters": 0, "gradients": 0}
        self.gathered: dict[int, tuple[Any, list[Request]]] = {}  # layer -> buffer, and the requests that fill it
        self.open_gradients: dict[int, Any] = {}  # layer -> buffer; a chain of layers has one at a time
        self.users: Counter[int] = Counter()  # layer -> backward passes that add to its open gradient

    def open(self, i: int, following: int | None) -> tuple:
        """Return the parameters of layer i, and start to gather those of the following layer."""
        if self.w is not None:
            return self.w[i]
        for each in (i, following):
            if each is not None and each not in self.gathered:
                self._gather(each)
        buffer, requests = self.gathered[i]
        while requests:
            requests.pop().wait()
        return self._views(i, buffer)

    def _gather(self, i: int) -> None:
        buffer: Any = self._take("parameters", i) if self.tensors[i] else None
        requests: list[Request] = []
        for u, place in self.places[i].items():
            buffer[place][self.shards.units.in_unit[u]] = self.shards.owned_parameters[u]
            requests.append(self.shards.gather_unit(u, buffer[place]))
        self.gathered[i] = buffer, requests

    def close(self, i: int) -> None:
        if self.w is None:
            self.shards.part.layers[i].unbind()
            buffer, _ = self.gathered.pop(i)
            if buffer is not None:
                self.free["parameters"].append(buffer)

    def gradient(self, i: int) -> tuple:
        self._settle()
        if not self.tensors[i]:
            return ()
        self.users[i] += 1
        if i in self.open_gradients:  # of a micro-batch before, whose products are left (layered.py)
            return self._views(i, self.open_gradients[i])
        buffer = self.open_gradients[i] = self._take("gradients", i)
        buffer[:] = 0
        return self._views(i, buffer)

    def ready(self, i: int) -> None:
        """Free the parameters of layer i, and start to reduce its gradient."""
        self.close(i)
        self.reduce(i)

    def reduce(self, i: int) -> None:
        """Start to reduce the gradient of layer i, unless another micro-batch adds to it."""
        if not self.tensors[i]:
            return
        self.users[i] -= 1
        if not self.users[i]:
            self._settle()
            buffer, scatter = self.open_gradients.pop(i), self.shards.scatter_unit
            requests = [(u, buffer[place], scatter(u, buffer[place])) for u, place in self.places[i].items()]
            self.leaving = buffer, requests

    def _settle(self) -> None:
        """Complete the reductions in flight; add the owned parts to this rank's gradient."""
        if self.leaving is None:
            return
        buffer, requests = self.leaving
        for u, total, request in requests:
            request.wait()
            own = total[self.shards.units.in_unit[u]]
            if own.size:
                add_into(self.shards.owned_gradients[u], own)
        self.free["gradients"].append(buffer)
        self.leaving = None

    def finish(self) -> None:
        self._settle()
        for kind, buffers in self.free.items():
            while buffers:
                self._drop(kind)

    def _take(self, kind: str, i: int) -> Array:
        """Return a buffer for layer i: a free one of its size, or a new one; drop free ones that exceed the limit."""
        free, length = self.free[kind], self.lengths[i]
        for at, buffer in enumerate(free):
            if buffer.size == length:
                return free.pop(at)
        while free and self.buffered[kind] + length > self.buffer_limits[kind]:
            self._drop(kind)
        self.buffered[kind] += length
        return self.shards.memory.hold(kind, self.shards.device.empty(length, self.shards.part.dtype))

    def _drop(self, kind: str) -> None:
        buffer = self.free[kind].pop()
        self.buffered[kind] -= buffer.size
        self.shards.memory.add(kind, -buffer.nbytes)

    def _views(self, i: int, buffer: Array) -> tuple[Array, ...]:
        return tuple([tensor.view(buffer) for tensor in self.tensors[i]])
