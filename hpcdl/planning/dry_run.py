"""A dry run of one rank's step of a partitioned model, without memory and partners, to find what the rank holds.

Parts, shards, gathered layers and pipeline stages are the code that trains; a `Peer` stands for the other ranks, whose
messages arrive at once. Arrays have no memory (meta_arrays.py), so that no model is too large.

    ranks along                                          data d  pipeline p  tensor t
    train-model-parallel, train-pipeline                 1     all     1
    train-tensor-parallel                                1     1       all
    train-fully-sharded                                  all   1       1        stages 1, 2, 3 of ZeRO
    train-grid                                           d     p       t        stages 0, 1, 2, 3 along data
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from hpcdl.chunks import chunk
from hpcdl.comm.grid import place
from hpcdl.comm.tensor_group import TensorGroup
from hpcdl.memory import Memory
from hpcdl.models.balance import cut_layers
from hpcdl.models.part import ModelPart
from hpcdl.parallel.sharded_weights import weights_of
from hpcdl.parallel.stage import KINDS, Stage
from hpcdl.parallel.stash import Stash
from hpcdl.parallel.timetable import Action
from hpcdl.parallel.zero import Shards
from hpcdl.strategies.description import Cut
from hpcdl.strategies.pipeline_schedules import actions_of
from hpcdl.strategies.workload import Workload

ROUNDS = 3  # micro-batches per stage after which PipeDream holds its maximum


class CompletedRequest:
    """The request of a message that has arrived."""

    def wait(self, doze: bool = False) -> None:
        """Return at once."""

    def test(self) -> bool:
        """Return True."""
        return True


class SendRequest:
    """The request of a push, whose buffer stays in use until the partner has received it.

    answered: the partner replies, and the push is complete at `wait`; else at the second `test`.
    """

    def __init__(self, answered: bool):
        self.left, self.answered = False, answered

    def wait(self, doze: bool = False) -> None:
        """Mark the push as complete."""
        self.left = True

    def test(self) -> bool:
        """True if the push is complete; the first test of an unanswered push is False."""
        left, self.left = self.left, self.left or not self.answered
        return left


class Peer:
    """A communicator whose partners answer at once; device: of the vectors that it makes."""

    def __init__(self, rank: int, size: int, device: Any):
        self.rank, self.size, self.device = rank, size, device

    def empty(self, n: int, dtype: Any) -> Any:
        """Return a vector of n elements."""
        return self.device.empty(n, dtype)

    def all_reduce(self, *_: Any) -> None:
        """Do nothing: the result counts as present."""

    all_gather = wait = all_reduce

    def reduce_scatter(self, array: Any) -> Any:
        """Return this rank's part."""
        flat = array.reshape(-1)
        return flat[chunk(flat.size, self.size, self.rank)]

    def ipush(self, array: Any, to: int, tag: int = 0) -> SendRequest:
        """Return the request of a push; activations (hpcdl/parallel/stage.py) are answered by their gradient."""
        return SendRequest(answered=tag % len(KINDS) == KINDS.index("F"))

    def iall_gather(self, *_: Any) -> CompletedRequest:
        """Return a completed request."""
        return CompletedRequest()

    ibroadcast = ireduce_scatter = ireduce = iall_gather


class MetaOptimizer:
    """An optimizer with state vectors of these names that never steps (hpcdl/optim/optimizer.py)."""

    def __init__(self, names: tuple[str, ...], device: Any, dtype: Any):
        self.names, self.device, self.dtype = names, device, dtype
        self.state: dict[str, Any] = {}

    def of_size(self, size: int) -> "MetaOptimizer":
        """Return a copy with vectors of `size` elements."""
        other = copy.copy(self)
        other.state = {name: self.device.zeros(size, self.dtype) for name in self.names}
        return other

    def over(self, part: slice) -> "MetaOptimizer":
        """Return the optimizer of a slice: itself."""
        return self


class UntimedStage(Stage):
    """A pipeline stage whose computing takes no time."""

    @contextlib.contextmanager
    def _computing(self, action: Action, fraction: float) -> Iterator[None]:
        yield


def cut_of(case: Workload) -> Cut:
    """Return the partition of the model by the workload's strategy."""
    assert case.strategy.cut is not None
    return case.strategy.cut(case.options, case.size)


def dry_run_step(
    case: Workload,
    rank: int,
    cut: Cut | None = None,
    share: int | None = None,
    peers: Callable[..., Peer] | None = None,
) -> tuple[Memory, int]:
    """Run a rank's step; return its peak memory by kind, and the number of parameters that it updates.

    cut: default: that of the program. share: rows of the step; default: the rank's share of a batch. peers: makes the
    peer of an axis of the grid, peers(axis, rank, size, device), to record messages.
    """
    make_peer = peers or (lambda axis, *who: Peer(*who))
    cut, memory, device = cut or cut_of(case), Memory(), case.device
    (copies, stages, parts), (d, p, t) = cut.shape, place(rank, cut.shape)
    piped, layers = bool(cut.schedule), None
    if piped:
        layers = cut_layers(case.model, stages * cut.chunks)[p::stages]
    group = TensorGroup(make_peer("tensor", t, parts, device), cut.sequence) if cut.tensor else None  # type: ignore[arg-type]
    part = ModelPart(case.model, layers, (t, parts), group)
    part.initial = lambda random: iter(())  # type: ignore[method-assign]  # no values are drawn
    part.pool.memory = memory
    rule: Any = MetaOptimizer(case.vectors, device, case.dtype)
    data: Any = make_peer("data", d, copies, device)
    shards = Shards(SimpleNamespace(memory=memory, random=None), part, rule, data, cut.zero, cut.owners)
    weights, rows = weights_of(shards), case.rows(case.share(d, copies) if share is None else share)
    if not piped:
        for each in rows.split(case.options.accumulate):
            part.forward_backward(weights, each)
    else:
        line: Any = make_peer("pipeline", p, stages, device)
        stage = UntimedStage(line, part, weights, case.model, cut.recompute)
        if cut.schedule == "one batch":
            for each in rows.split(case.options.accumulate):
                stage.forward_backward(each)
        elif cut.schedule == "pipedream":
            pipedream(case, stage, shards, p, stages)
        else:
            actions = actions_of(cut.schedule, stages, p, cut.microbatches, cut.chunks)
            stage.run(actions, rows.split(cut.microbatches))
    weights.finish()
    if peers is not None and cut.schedule != "pipedream":  # the end of a step
        shards.reduce_scatter()
        shards.all_gather()
    part.pool.memory = None
    return memory, shards.units.size


def pipedream(case: Workload, stage: Stage, shards: Shards, p: int, stages: int) -> None:
    """Run the steps that fill the pipeline on stage p; each is a batch of its own (hpcdl/parallel/stash.py)."""
    stash = Stash(stage, shards, versions=stages - 1 - p)
    steps = min(ROUNDS * stages, case.plan[2])
    for kind, k, _ in actions_of("pipedream", stages, p, steps):
        if kind == "F":
            stage.forward(k, 0, case.rows(case.batch))
            stash.forward(k)
        else:
            stage.backward(k, 0)
            stash.backward(k)
    stage.end()
