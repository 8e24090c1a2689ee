"""The workload of a forecast: a training program, its options, ranks, model, and the shape of the data.

Workload   options of the command line, ranks and their roles, the model on meta arrays, the shape of the data
Shape      properties of a data set without its rows; also of a data set that does not exist (`--model gpt3`)
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.data import open_data
from hpcdl.data.batch import Batch
from hpcdl.errors import UsageError
from hpcdl.memory import Memory
from hpcdl.models import HALF, for_data
from hpcdl.models.configurations import CONFIGURATIONS
from hpcdl.models.meta_arrays import META
from hpcdl.models.model import abilities_of
from hpcdl.optim import vectors_of
from hpcdl.parameter_server.replication import backups
from hpcdl.parameter_server.roles import Roles, divide
from hpcdl.parameter_server.store_settings import StoreLayout
from hpcdl.plugins import is_plugin, of_torch
from hpcdl.runs.options import Options
from hpcdl.strategies.description import Service, Strategy

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
    nonzero: np.ndarray | None = None  # by column the rows that are not zero there, if batches' columns count

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
    counts = data.sparse and getattr(options, "sparse_push", False)
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
        nonzero=np.bincount(np.asarray(source.x.indices), minlength=width) if counts else None,
    )
    data.close()
    return shape


class Workload:
    """The training that a forecast is made for.

    ranks: of the whole job, with data servers; size: without them. plan: (batch, steps of an epoch, steps). checked:
    False for options that only begin a search. UsageError if options, ranks and model do not fit together.
    """

    model: Any

    def __init__(self, strategy: Strategy, options: Any, ranks: int, checked: bool = True):
        self.strategy, self.program, self.ranks = strategy, strategy.program, ranks
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
        if checked and strategy.check is not None:
            strategy.check(self.options, self.size, self.model)
        self.device = abilities_of(self.model).device
        self.dtype, self.length = self.model.layout.dtype, self.model.layout.size
        self.plan = self.options.plan(len(self.roles.workers), self.data)
        self.vectors = (*vectors_of(self.options.optimizer), *(["average"] if self.options.average else []))

    @classmethod
    def of(cls, command: Any, parse: Any) -> "Workload":
        """Return the workload of a command line (hpcdl/launch/command_lines.py)."""
        return cls(command.training.strategy, command.options(parse, "--out=none"), command.ranks)

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

    def hold(self, memory: Memory, kind: str, vectors: float = 1, length: int | None = None, item: int = 0) -> None:
        """Add vectors of this kind to the memory. length: elements of each; default: all parameters."""
        length = self.length if length is None else length
        memory.add(kind, round(vectors * length) * (item or self.dtype.itemsize))

    def hold_state(self, memory: Memory, parameters: float = 1, optimizer: float | None = None) -> None:
        """Add vectors of parameters and optimizer, and one of gradients."""
        self.hold(memory, "parameters", parameters)
        self.hold(memory, "gradients")
        self.hold(memory, "optimizer", len(self.vectors) if optimizer is None else optimizer)

    def hold_activations(self, memory: Memory, rows: int) -> None:
        """Add the activations of a gradient of `rows` rows in --accumulate parts, taken from the pool by the model.

        Those of a user's model without a pool are not counted.
        """
        model = self.model
        if not abilities_of(model).pool:
            return
        model.pool.memory = memory
        w, g = (self.device.zeros(self.length, self.dtype) for _ in range(2))
        for part in self.rows(rows).split(min(self.options.accumulate, max(1, rows))):
            model.loss_and_gradient(w, part, g)
        model.pool.memory = None

    def hold_step(self, memory: Memory, rows: int, parameters: float = 1, optimizer: float | None = None) -> None:
        """Add vectors like `hold_state`, and the activations of `rows` rows."""
        self.hold_state(memory, parameters, optimizer)
        self.hold_activations(memory, rows)

    def hold_slice(self, memory: Memory, rank: int, service: Service, optimizer: int) -> None:
        """Add a server's slice: values, copies that are being sent, pushed gradients, and vectors of the optimizer.

        In rounds all workers get one copy; else each may get another version, and the most that can be in flight is
        counted. A replica of another server's slice takes its values and pushed gradients.
        """
        holders, workers = service.servers, service.workers
        width = self.first_layer[1] if getattr(self.options, "sparse_push", False) else 1
        layout = StoreLayout(self.length, holders, servers=holders, block=width)
        replicas = getattr(self.options, "replicas", 1)
        self.hold(memory, "parameters", 2 if service.rounds else 1 + workers, layout.length(rank))
        self.hold(memory, "gradients", workers if service.rounds or replicas > 1 else 1, layout.length(rank))
        self.hold(memory, "optimizer", optimizer, layout.length(rank))
        for primary in [each for each in range(holders) if rank in backups(each, holders, replicas)]:
            for kind, vectors in (("parameters", 1), ("gradients", workers), ("optimizer", optimizer)):
                self.hold(memory, kind, vectors, layout.length(primary))

    @property
    def bytes(self) -> int:
        """Bytes of a vector of all parameters."""
        return self.length * self.dtype.itemsize

    @property
    def largest(self) -> int:
        """Rows of the worker with the largest share of a batch."""
        return self.share(0, len(self.roles.workers))

    @property
    def first_layer(self) -> tuple[int, int]:
        """The shape of the weight of the model's first layer: features, and values of each."""
        features, width = self.model.layers[0].full_shapes["weight"]
        return features, width

    def touched(self, rows: int) -> float:
        """Return in how many columns a batch of `rows` rows is not zero, in the mean over all such batches.

        A column in which d of n rows are not zero is zero in a batch of b with C(n - d, b) / C(n, b).
        """
        if self.data.nonzero is None:
            raise UsageError("--sparse-push is for sparse data: of dense rows a batch touches all; leave it out")
        n, lost = self.data.examples, 0.0
        for d, columns in zip(*np.unique(np.minimum(self.data.nonzero, n), return_counts=True), strict=True):
            if n - d >= rows:
                among = [math.lgamma(k + 1) for k in (n - d, n - rows, n, n - d - rows)]
                lost += columns * math.exp(among[0] + among[1] - among[2] - among[3])
        return len(self.data.nonzero) - lost
