"""A step of a model that is cut, gone through by one rank without memory and without partners: what it would hold.

The parts, the shards, the gathered layers and the stage of the pipeline are those that train; a `Peer` stands for the
ranks beside this one, whose messages arrive at once. Arrays are outlines (meta_arrays.py), so that no model is too
large.

    who shares      data d         pipeline p          tensor t
    train-model-parallel, train-pipeline                 1     all     1
    train-tensor-parallel                                1     1       all
    train-fully-sharded                                  all   1       1        stages 1, 2, 3 of ZeRO
    train-grid                                           d     p       t        stages 0, 1, 2, 3 along data
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from hpcdl.chunks import chunk
from hpcdl.comm.grid import parse_grid, place
from hpcdl.comm.tensor_group import TensorGroup
from hpcdl.memory import Memory
from hpcdl.models.balance import cut_layers
from hpcdl.models.part import ModelPart
from hpcdl.parallel.sharded_weights import weights_of
from hpcdl.parallel.stage import KINDS, Stage
from hpcdl.parallel.stash import Stash
from hpcdl.parallel.timetable import Action
from hpcdl.parallel.zero import Shards
from hpcdl.planning.workload import Workload
from hpcdl.strategies.pipeline_schedules import actions_of

CUT = "train-model-parallel", "train-pipeline", "train-tensor-parallel", "train-fully-sharded", "train-grid"
ROUNDS = 3  # micro-batches for each stage after which PipeDream holds all that it ever does


class CompletedRequest:
    """The request of a message that has arrived."""

    def wait(self, doze: bool = False) -> None:
        """It is over."""

    def test(self) -> bool:
        """It is over."""
        return True


class SendRequest:
    """The request of a push: what is sent stays until the partner has come to take it.

    It has left when its answer is there (`wait`), or, where none is waited for, when this rank has done something else.
    """

    def __init__(self, answered: bool):
        self.left, self.answered = False, answered

    def wait(self, doze: bool = False) -> None:
        """The answer is there."""
        self.left = True

    def test(self) -> bool:
        """Whether it has left; the first time it has not."""
        left, self.left = self.left, self.left or not self.answered
        return left


class Peer:
    """The communicator of a rank whose partners answer at once; device: where vectors lie that it makes."""

    def __init__(self, rank: int, size: int, device: Any):
        self.rank, self.size, self.device = rank, size, device

    def empty(self, n: int, dtype: Any) -> Any:
        """A vector."""
        return self.device.empty(n, dtype)

    def all_reduce(self, *_: Any) -> None:
        """It is summed, or here, already."""

    all_gather = wait = all_reduce

    def reduce_scatter(self, array: Any) -> Any:
        """This rank's part."""
        flat = array.reshape(-1)
        return flat[chunk(flat.size, self.size, self.rank)]

    def ipush(self, array: Any, to: int, tag: int = 0) -> SendRequest:
        """Activations (hpcdl/parallel/stage.py) are answered by the gradient by them."""
        return SendRequest(answered=tag % len(KINDS) == KINDS.index("F"))

    def iall_gather(self, *_: Any) -> CompletedRequest:
        """It is there."""
        return CompletedRequest()

    ibroadcast = ireduce_scatter = ireduce = iall_gather


class OptimizerOutline:
    """An optimizer of vectors by these names, that never steps (hpcdl/optim/optimizer.py)."""

    def __init__(self, names: tuple[str, ...], device: Any, dtype: Any):
        self.names, self.device, self.dtype = names, device, dtype
        self.state: dict[str, Any] = {}

    def of_size(self, size: int) -> "OptimizerOutline":
        """With vectors of so many elements."""
        other = copy.copy(self)
        other.state = {name: self.device.zeros(size, self.dtype) for name in self.names}
        return other

    def over(self, part: slice) -> "OptimizerOutline":
        """It would be that of a slice."""
        return self


class Rehearsed(Stage):
    """A stage of a pipeline whose computing takes no time."""

    @contextlib.contextmanager
    def _computing(self, action: Action, fraction: float) -> Iterator[None]:
        yield


