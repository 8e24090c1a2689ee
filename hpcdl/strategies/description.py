"""The description of a strategy, which help, files of options, plan, search and compare read.

    STRATEGY = Strategy("train-allreduce", AllReduceOptions, train, held=held, step=step, check=fits)

    train                          the loop
    held(case, rank, memory)       adds the vectors and activations that a rank holds to a Memory
    step(case)                     returns what a step costs on any machine: gradients, updates, calls (StepCost)
    cut(options, ranks)            returns into which parts a model is cut (Cut), in the place of held and step: a dry
                                   run of a step, on the parts that train, finds what a rank holds and sends

`case` is the workload to forecast (workload.py). Importing hpcdl/strategies/NAME.py starts no MPI and compiles no
kernel, so that `--help` is quick: the file's functions import the modules that compute."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pkgutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcdl.runs.options import Options

if TYPE_CHECKING:  # types of the arguments of `train`, held, step
    from hpcdl.comm import Communicator as Communicator
    from hpcdl.data import Batch as Batch
    from hpcdl.data import Data as Data
    from hpcdl.memory import Memory as Memory
    from hpcdl.optim import Optimizer as Optimizer
    from hpcdl.runs.run import Run as Run
    from hpcdl.runs.stopwatch import Stopwatch as Stopwatch
    from hpcdl.strategies.workload import Workload as Workload
else:  # importing them would start MPI and compile kernels
    Communicator = Batch = Data = Memory = Optimizer = Run = Stopwatch = Workload = Any

SAME = 5  # arguments of every loop: comm, model, data, optimizer, run
SMALL = "--model mlp:32 --batch-per-rank 8"


CODING = "coding "  # before the name of a method, in `Call.operation`


class Call(NamedTuple):
    """A call of the communicator by `ranks` ranks (0: all that train) on `bytes` bytes; `times` per step, on average.
    operation: all_reduce; a method of --compress with its settings; CODING and such a method, for its computing alone;
    message; or exchange (with each of `partners` ranks)."""

    operation: str
    bytes: float
    times: float = 1.0
    partners: int = 0
    ranks: int = 0

    @classmethod
    def exchanges(cls, bytes: float, rounds: Sequence[Sequence[Sequence[int]]], times: float = 1.0) -> list[Call]:
        """Return the exchanges of the busiest rank in `times` rounds of gossip per step, which take the graphs in turn.
        bytes: to each partner. rounds: for each graph, the partners of every rank."""
        most = [max(map(len, graph)) for graph in rounds]
        return [cls("exchange", bytes, times / len(most), partners) for partners in most if partners]


class Service(NamedTuple):
    """The work of parameter servers in a step: each worker pulls `pulled` bytes from each server and pushes `pushed`.
    rounds: updates wait for all pushes. apart: one worker does a step. bound: clocks a worker may be ahead."""

    servers: int
    workers: int
    pulled: float
    pushed: float
    rounds: bool = False
    apart: bool = False
    bound: float = math.inf


class StepCost(NamedTuple):
    """The cost of a step of `examples` examples on all ranks. gradients: (rows, number of gradients of so many rows) of
    the rank that computes most; drawn: rows of its batches. updates: of all parameters. hidden_by: what hides the
    calls, "backward", "gradient" or "" (nothing). buckets: slices of the gradient, each sent when complete, and
    each by as many of the calls."""

    examples: int
    gradients: Sequence[tuple[float, float]]
    calls: Sequence[Call] = ()
    updates: float = 1.0
    drawn: float = 0.0
    hidden_by: str = ""
    buckets: Sequence[slice] = ()
    service: Service | None = None


class Cut(NamedTuple):
    """How a model is cut. shape: ranks along data, pipeline, tensor. zero: ZeRO's stage. owners: layers have one owner.
    schedule: of the pipeline. microbatches: 0 if a step is one batch. tensor: layers are cut, even into one part.
    context: ranks that share the tokens of sequences. attention: their algorithm. expert: ranks that share experts, and
    have shares of the batch."""

    shape: tuple[int, int, int]
    zero: int = 0
    owners: bool = False
    schedule: str = ""
    microbatches: int = 0
    chunks: int = 1
    recompute: bool = False
    tensor: bool = False
    sequence: bool = False
    context: int = 1
    attention: str = "ring"
    expert: int = 1

    @property
    def shares(self) -> int:
        """Shares of a batch: along data and expert."""
        return self.shape[0] * self.expert

    @property
    def apart(self) -> int:
        """Ranks from a stage to the next one: along context, expert and tensor."""
        return self.shape[2] * self.expert * self.context

    @property
    def copies(self) -> int:
        """Ranks with the same part of the model: along data and context."""
        return self.shape[0] * self.context

    @property
    def sharing(self) -> int:
        """Ranks that share the computing of a layer for a row: along tensor and context."""
        return self.shape[2] * self.context


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to train, and its program. TypeError if it has neither `cut` nor both `held` and `step`.
    program: its name. options_class: its options; a field `servers` is the number of parameter servers. train: the
    loop, or its name "package.module:function"; arguments after comm, model, data, optimizer, run are options. renamed:
    for arguments of `train` with another name than their option, the option. ranks: the only possible number; None:
    any. check: raises UsageError if options, ranks and model do not fit together. cut: if given, `train` gets an
    optimizer of size 0, for `of_size`. survivor: name of the class from whose object surviving ranks go on. small:
    options of a small training that measures what a step costs beyond its parts; {ranks}, {widths} (as many layers),
    {data}, {model} are filled in. mode(options): the mode in which it trains, or "". modes: options of each mode."""

    program: str
    options_class: type
    train: Callable | str
    held: Callable[[Any, int, Memory], None] | None = None
    step: Callable[[Any], StepCost] | None = None
    cut: Callable[[Any, int], Cut] | None = None
    ranks: int | None = None
    check: Callable[[Any, int, Any], None] | None = None
    survivor: str = "hpcdl.recovery.survivor:Survivor"
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)
    small: str = SMALL
    mode: Callable[[Any], str] = lambda options: ""
    modes: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.cut or (self.held and self.step)):
            raise TypeError(f"{self.program} has no forecast: give held and step, or cut")

    @property
    def loop(self) -> Callable:
        """`train`, imported if it is given by its name."""
        return pkgutil.resolve_name(self.train) if isinstance(self.train, str) else self.train

    def start(self, comm: Any, model: Any, data: Any, optimizer: Any, run: Any) -> None:
        """Call the loop; each argument after `run` is the run's option of its name, or the one that `renamed` gives."""
        options = run.options
        known = {field.name: field.name for field in dataclasses.fields(options)} | self.renamed
        names = [name for name in list(inspect.signature(self.loop).parameters)[SAME:] if name in known]
        self.loop(comm, model, data, optimizer, run, **{name: getattr(options, known[name]) for name in names})

    @property
    def own_options(self) -> dict[str, type]:
        """The options that this program adds, or has with other defaults: the type of each default, by name."""
        classes = [each for each in self.options_class.__mro__ if issubclass(each, Options) and each is not Options]
        names = {name for each in classes for name in inspect.get_annotations(each)}
        fields = dataclasses.fields(self.options_class)
        return {field.name: type(field.default) for field in fields if field.name in names}
