"""The workload of a forecast: a training program, its options, ranks, model, and the shape of the data.

Workload   options of the command line, ranks and their roles, the model on meta arrays, the shape of the data
Shape      properties of a data set without its rows; also of a data set that does not exist (`--model gpt3`)
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.data import open_data
from hpcdl.data.batch import Batch
from hpcdl.memory import Memory
from hpcdl.models import HALF, for_data
from hpcdl.models.model import abilities_of
from hpcdl.optim import vectors_of
from hpcdl.planning.configurations import CONFIGURATIONS
from hpcdl.planning.meta_arrays import META
from hpcdl.plugins import is_plugin, of_torch
from hpcdl.runs.options import Options
from hpcdl.runs.roles import Roles, divide

if TYPE_CHECKING:
    from hpcdl.launch.command_lines import Command

EXAMPLES = 1_000_000  # of data that do not exist: enough for any batch


@dataclass
class Shape:
    """The shape of a data set; item, target: bytes in memory of an element of x, and of a row's y."""

    name: str
    features: tuple[int, ...]
    classes: int
    outputs: tuple[int, ...] = ()
    vocabulary: Any = None
    sparse: bool = False
    examples: int = EXAMPLES
    test: int = 0
    item: int = 4
    target: int = 8
    row: int = 0  # bytes of a row of x in memory
    statistics: Any = None

    def steps_per_epoch(self, batch: int) -> int:
        """Return the number of batches of an epoch."""
        return math.ceil(self.examples / batch)


def shape_of(options: Options, model: str) -> Shape:
    """Return the shape of the options' data, or of a named configuration's data if that is the model.

    UsageError for data that cannot be opened.
    """
    if model in CONFIGURATIONS:
        configuration = CONFIGURATIONS[model]
        length = configuration.context
        return Shape(f"tokens for {model}", (length,), configuration.vocabulary, vocabulary=True, target=0)
    options_of_open: dict[str, Any] = {} if is_plugin(options.data) else {"placement": "streamed"}  # no row is read
    data = open_data(
        options.data,
        dtype="float32" if options.dtype == HALF else options.dtype,
        seed=options.seed,
        validation=options.validation,
        standardize=False,
        **options_of_open,
    )
    source, width = data.train.source, math.prod(data.features)
    item = getattr(source, "kind", np.dtype(options.dtype if options.dtype != HALF else "float32")).itemsize
    row = width * item
    if data.sparse:  # on average: the elements, and their columns
        row = 8 + math.ceil(source.most_elements(len(source)) * (item + 4) / max(1, len(source)))
    shape = Shape(
        data.name,
        data.features,
        data.classes,
        data.outputs,
        data.vocabulary,
        data.sparse,
        data.examples,
        0 if data.test is None else data.test.examples,
        item,
        math.prod(data.outputs) * np.dtype(source.y_kind).itemsize,
        row,
    )
    data.close()
    return shape


class Workload:
    """The training that a forecast is made for.

    program: as train-grid. ranks: of the whole job, with data servers; size: without them. plan: (batch, steps of an
    epoch, steps). UsageError if options, ranks and model do not fit together.
    """

    model: Any

    def __init__(self, program: str, options: Any, ranks: int, check: Any = None):
        self.program, self.ranks = program, ranks
        known, spec = CONFIGURATIONS.get(options.model), options.model
        self.data = shape_of(options, spec)
        self.spec = spec if known is None else known.spec
        self.options = options if known is None else dataclasses.replace(options, model=known.spec)
        self.roles: Roles = divide(ranks, getattr(options, "servers", 0), options.data_servers)
        self.size = ranks - options.data_servers
        self.real = is_plugin(self.spec) and not self.spec.startswith(("mlp:", "gpt:"))  # its code needs real arrays
        self.real |= of_torch(self.spec)
        device = {} if self.real else {"device": META}
        self.model = for_data(self.spec, self.data, options.dtype, loss=options.loss, **device)
        if check is not None:
            check(self.options, self.size, self.model)
        self.device = abilities_of(self.model).device
        self.dtype, self.length = self.model.layout.dtype, self.model.layout.size
        self.plan = self.options.plan(len(self.roles.workers), self.data)
        self.vectors = (*vectors_of(self.options.optimizer), *(["average"] if self.options.average else []))

    @classmethod
    def of(cls, command: "Command", parse: Any) -> "Workload":
        """Return the workload of a command line."""
        options = command.options(parse, "--out=none")
        return cls(command.training.strategy.program, options, command.ranks, command.training.strategy.check)

    @property
    def batch(self) -> int:
        """Examples of a step, limited by the data set."""
        return min(self.plan[0], self.data.examples)

    def share(self, rank: int, size: int, batch: int = 0) -> int:
        """Return the number of rows of a batch that one of `size` ranks has."""
        own = chunk(batch or self.batch, size, rank)
        return own.stop - own.start

    def rows(self, count: int) -> Batch:
        """Return a batch of `count` rows on the model's device, with labels 0."""
        shape, x = (count, math.prod(self.data.features)), None  # type: tuple[int, int], Any
        y_kind = np.dtype(np.int64) if self.data.classes else self.dtype
        if self.data.sparse:
            from hpcdl.csr import CSR

            x = CSR.empty(*shape, self.dtype, empty=np.zeros)
            x.elements.data = self.device.zeros(0, self.dtype)
        else:
            x = self.device.zeros(shape, self.dtype)
        y = self.device.zeros((count, *self.data.outputs), y_kind)
        return Batch(x, y, count, 0, 0, np.arange(count))

    def add(self, memory: Memory, kind: str, vectors: float = 1, length: int | None = None, item: int = 0) -> None:
        """Add vectors of this kind to the memory. length: elements of each; default: all parameters."""
        length = self.length if length is None else length
        memory.add(kind, round(vectors * length) * (item or self.dtype.itemsize))
