"""The stages of ZeRO: what each of the ranks that train the same part of a model holds, and how they sum and gather it.

    stage    held by each of N ranks                            messages of a step, K values, 1 micro-batch
    0        parameters, gradient, optimizer state              all-reduce                             2 (N-1)/N K
    1        parameters, gradient; 1/N of optimizer state       reduce-scatter, all-gather             2 (N-1)/N K
    2        parameters; 1/N of gradient, optimizer state       reduce-scatter by layer, all-gather    2 (N-1)/N K
    3        1/N of everything; at most two layers gathered     all-gather by layer, twice,
             for a while, and one layer's gradient              reduce-scatter by layer                3 (N-1)/N K

What happens by layer is in sharded_weights.py, the rest here. Vectors are cut layer by layer into chunks (units.py), or
whole layers have an owner, who broadcasts their parameters and to whom their gradient is reduced.

(Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020)
"""

from collections.abc import Callable
from typing import Any

from hpcdl.comm import Communicator
from hpcdl.comm.requests import Request
from hpcdl.kernels.device import Array
from hpcdl.models.part import ModelPart
from hpcdl.optim import Optimizer
from hpcdl.parallel.units import Units
from hpcdl.random import Random


class Shards:
    """What this rank holds of a part of a model at a stage of ZeRO. Making it is a collective call of `group`.

    group: the ranks that train this part together, each with its share of the examples. owners: whole layers belong to
    one rank. run: has `random` for the initial values, and `memory`, where all is counted.

    `parameters` and `gradient` are this rank's flat vectors; `owned_parameters` and `owned_gradients` are views of what
    it updates of them, unit by unit, and `optimizer` has the state for that. `parameter_pieces` and `pieces` say where
    in the whole model the parameters and what it updates lie.
    """

    def __init__(
        self,
        run: Any,
        part: ModelPart,
        optimizer: Optimizer,
        group: Communicator,
        stage: int = 0,
        owners: bool = False,
    ):
        self.part, self.group, self.stage = part, group, stage
        self.memory, self.device = run.memory, part.device
        place = (0, 1) if stage == 0 else (group.rank, group.size)
        self.units = units = Units([slice(0, part.size)] if stage == 0 else part.units(), *place, owners and stage > 0)
        self.optimizer = optimizer.of_size(units.size)
        for vector in self.optimizer.state.values():
            self.memory.hold("optimizer", vector)
        self.rules = [self.optimizer.over(at) for at in units.in_shard]
        self.parameters = self.allocate("parameters", part.size if stage < 3 else units.size)
        self.gradient = self.allocate("gradients", part.size if stage < 2 else units.size)
        self.owned_parameters = [self.parameters[own] for own in (units.in_vector if stage < 3 else units.in_shard)]
        self.owned_gradients = [self.gradient[own] for own in (units.in_vector if stage < 2 else units.in_shard)]
        self._initialize(run.random)
        pieces = [(piece, speaks and group.rank == 0) for piece, speaks in part.pieces()]
        self.pieces = pieces if stage == 0 else units.pieces(part.pieces())
        self.parameter_pieces = pieces if stage < 3 else self.pieces

    def allocate(self, kind: str, size: int) -> Array:
        """A vector that stays; where an all-reduce gains from it, the other ranks of the node reach it, too."""
        make = self.group.empty if self.stage == 0 else self.device.empty
        return self.memory.hold(kind, make(size, self.part.dtype))

    def _initialize(self, random: Random) -> None:
        """Fill in what is held here of the initial values, of which one layer is made at a time."""
        for where, values in self.part.initial(random):
            if self.stage < 3:
                self.device.copy_in(self.parameters[where], values)
                continue
            for u, inside in self.units.owned_of(where):
                start = self.units.in_vector[u].start + inside.start - where.start
                own = values[start : start + inside.stop - inside.start]
                self.device.copy_in(self.owned_parameters[u][inside], own)

    def gradients_of(self, part: slice) -> list[Array]:
        """Views of what this rank owns of a slice of the gradient, as the part has it whole."""
        return [self.owned_gradients[u][inside] for u, inside in self.units.owned_of(part)]

    def unique_gradients(self) -> list[Array]:
        """Views that are, together with those of all other ranks, the whole model's gradient, each element once."""
        return [
            self.owned_gradients[u][piece.local - at.start : piece.local - at.start + piece.size]
            for piece, speaks in self.pieces
            for u, at in enumerate(self.units.in_shard)
            if speaks and at.start <= piece.local < at.stop
        ]

    # -- a step ------------------------------------------------------------------------------------------------------

    def reduce_scatter(self) -> None:
        """What this rank owns of the gradient <- its sum over the group, unless that was done layer by layer."""
        if self.stage == 0:
            self.group.all_reduce(self.gradient)
        elif self.stage == 1:
            self._for_each_unit(self.scatter_unit, self.gradient)

    def update(self, scale: float, norm: float | None) -> None:
        """Take the optimizer's step with what this rank owns, by scale * gradient; norm: of the whole, for clipping."""
        for rule, w, g in zip(self.rules, self.owned_parameters, self.owned_gradients, strict=True):
            rule.step, rule.since = self.optimizer.step, self.optimizer.since
            rule.update(w, g, scale, norm)
        self.optimizer.step += 1

    def all_gather(self) -> None:
        """The parameters <- what each rank has updated of them, where they are held whole."""
        if self.stage in (1, 2):
            self._for_each_unit(self.gather_unit, self.parameters)

    def _for_each_unit(self, start: Callable[[int, Array], Request], vector: Array) -> None:
        """Start an operation on each unit of a vector, and wait for all."""
        for request in [start(u, vector[unit]) for u, unit in enumerate(self.units.units)]:
            request.wait()

    def gather_unit(self, u: int, buffer: Array) -> Request:
        """Fill in all of unit u, of which each rank has put in what it owns; a request."""
        if self.units.owner is None:
            return self.group.iall_gather(buffer)
        return self.group.ibroadcast(buffer, self.units.owner[u])

    def scatter_unit(self, u: int, buffer: Array) -> Request:
        """Sum unit u over the ranks; what this rank owns of it is then the sum. A request."""
        if self.units.owner is None:
            return self.group.ireduce_scatter(buffer)
        return self.group.ireduce(buffer, self.units.owner[u])