class Cut(NamedTuple):
    """How a program cuts a model: ranks along data, pipeline and tensor, the stage of ZeRO, and of a pipeline its step.

    tensor: whether ranks share layers, be it only one. microbatches: 0 where a step is one batch.
    """

    shape: tuple[int, int, int]
    zero: int = 0
    owners: bool = False
    schedule: str = ""
    microbatches: int = 0
    chunks: int = 1
    recompute: bool = False
    tensor: bool = False
    sequence: bool = False


def cut_of(case: Workload) -> Cut:
    """How this program cuts the model."""
    options, size = case.options, case.size
    if case.program == "train-fully-sharded":
        return Cut((size, 1, 1), options.stage, options.gather == "broadcast")
    if case.program == "train-tensor-parallel":
        return Cut((1, 1, size), tensor=True, sequence=options.sequence_parallel)
    if case.program == "train-model-parallel":
        return Cut((1, size, 1), schedule="one batch")
    pipeline = options.schedule, options.microbatches, options.chunks, options.recompute
    if case.program == "train-pipeline":
        return Cut((1, size, 1), 0, False, *pipeline)
    grid = parse_grid(options.grid, size)
    shape = grid["data"], grid["pipeline"], grid["tensor"]
    return Cut(shape, options.stage, False, *pipeline, tensor=True, sequence=options.sequence_parallel)


def rehearse(
    case: Workload,
    rank: int,
    cut: Cut | None = None,
    share: int | None = None,
    peers: Callable[..., Peer] | None = None,
) -> tuple[Memory, int]:
    """What this rank holds at most in a step, by kind, and how many parameters it updates.

    cut: by itself, that of the program. share: the rows of its step, by itself those that it has of a batch. peers:
    makes who stands for the others along an axis of the grid, peers(axis, rank, size, device), to note what is sent.
    """
    made = peers or (lambda axis, *who: Peer(*who))
    cut, memory, device = cut or cut_of(case), Memory(), case.device
    (copies, stages, parts), (d, p, t) = cut.shape, place(rank, cut.shape)
    piped, layers = bool(cut.schedule), None
    if piped:
        layers = cut_layers(case.model, stages * cut.chunks)[p::stages]
    group = TensorGroup(made("tensor", t, parts, device), cut.sequence) if cut.tensor else None  # type: ignore[arg-type]
    part = ModelPart(case.model, layers, (t, parts), group)
    part.initial = lambda random: iter(())  # type: ignore[method-assign]  # no values are drawn
    part.pool.memory = memory
    rule: Any = OptimizerOutline(case.vectors, device, case.dtype)
    data: Any = made("data", d, copies, device)
    shards = Shards(SimpleNamespace(memory=memory, random=None), part, rule, data, cut.zero, cut.owners)
    weights, rows = weights_of(shards), case.rows(case.share(d, copies) if share is None else share)
    if not piped:
        for each in rows.split(case.options.accumulate):
            part.forward_backward(weights, each)
    else:
        line: Any = made("pipeline", p, stages, device)
        stage = Rehearsed(line, part, weights, case.model, cut.recompute)
        if cut.schedule == "one batch":
            for each in rows.split(case.options.accumulate):
                stage.forward_backward(each)
        elif cut.schedule == "pipedream":
            pipedream(case, stage, shards, p, stages)
        else:
            actions = actions_of(cut.schedule, stages, p, cut.microbatches, cut.chunks)
            stage.run(actions, rows.split(cut.microbatches))
    weights.finish()
    if peers is not None and cut.schedule != "pipedream":  # what a step ends with
        shards.reduce_scatter()
        shards.all_gather()
    part.pool.memory = None
    return memory, shards.units.size


def pipedream(case: Workload, stage: Stage, shards: Shards, p: int, stages: int) -> None:
    """As many of its steps as fill the pipeline, on stage p: each is a batch of its own (hpcdl/parallel/stash.py)."""
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
