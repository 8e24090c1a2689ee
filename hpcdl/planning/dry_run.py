"""A dry run of one rank's step of a partitioned model, without memory and partners, to find what the rank holds.

    ranks along                                          data d  pipeline p  context c  tensor t
    train-model-parallel, train-pipeline                 1     all     1     1
    train-tensor-parallel                                1     1       1     all
    train-context-parallel                               1     1       all   1    stages 0, 1, 2, 3 along context
    train-fully-sharded                                  all   1       1     1    stages 1, 2, 3 of ZeRO
    train-grid                                           d     p       c     t    stages 0, 1, 2, 3 along data, context;
                                                                                  and ranks along expert

Parts, shards, gathered layers and pipeline stages are the code that trains; a `Peer` stands for the other ranks, whose
messages arrive at once. Arrays have no memory (meta_arrays.py), so no model is too large."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

from hpcdl.chunks import chunk
from hpcdl.comm.grid import place
from hpcdl.comm.tensor_group import TensorGroup
from hpcdl.comm.trace import Traffic
from hpcdl.memory import Memory
from hpcdl.models.balance import cut_layers
from hpcdl.models.group import ExpertRows
from hpcdl.models.mixture import mixtures_of
from hpcdl.models.part import ModelPart, whole_part
from hpcdl.parallel.expert import OwnedRows, SharedExperts
from hpcdl.parallel.gathered_matrices import GatheredMatrices
from hpcdl.parallel.ring_attention import RingAttention
from hpcdl.parallel.sharded_weights import weights_of
from hpcdl.parallel.stage import KINDS, Stage
from hpcdl.parallel.stash import Stash
from hpcdl.parallel.timetable import Action
from hpcdl.parallel.ulysses import Ulysses
from hpcdl.parallel.zero import Shards
from hpcdl.strategies.description import Cut
from hpcdl.strategies.pipeline_schedules import actions_of, placement
from hpcdl.strategies.workload import Workload

Messages: TypeAlias = dict[str, list[tuple[str, int]]]  # (operation, bytes) by axis of the grid
ROUNDS = 3  # micro-batches per stage after which PipeDream holds its maximum


class PeerRequest:
    """The request of a message. left: True if the message is complete, as a received one is. answered: True if the
    partner answers a push; its buffer is then in use until `wait`, else until the second `test`."""

    def __init__(self, left: bool = True, answered: bool = True):
        self.left, self.answered = left, answered

    def wait(self, doze: bool = False) -> None:
        self.left = True

    def test(self) -> bool:
        left, self.left = self.left, self.left or not self.answered
        return left


def recorded(operation: str) -> Callable[..., PeerRequest]:
    """Return a method of Peer that notes the message as `operation` and returns a complete request."""

    def method(self: "Peer", array: Any, *_: Any) -> PeerRequest:
        self.note(operation, array)
        return PeerRequest()

    return method


class Peer:
    """A communicator whose partners answer at once. messages: gets (operation, bytes) of each. device: of vectors."""

    def __init__(self, rank: int, size: int, device: Any, messages: list[tuple[str, int]]):
        self.rank, self.size, self.device, self.messages = rank, size, device, messages

    @property
    def traffic(self) -> Traffic:
        return Traffic()

    def note(self, operation: str, array: Any) -> None:
        if self.size > 1:
            self.messages.append((operation, array.nbytes))

    def empty(self, n: int, dtype: Any) -> Any:
        return self.device.empty(n, dtype)

    def wait(self, *_: Any) -> None:
        """Return at once."""

    def iwait(self, *_: Any) -> PeerRequest:
        """Return a complete request."""
        return PeerRequest()

    all_reduce, all_gather, iall_gather = recorded("all_reduce"), recorded("all_gather"), recorded("all_gather")
    all_to_all = recorded("all_to_all")
    ireduce_scatter, ibroadcast, ireduce = recorded("reduce_scatter"), recorded("broadcast"), recorded("reduce")

    def reduce_scatter(self, array: Any) -> Any:
        """Return this rank's chunk of the array, without adding."""
        self.note("reduce_scatter", array)
        flat = array.reshape(-1)
        return flat[chunk(flat.size, self.size, self.rank)]

    def ipush(self, array: Any, to: int, tag: int = 0) -> PeerRequest:
        """Return the request of a push; activations (hpcdl/parallel/stage.py) are answered by their gradient."""
        self.note("message", array)
        return PeerRequest(left=False, answered=tag % len(KINDS) == KINDS.index("F"))


class MetaOptimizer:
    """An optimizer that never steps, with state vectors of these names (hpcdl/optim/optimizer.py). weights: tensors
    that it updates as whole matrices."""

    size = 0

    def __init__(self, names: tuple[str, ...], device: Any, dtype: Any, weights: Any = ()):
        self.names, self.device, self.dtype, self.weights = names, device, dtype, weights
        self.state: dict[str, Any] = {}

    def of_size(self, size: int) -> "MetaOptimizer":
        other = copy.copy(self)
        other.state = {name: self.device.zeros(size, self.dtype) for name in self.names}
        return other

    def over(self, part: slice) -> "MetaOptimizer":
        return self


