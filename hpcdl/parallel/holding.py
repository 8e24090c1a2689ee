"""What a rank holds of a model, and how the ranks that train the same part of it share parameters, gradient and
optimizer state: the stages of ZeRO.

    stage    held by each of N ranks                            messages of a step, K values, 1 micro-batch
    0        parameters, gradient, optimizer state              all-reduce                             2 (N-1)/N K
    1        parameters, gradient; 1/N of optimizer state       reduce-scatter, all-gather             2 (N-1)/N K
    2        parameters; 1/N of gradient, optimizer state       reduce-scatter by layer, all-gather    2 (N-1)/N K
    3        1/N of everything; at most two layers gathered     all-gather by layer, twice,
             for a while, and one layer's gradient              reduce-scatter by layer                3 (N-1)/N K

    step     zero    forward and backward with `store`, once for each micro-batch    update

At stage 3 a layer's parameters are gathered when forward and when backward come to it, the next layer's while it is
computed, and freed when used. From stage 2 on a layer's gradient lies in a buffer of its own, is summed over the ranks
as soon as it is final, and what of it this rank owns is added to its 1/N. Vectors are cut layer by layer, by
hpcdl.chunks; or whole layers have an owner, who broadcasts their parameters and to whom their gradient is reduced.

(Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020; Zhao et al.,
"PyTorch FSDP", VLDB 2023)
"""

import dataclasses
import itertools
import math

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.kernels.reduce import add_into
from hpcdl.models.layered import Vectors
from hpcdl.models.part import Part
from hpcdl.runs.run import fingerprint
from hpcdl.runs.straggler import stretched


def check_rows(options, sharing: int) -> None:
    """Raise UsageError where `sharing` ranks, which share a model, cannot all read the same examples."""
    if sharing > 1 and options.placement == "partitioned":
        raise UsageError(
            "--placement partitioned: ranks that share a model read the same rows; take shared or streamed"
        )
    if sharing > 1 and options.data_servers:
        raise UsageError("--data-servers: ranks that share a model read the same rows; leave it out")


class Units:
    """A vector cut into units, of each of which a rank owns a slice; what it owns lies in its shard, without gaps.

    units: slices of the vector. owners: each unit belongs to one rank, instead of a chunk of it to each.
    """

    def __init__(self, units: list[slice], rank: int, size: int, owners: bool = False):
        self.units, lengths = units, [unit.stop - unit.start for unit in units]
        self.owner = balanced_owners(lengths, size) if owners else None
        if owners:
            cuts = [slice(0, n if owner == rank else 0) for n, owner in zip(lengths, self.owner, strict=True)]
        else:
            cuts = [chunk(n, size, rank) for n in lengths]
        self.within = cuts  # what this rank owns of each unit: in the unit, in the vector, in the shard
        self.own = [slice(unit.start + cut.start, unit.start + cut.stop) for unit, cut in zip(units, cuts, strict=True)]
        ends = [0, *itertools.accumulate(cut.stop - cut.start for cut in cuts)]
        self.at = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
        self.size = ends[-1]

    def pieces(self, pieces: list) -> list:
        """Pieces of the vector, (piece, whether this rank speaks for it), as pieces of the shard."""
        return [
            (each._replace(local=each.local + at.start), speaks)
            for own, at in zip(self.own, self.at, strict=True)
            for piece, speaks in pieces
            for each in piece.within(own)
        ]

    def unit_of(self, part: slice) -> int | None:
        """The number of the unit that this slice lies in; None for an empty one."""
        if part.start == part.stop:
            return None
        return next(u for u, unit in enumerate(self.units) if unit.start <= part.start < unit.stop)

    def meet(self, part: slice) -> list[tuple[int, slice]]:
        """What this rank owns of a slice of the vector: (unit, slice of what it owns of that unit)."""
        found = []
        for u, own in enumerate(self.own):
            start, stop = max(own.start, part.start), min(own.stop, part.stop)
            if start < stop:
                found.append((u, slice(start - own.start, stop - own.start)))
        return found


