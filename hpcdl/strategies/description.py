"""The description of a strategy, which help, files of options, plan, search and compare read.

    STRATEGY = Strategy("train-allreduce", AllReduceOptions, train, held=held, step=step, check=fits)

    train                          the loop
    held(case, rank, memory)       what a rank holds: adds vectors and activations to a Memory
    step(case)                     what a step costs, whatever the machine: gradients, updates, calls (StepCost)
    cut(options, ranks)            in the place of both, where the model is cut: into which parts (Cut). A dry run of
                                   the step, on the parts that train, then finds what a rank holds and sends

It stands beside the loop, in hpcdl/strategies/NAME.py. Forecasts read it (hpcdl/planning); `case` is the training that
is foretold (workload.py). To import such a file starts no MPI and compiles no kernel, so that `--help` is quick: what
computes is imported by the functions that call it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcdl.runs.options import Options

if TYPE_CHECKING:
    from hpcdl.memory import Memory

SAME = 5  # arguments that each loop takes: comm, model, data, optimizer, run
SMALL = "--model mlp:32 --batch-per-rank 8"


class Call(NamedTuple):
    """A call of the communicator, `times` times a step in the mean, on `bytes` bytes.

    operation: all_reduce, float16 or bfloat16 (a compressed all-reduce), message, or exchange, with `partners` others
    at once. ranks: how many call together; 0: all that train.
    """

    operation: str
    bytes: float
    times: float = 1.0
    partners: int = 0
    ranks: int = 0


def exchanges(bytes: float, rounds: Sequence[Sequence[Sequence[int]]], times: float = 1.0) -> list[Call]:
    """Return the calls of rounds of gossip, together so many a step; of each round its busiest rank counts.

    A round is a graph: the partners of each rank.
    """
    most = [max(map(len, graph)) for graph in rounds]
    return [Call("exchange", bytes, times / len(most), partners) for partners in most if partners]


class Service(NamedTuple):
    """What parameter servers do in a step: each of `workers` pulls and pushes so many bytes at each of `servers`.

    rounds: True if a server updates once all have pushed. apart: True if a step is that of any one worker. bound:
    clocks that a worker may be ahead of the slowest.
    """

    servers: int
    workers: int
    pulled: float
    pushed: float
    rounds: bool = False
    apart: bool = False
    bound: float = math.inf


class StepCost(NamedTuple):
    """What a step costs.

    examples: of the step, on all ranks. gradients: (rows, how many a step) of the rank that computes most. drawn: rows
    of the batches that it draws. updates: of all parameters, a step. hidden_by: the part of computing during which
    calls pass: backward, gradient, or none. buckets: slices of the gradient, one a call, which pass as soon as they are
    complete. service: of parameter servers, who then update.
    """

    examples: int
    gradients: Sequence[tuple[float, float]]
    calls: Sequence[Call] = ()
    updates: float = 1.0
    drawn: float = 0.0
    hidden_by: str = ""
    buckets: Sequence[slice] = ()
    service: Service | None = None


class Cut(NamedTuple):
    """The partition of a model: ranks along data, pipeline and tensor, ZeRO's stage, pipeline schedule.

    tensor: True if the program cuts layers, be it into one part. microbatches: 0 where a step is one batch.
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


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to train, with what its program needs to know; TypeError where it says neither `held` and `step` nor `cut`.

    program: the name of its program. options_class: its options; those that have a field `servers` have that many
    parameter servers. train(comm, model, data, optimizer, run, ...): the loop, or its name, package.module:function; it
    is also given each option that it names. renamed: the option or property of each argument whose name is another.
    ranks: how many it works on, where it is not any number. check(options, ranks, model): raises UsageError where these
    do not go together. cut: no rank holds the whole model: the optimizer that `train` is given is of size 0, for
    `of_size`. survivor: makes what ranks that outlive others go on from, if it is no plain one
    (hpcdl/recovery/survivor.py). small: options of a small training on any number of ranks, which measures what a step
    costs beyond its parts; {ranks} and {widths} stand for their number and for as many layers, {data} and {model} for
    those of the training that is foretold. mode(options): which of `modes`, each with options of its own, it trains in.
    """

    program: str
    options_class: type
    train: Callable | str
    held: Callable[[Any, int, Memory], None] | None = None
    step: Callable[[Any], StepCost] | None = None
    cut: Callable[[Any, int], Cut] | None = None
    ranks: int | None = None
    check: Callable[[Any, int, Any], None] | None = None
    survivor: Callable[[], Any] | None = None
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)
    small: str = SMALL
    mode: Callable[[Any], str] = lambda options: ""
    modes: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.cut or (self.held and self.step)):
            raise TypeError(f"{self.program} has no forecast: give held and step, or cut")

    @property
    def loop(self) -> Callable:
        """`train`, imported where it is given by its name."""
        return named(self.train) if isinstance(self.train, str) else self.train

    def start(self, comm: Any, model: Any, data: Any, optimizer: Any, run: Any) -> None:
        """Train with the run's options, each given to the argument of its name."""
        known = {field.name: field.name for field in dataclasses.fields(run.options)} | self.renamed
        names = [name for name in list(inspect.signature(self.loop).parameters)[SAME:] if name in known]
        self.loop(comm, model, data, optimizer, run, **{name: getattr(run.options, known[name]) for name in names})

    @property
    def own_options(self) -> dict[str, type]:
        """The types of the defaults of the options that it adds to the common ones, or has with other defaults."""
        classes = [each for each in self.options_class.__mro__ if issubclass(each, Options) and each is not Options]
        names = {name for each in classes for name in inspect.get_annotations(each)}
        fields = dataclasses.fields(self.options_class)
        return {field.name: type(field.default) for field in fields if field.name in names}


def named(text: str) -> Any:
    """What package.module:name stands for."""
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name)
