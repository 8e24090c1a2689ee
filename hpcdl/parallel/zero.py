"""The stages of ZeRO: sharding of parameters, gradient and optimizer state over the ranks of a data-parallel group.

    stage    held by each of N ranks                            messages of a step, K values, 1 micro-batch
    0        parameters, gradient, optimizer state              all-reduce                             2 (N-1)/N K
    1        parameters, gradient; 1/N of optimizer state       reduce-scatter, all-gather             2 (N-1)/N K
    2        parameters; 1/N of gradient, optimizer state       reduce-scatter by layer, all-gather    2 (N-1)/N K
    3        1/N of everything; temporarily two gathered        all-gather by layer, twice,
             layers and one layer's gradient                    reduce-scatter by layer                3 (N-1)/N K

Operations by layer are in sharded_weights.py. Vectors are cut layer by layer into chunks (units.py), or each layer has
an owner. (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020)"""

from collections.abc import Callable
from typing import Any

from hpcdl.comm import Communicator
from hpcdl.comm.requests import Request
from hpcdl.kernels.device import Array
from hpcdl.models.part import ModelPart
from hpcdl.optim import Optimizer
from hpcdl.parallel.units import Units


class Shards:
    """This rank's shards of a part of a model at a stage of ZeRO. The constructor is a collective call of `group`.
    owners: True if each layer belongs to one rank. run: provides `random` and `memory`. owned_parameters,
    owned_gradients: views, unit by unit, of what this rank updates of the flat `parameters` and `gradient`.
    parameter_pieces, pieces: the places of `parameters` and of the owned parts in the full model."""

    def __init__(
        self, run: Any, part: ModelPart, optimizer: Optimizer, group: Communicator, stage: int = 0, owners: bool = False
    ):
        self.part, self.group, self.stage, self.owners = part, group, stage, owners
        self.memory, self.device = run.memory, part.device
        self.units = units = self.units_of(part, group.rank)
        self.optimizer = optimizer.of_size(units.size)
        for vector in self.optimizer.state.values():
            self.memory.hold("optimizer", vector)
        self.rules = [self.optimizer.over(at) for at in units.in_shard]
        self.parameters = self.allocate("parameters", part.size if stage < 3 else units.size)
        self.gradient = self.allocate("gradients", part.size if stage < 2 else units.size)
        self.owned_parameters = [self.parameters[own] for own in (units.in_vector if stage < 3 else units.in_shard)]
        self.owned_gradients = [self.gradient[own] for own in (units.in_vector if stage < 2 else units.in_shard)]
        for where, values in part.initial(run.random):  # layers are created one at a time
            if stage < 3:
                self.device.copy_in(self.parameters[where], values)
                continue
            for u, inside in units.owned_of(where):
                start = units.in_vector[u].start + inside.start - where.start
                own = values[start : start + inside.stop - inside.start]
                self.device.copy_in(self.owned_parameters[u][inside], own)
        pieces = [(piece, speaks and group.rank == 0) for piece, speaks in part.pieces()]
        self.pieces = pieces if stage == 0 else units.pieces(part.pieces())
        self.parameter_pieces = pieces if stage < 3 else self.pieces

    def units_of(self, part: ModelPart, rank: int) -> Units:
        """Return the units of a part, as rank number `rank` of its data-parallel group owns them."""
        if self.stage == 0:
            return Units([slice(0, part.size)], 0, 1)
        return Units(part.units(), rank, self.group.size, self.owners)

    def allocate(self, kind: str, size: int) -> Array:
        """Allocate a persistent vector, in the node's shared memory if the all-reduce uses it."""
        make = self.group.empty if self.stage == 0 else self.device.empty
        return self.memory.hold(kind, make(size, self.part.dtype))

    def gradients_of(self, part: slice) -> list[Array]:
        """Return views of this rank's owned parts of a slice of the part's gradient."""
        return [self.owned_gradients[u][inside] for u, inside in self.units.owned_of(part)]

    def unique_gradients(self) -> list[Array]:
        """Return views that, over all ranks, contain each element of the full gradient once."""
        return [
            self.owned_gradients[u][piece.local - at.start : piece.local - at.start + piece.size]
            for piece, speaks in self.pieces
            for u, at in enumerate(self.units.in_shard)
            if speaks and at.start <= piece.local < at.stop
        ]

    def reduce_scatter(self) -> None:
        """Sum the owned part of the gradient over the group, unless it was done layer by layer."""
        if self.stage == 0:
            for message in self.part.messages() if self.group.size > 2 else [slice(None)]:  # a + b = b + a
                self.group.all_reduce(self.gradient[message])
        elif self.stage == 1:
            self._for_each_unit(self.scatter_unit, self.gradient)

    def update(self, scale: float, norm: float | None) -> None:
        """Do the optimizer's step on the owned parts with scale * gradient; norm: of the full gradient."""
        for rule, w, g in zip(self.rules, self.owned_parameters, self.owned_gradients, strict=True):
            rule.step, rule.since = self.optimizer.step, self.optimizer.since
            rule.update(w, g, scale, norm)
        self.optimizer.step += 1

    def all_gather(self) -> None:
        """Gather the updated parameters if they are replicated, at stages 1 and 2."""
        if self.stage in (1, 2):
            self._for_each_unit(self.gather_unit, self.parameters)

    def _for_each_unit(self, start: Callable[[int, Array], Request], vector: Array) -> None:
        for request in [start(u, vector[unit]) for u, unit in enumerate(self.units.units)]:
            request.wait()

    def gather_unit(self, u: int, buffer: Array) -> Request:
        """Start to gather unit u into the buffer, which contains this rank's part; return the request."""
        if self.units.owner is None:
            return self.group.iall_gather(buffer)
        return self.group.ibroadcast(buffer, self.units.owner[u])

    def scatter_unit(self, u: int, buffer: Array) -> Request:
        """Start to reduce unit u; this rank's part of the buffer becomes the sum; return the request."""
        if self.units.owner is None:
            return self.group.ireduce_scatter(buffer)
        return self.group.ireduce(buffer, self.units.owner[u])