def balanced_owners(lengths: list[int], ranks: int) -> list[int]:
    """An owner for each length, so that all own about as much: the longest first, each to who has least so far."""
    load, owners = [0] * ranks, [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += lengths[i]
    return owners


class Holding:
    """What this rank holds of a model. Making one allocates it, with initial values; a collective call.

    part: the part of the model that the ranks of `data` train together, each with its share of the examples. alike:
    (group, slices of the part's vector): a group of which each rank has these tensors, and a summand of their gradient;
    group None: not this rank. counts: whether this rank's losses and scores count, for ranks that share a model all
    know them. `descend` and `score` (batch -> sum of losses; and score) may be replaced by those of a pipeline.

    `parameters` and `gradient` are this rank's flat vectors, `owned` and `gradients` what it updates of them, unit by
    unit, and `optimizer` has the state for that. `parameter_pieces` and `pieces` say where in the whole model the
    parameters and what it updates lie.
    """

    def __init__(self, run, part: Part, optimizer, data, alike=(), stage=0, owners=False, counts=True):
        self.run, self.part, self.data, self.stage, self.counts = run, part, data, stage, counts
        self.share, self.rows_at_once, self.device = (data.rank, data.size), part.rows_at_once, part.device
        self.memory = part.pool.memory = run.memory
        self.descend = lambda batch: part.descend(self.store(), batch)
        self.score = lambda batch: part.score(self.store(), batch)
        whole, place = ([slice(0, part.size)], (0, 1)) if stage == 0 else (part.units(), self.share)
        self.units = units = Units(whole, *place, owners and stage > 0)
        self.optimizer = optimizer.of_size(units.size)
        for vector in self.optimizer.state.values():
            run.memory.hold("optimizer", vector)
        self.rules = [self.optimizer.over(at) for at in units.at]
        self.parameters = self._new("parameters", part.size if stage < 3 else units.size)
        self.gradient = self._new("gradients", part.size if stage < 2 else units.size)
        self.owned = [self.parameters[own] for own in (units.own if stage < 3 else units.at)]
        self.gradients = [self.gradient[own] for own in (units.own if stage < 2 else units.at)]
        self._initialize()
        met = [(group, [each for part in slices for each in units.meet(part)]) for group, slices in alike if group]
        self.alike = [(group, [self.gradients[u][inside] for u, inside in found]) for group, found in met if found]
        pieces = [(piece, speaks and data.rank == 0) for piece, speaks in part.pieces()]
        self.pieces = pieces if stage == 0 else units.pieces(part.pieces())
        self.parameter_pieces = pieces if stage < 3 else self.pieces
        self.counted = [self.gradients[u][inside] for u, inside in self._counted()]  # for the norm, each element once
        self.sharded = Sharded(self) if stage >= 2 else None

    def _new(self, kind: str, size: int):
        """A vector that stays; where an all-reduce gains from it, the other ranks of the node reach it, too."""
        make = self.data.empty if self.stage == 0 else self.device.empty
        return self.memory.hold(kind, make(size, self.part.dtype))

    def _initialize(self) -> None:
        """Fill in what is held here of the initial values, of which one layer is made at a time."""
        for where, values in self.part.initial(self.run.random):
            if self.stage < 3:
                self.device.copy_in(self.parameters[where], values)
                continue
            for u, inside in self.units.meet(where):
                start = self.units.own[u].start + inside.start - where.start
                self.device.copy_in(self.owned[u][inside], values[start : start + inside.stop - inside.start])

    def _counted(self):
        """What this rank speaks for: (unit, slice of what it owns of that unit)."""
        for piece, speaks in self.pieces:
            for u, at in enumerate(self.units.at):
                if speaks and at.start <= piece.local < at.stop:
                    yield u, slice(piece.local - at.start, piece.local - at.start + piece.size)

    # -- a step ------------------------------------------------------------------------------------------------------

    def zero(self) -> None:
        """The gradient of a step begins."""
        self.gradient[:] = 0

    def backward(self, batch) -> float:
        """The gradient of a batch, in --accumulate parts; returns the sum of losses, on the rank that counts."""
        self.zero()
        loss = 0.0
        for micro in batch.split(self.run.options.accumulate):
            with stretched(self.run.model, 1.0, self.run.comm.traffic):
                loss += self.descend(micro)
        return loss if self.counts else 0.0

    def store(self):
        """Where the layers of the part find their tensors (hpcdl/models/layered.py)."""
        return self.sharded or Vectors(self.part, self.parameters, self.gradient)

    def stash(self) -> Vectors:
        """Such a store with room for another version of the parameters."""
        return Vectors(self.part, self._new("parameters", self.part.size), self.gradient)

    def update(self, total: int) -> None:
        """Sum the gradients over the ranks, and take the optimizer's step by their mean over `total` examples."""
        self._reduce()
        for group, views in self.alike:
            self._sum(group, views)
        norm = self._norm() if self.optimizer.clip_norm > 0 else None
        for rule, w, g in zip(self.rules, self.owned, self.gradients, strict=True):
            rule.step, rule.since = self.optimizer.step, self.optimizer.since
            rule.update(w, g, 1 / total, norm)
        self.optimizer.step += 1
        if self.stage in (1, 2):
            self._all(self.gather, self.parameters)

    def _reduce(self) -> None:
        """What this rank owns of the gradient <- its sum over the ranks of `data`."""
        if self.stage == 0:
            self.data.all_reduce(self.gradient)
        elif self.stage == 1:
            self._all(self.scatter, self.gradient)
        else:
            self.sharded.finish()

    def _all(self, start, vector) -> None:
        """Start an operation on each unit of a vector, and wait for all."""
        for request in [start(u, vector[unit]) for u, unit in enumerate(self.units.units)]:
            request.wait()

    def gather(self, u: int, buffer):
        """Fill in all of unit u, of which each rank has put in what it owns; a request."""
        if self.units.owner is None:
            return self.data.iall_gather(buffer)
        return self.data.ibroadcast(buffer, self.units.owner[u])

    def scatter(self, u: int, buffer):
        """Sum a unit over the ranks; what this rank owns of it is then the sum. A request."""
        if self.units.owner is None:
            return self.data.ireduce_scatter(buffer)
        return self.data.ireduce(buffer, self.units.owner[u])

    def _sum(self, group, views) -> None:
        """Sum these parts of the gradient over a group, in one message."""
        packed = self.device.xp.concatenate(views) if len(views) != 1 else views[0]
        group.all_reduce(packed)
        if len(views) != 1:
            start = 0
            for view in views:
                view[:] = packed[start : start + view.size]
                start += view.size

    def _norm(self) -> float:
        """The 2-norm of the whole model's gradient."""
        total = np.array([sum(sum_of_squares(view) for view in self.counted)], np.float64)
        self.run.comm.all_reduce(total)
        return math.sqrt(total[0])

    # -- for the run -------------------------------------------------------------------------------------------------

    def evaluate(self, parameters, batch) -> tuple[float, float]:
        """(sum of losses, score) of a batch, on the rank that counts, zeros on others; collective."""
        result = self.score(batch)
        if self.sharded:
            self.sharded.finish()  # its buffers
        return result if self.counts else (0.0, 0.0)

    def try_out(self, batch) -> None:
        """A step's computing with a batch of no rows, so that everything is compiled; collective."""
        self.descend(batch)
        if self.sharded:
            self.sharded.finish()
        self.zero()

    def agree(self, own) -> bool | None:
        """Whether ranks that hold the same tensors, or parts of them, hold the same bits; None where none do.

        own: a communicator of all ranks. What is compared are fingerprints; collective.
        """
        mine = {}
        for piece, _ in self.parameter_pieces:
            vector = self.parameters[piece.local : piece.local + piece.size]
            mine[piece._replace(local=0)] = fingerprint(self.device.host(vector))
        with activity.inside("compare the replicas"):
            everyone = own.mpi.allgather(mine)
        seen = {}
        for each in everyone:
            for piece, value in each.items():
                seen.setdefault(piece, []).append(value)
        repeated = [values for values in seen.values() if len(values) > 1]
        return all(len(set(values)) == 1 for values in repeated) if repeated else None


class Sharded:
    """The store of a part whose gradients (from stage 2 on) and parameters (at stage 3) are made whole layer by layer.

    forward     | gather 1 | layer 1 | layer 2 | layer 3 |           each while the layer before is computed:
                           | gather 2| gather 3|                     two layers are there at once, no more
    backward    | gather 3 | layer 3 | layer 2 | layer 1 |
                           | gather 2| gather 1, scatter 3 | ...     before layer 2 makes a gradient, that of 3 is gone

    Gathered parameters take no more room than the two largest layers, the gradient no more than the largest; `finish`
    gives it up, so that between steps there is only what this rank owns.
    """

    def __init__(self, holding: Holding):
        self.holding, part, units = holding, holding.part, holding.units
        self.w = part.views(holding.parameters) if holding.stage < 3 else None
        self.places, self.tensors = [], []  # of each layer: where its units, and its tensors, lie in a buffer
        for tensors in part.tensors:
            of = [units.unit_of(tensor.slice) for tensor in tensors]
            places, start = {}, 0
            for u in dict.fromkeys(u for u in of if u is not None):
                length = units.units[u].stop - units.units[u].start
                places[u] = slice(start, start + length)
                start += length
            self.places.append(places)
            moved = [
                places[u].start + t.offset - units.units[u].start if u is not None else 0
                for t, u in zip(tensors, of, strict=True)
            ]
            self.tensors.append([dataclasses.replace(t, offset=start) for t, start in zip(tensors, moved, strict=True)])
        self.lengths = [max((place.stop for place in places.values()), default=0) for places in self.places]
        sizes = sorted(self.lengths)
        self.most = {"parameters": sum(sizes[-2:]), "gradients": sum(sizes[-1:])}  # elements, in buffers of each kind
        self.free, self.taken = {"parameters": [], "gradients": []}, {"parameters": 0, "gradients": 0}
        self.gathered, self.open_gradient, self.leaving = {}, None, None

    def open(self, i, following):
        """The parameters of layer i; those of the following one are then on their way."""
        if self.w is not None:
            return self.w[i]
        for each in (i, following):
            if each is not None and each not in self.gathered:
                self._gather(each)
        buffer, requests = self.gathered[i]
        while requests:
            requests.pop().wait()
        return self._views(i, buffer)

    def _gather(self, i):
        """Start to gather the parameters of layer i."""
        buffer, requests = self._take("parameters", i) if self.tensors[i] else None, []
        for u, place in self.places[i].items():
            buffer[place][self.holding.units.within[u]] = self.holding.owned[u]
            requests.append(self.holding.gather(u, buffer[place]))
        self.gathered[i] = buffer, requests

    def close(self, i):
        """Free what was gathered of layer i."""
        if self.w is None:
            buffer, _ = self.gathered.pop(i)
            if buffer is not None:
                self.free["parameters"].append(buffer)

    def gradient(self, i):
        """Room for the gradient of layer i, zeros."""
        self._settle()
        if not self.tensors[i]:
            return ()
        self.open_gradient = self._take("gradients", i)
        self.open_gradient[:] = 0
        return self._views(i, self.open_gradient)

    def ready(self, i):
        """Free the parameters of layer i, and start to sum its gradient over the ranks."""
        self.close(i)
        if self.tensors[i]:
            buffer = self.open_gradient
            requests = [(u, buffer[part], self.holding.scatter(u, buffer[part])) for u, part in self.places[i].items()]
            self.leaving = buffer, requests

    def _settle(self):
        """Add what this rank owns of the sums on their way to its gradient."""
        if self.leaving is None:
            return
        buffer, requests = self.leaving
        for u, total, request in requests:
            request.wait()
            own = total[self.holding.units.within[u]]
            if own.size:
                add_into(self.holding.gradients[u], own)
        self.free["gradients"].append(buffer)
        self.leaving = None

    def finish(self):
        """The gradient is summed; give the buffers up."""
        self._settle()
        for kind, buffers in self.free.items():
            while buffers:
                self._drop(kind)

    def _take(self, kind, i):
        """A buffer for layer i: a free one of its size, or a new one, for which others are given up where need be."""
        free, length = self.free[kind], self.lengths[i]
        for at, buffer in enumerate(free):
            if buffer.size == length:
                return free.pop(at)
        while free and self.taken[kind] + length > self.most[kind]:
            self._drop(kind)
        self.taken[kind] += length
        return self.holding.memory.hold(kind, self.holding.device.empty(length, self.holding.part.dtype))

    def _drop(self, kind):
        """Give up a free buffer."""
        buffer = self.free[kind].pop()
        self.taken[kind] -= buffer.size
        self.holding.memory.add(kind, -buffer.nbytes)

    def _views(self, i, buffer):
        """The tensors of layer i in a buffer."""
        return tuple([tensor.view(buffer) for tensor in self.tensors[i]])