class UntimedStage(Stage):
    """A pipeline stage whose computing takes no time."""

    @contextlib.contextmanager
    def _computing(self, action: Action, fraction: float) -> Iterator[None]:
        yield


class UnevenExperts(SharedExperts):
    """Ranks of which this one's experts get rows[k] rows in forward pass k, as in a step of a run."""

    def __init__(self, comm: Any, rows: list[int]):
        super().__init__(comm)
        self.foretold = itertools.cycle(rows)

    def owned(self, sent: ExpertRows) -> OwnedRows:
        found = super().owned(sent)
        rows, each = next(self.foretold), len(found.ends)
        found.ends = [rows * k // each for k in range(1, each + 1)]
        found.arriving = [rows, *[0] * (self.size - 1)]
        return found


def cut_of(case: Workload) -> Cut:
    """Return the partition of the model by the workload's strategy."""
    assert case.strategy.cut is not None
    return case.strategy.cut(case.options, case.size)


def dry_run_step(
    case: Workload, rank: int, cut: Cut | None = None, share: int | None = None, messages: Messages | None = None
) -> tuple[Memory, int]:
    """Run a rank's step; return its peak memory by kind, and the number of parameters that it updates. cut: by default
    the program's own. share: rows, by default the rank's share of a batch. messages: gets the messages by axis."""
    sent: Messages = {} if messages is None else messages
    cut, memory, device = cut or cut_of(case), Memory(), case.device

    def make_peer(axis: str, number: int, size: int) -> Any:
        return Peer(number, size, device, sent.setdefault(axis, []))

    (copies, stages, parts), shared, owners = cut.shape, cut.context, cut.expert
    d, p, c, e, t = place(rank, (copies, stages, shared, owners, parts))
    piped, layers, where = bool(cut.schedule), None, placement(cut.schedule, stages, cut.chunks)
    if piped:
        ranges = cut_layers(case.model, where.last + 1)
        layers = [ranges[v] for v in where.of(p)]
    group = TensorGroup(make_peer("tensor", t, parts), cut.sequence) if cut.tensor else None
    context = None
    if shared > 1:
        context = (Ulysses if cut.attention == "ulysses" else RingAttention)(make_peer("context", c, shared))
    experts = SharedExperts(make_peer("expert", e, owners)) if owners > 1 else None
    if piped or cut.tensor or context is not None:
        part = ModelPart(case.model, layers, (t, parts), group, context, experts)
    else:
        part = whole_part(case.model)
    part.initial = lambda random: iter(())  # type: ignore[method-assign]  # no values are drawn
    part.pool.memory = memory
    if experts is not None and case.expert_rows:
        for mixture in mixtures_of(part):
            mixture.owners = UnevenExperts(experts.comm, case.expert_rows[mixture.name][rank] or [0])
    hidden = case.model.layout.hidden if case.matrix_flops else ()
    rule: Any = MetaOptimizer(case.vectors, device, case.dtype, hidden)
    who = SimpleNamespace(memory=memory, random=None)
    shards = Shards(who, part, rule, make_peer("data", d * shared + c, cut.copies), cut.zero, cut.owners)
    if rule.weights:
        matrices, item = GatheredMatrices(shards, rank, cut.copies * stages * owners * parts), case.dtype.itemsize
        sizes = [(at.stop - at.start) * item for way in matrices.messages for _, at in way]
        sent["matrices"] = [("message", size) for size in sizes]
    weights, rows = weights_of(shards), case.rows(case.share(d * owners + e, cut.shares) if share is None else share)
    if not piped:
        for each in rows.split(case.options.accumulate):
            part.forward_backward(weights, each)
    else:
        stage = UntimedStage(make_peer("pipeline", p, stages), part, weights, case.model, cut.recompute, where)
        if cut.schedule == "one batch":
            for each in rows.split(case.options.accumulate):
                stage.forward_backward(each)
        elif cut.schedule == "pipedream":
            pipedream(case, stage, shards, p, stages)
        else:
            actions = actions_of(cut.schedule, stages, p, cut.microbatches, cut.chunks)
            stage.run(actions, rows.split(cut.microbatches))
    weights.finish()
    if messages is not None and cut.schedule != "pipedream":  # the end of a step
        shards.reduce_scatter()
        shards.all_gather()
        if experts is not None:
            common = sum(view.nbytes for each in itertools.chain(*part.common()) for view in shards.gradients_of(each))
            sent["common"] = [("all_reduce", common)]
    part.pool.memory = None
    return memory, shards.units.size


def pipedream(case: Workload, stage: Stage, shards: Shards, p: int, stages: int) -> None:
    """Run the steps that fill the pipeline on stage p; each step is a batch (hpcdl/parallel/stash.py)."""
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
