"""The workload of a forecast: a training program, its options, ranks, model, and the shape of the data."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.data import open_data
from hpcdl.data.batch import Batch
from hpcdl.data.placement import FileRows
from hpcdl.errors import UsageError
from hpcdl.memory import Memory
from hpcdl.models import HALF, SETTINGS, for_data
from hpcdl.models.configurations import CONFIGURATIONS
from hpcdl.models.meta_arrays import META
from hpcdl.models.model import abilities_of
from hpcdl.optim import matrix_work, vectors_of
from hpcdl.parameter_server.replication import backups
from hpcdl.parameter_server.roles import Roles, divide
from hpcdl.parameter_server.store_settings import StoreLayout
from hpcdl.plugins import is_plugin, of_torch
from hpcdl.runs.options import Options
from hpcdl.strategies.description import Service, Strategy

EXAMPLES = 1_000_000  # of data that do not exist: enough for any batch


@dataclass
class Shape:
    """The properties of a data set without its rows. item, target: bytes of an element of x, and of a row's y."""

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
    rows: int = EXAMPLES  # training rows; a mixture has others than `examples`, those of an epoch
    blocks: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # of each file: bytes of a block, blocks
    statistics: Any = None
    nonzero: np.ndarray | None = None  # rows that are not zero in each column; for --sparse-push

    def steps_per_epoch(self, batch: int) -> int:
        """Return the number of batches of an epoch."""
        return math.ceil(self.examples / batch)


def shape_of(options: Options, model: str) -> Shape:
    """Return the shape of the options' data, or of the data of the named configuration `model`. Raises UsageError."""
    if model in CONFIGURATIONS:
        configuration = CONFIGURATIONS[model]
        length = configuration.context
        return Shape(f"tokens for {model}", (length,), configuration.vocabulary, vocabulary=True, target=0)
    dtype = "float32" if options.dtype == HALF else options.dtype
    how: dict[str, Any] = {"dtype": dtype, "seed": options.seed, "validation": options.validation}
    how |= {} if is_plugin(options.data) else {"placement": "streamed", "shuffle_window": 1}  # no row is read
    data = open_data(options.data, standardize=False, **how)
    source: Any = data.train.source
    width = math.prod(data.features)
    shape = Shape(data.name, data.features, data.classes, data.outputs, data.vocabulary, data.sparse, data.examples)
    parts = [each.source for each in source.parts] if data.mixture else [source]
    shape.rows, shape.test = data.train.examples, 0 if data.test is None else data.test.examples
    shape.target = math.prod(data.outputs) * np.dtype(source.y_kind).itemsize
    shape.item = getattr(source, "kind", np.dtype(dtype)).itemsize
    shape.row = width * shape.item
    if data.sparse:  # on average: the elements and their column numbers
        shape.row = 8 + math.ceil(source.most_elements(len(source)) * (shape.item + 4) / max(1, len(source)))
        if getattr(options, "sparse_push", False):
            columns = (np.asarray(each.x.indices) for each in parts)
            shape.nonzero = np.sum([np.bincount(each, minlength=width) for each in columns], axis=0)
    shape.blocks = [(each.block_bytes, len(each.starts) - 1) for each in parts if isinstance(each, FileRows)]
    data.close()
    return shape


class Workload:
    """The training that a forecast is made for. UsageError if options, ranks and model do not fit together. ranks: with
    data servers; size: without. plan: (batch size, steps per epoch, steps). checked: False to begin a search.
    expert_rows: of each mixture and rank, the rows of its experts in each forward pass of a step; {}: even ones."""

    model: Any

    def __init__(self, strategy: Strategy, options: Any, ranks: int, checked: bool = True):
        self.strategy, self.program, self.ranks = strategy, strategy.program, ranks
        self.expert_rows: dict[str, list[list[int]]] = {}
        known, spec = CONFIGURATIONS.get(options.model), options.model
        self.data = shape_of(options, spec)
        self.spec = spec if known is None else known.spec
        self.options = options if known is None else dataclasses.replace(options, model=known.spec)
        self.roles: Roles = divide(ranks, getattr(options, "servers", 0), options.data_servers)
        self.size = ranks - options.data_servers
        self.real = is_plugin(self.spec) and self.spec.partition(":")[0] not in SETTINGS  # its code needs real arrays
        self.real |= of_torch(self.spec)
        device = {} if self.real else {"device": META}
        self.model = for_data(self.spec, self.data, options.dtype, loss=options.loss, **device)
        if checked and strategy.check is not None:
            strategy.check(self.options, self.size, self.model)
        self.device = abilities_of(self.model).device
        self.dtype, self.length = self.model.layout.dtype, self.model.layout.size
        self.plan = self.options.plan(len(self.roles.workers), self.data)
        self.vectors = (*vectors_of(self.options.optimizer), *(["average"] if self.options.average else []))
        self.workspace, self.matrix_flops = matrix_work(self.options.optimizer, self.model.layout.hidden)

    @classmethod
    def of(cls, command: Any, parse: Any) -> "Workload":
        """Return the workload of a command line (hpcdl/launch/command_lines.py)."""
        return cls(command.training.strategy, command.options(parse, "--out=none"), command.ranks)

    @property
    def batch(self) -> int:
        """Examples of a step, limited by the data set."""
        return min(self.plan[0], self.data.examples)

    def share(self, rank: int, size: int, batch: int = 0) -> int:
        """Return how many rows of a batch of `batch` rows (0: a step's batch) rank `rank` of `size` ranks has."""
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
        """Add vectors of this kind to `memory`, of `length` elements (None: all) of `item` bytes (0: as parameters)."""
        length = self.length if length is None else length
        memory.add(kind, round(vectors * length) * (item or self.dtype.itemsize))

    def hold_state(self, memory: Memory, parameters: float = 1, optimizer: float | None = None) -> None:
        """Add so many vectors of parameters and of the optimizer (None: those it has), and one of gradients."""
        self.hold(memory, "parameters", parameters)
        self.hold(memory, "gradients")
        self.hold(memory, "optimizer", len(self.vectors) if optimizer is None else optimizer)

    def hold_activations(self, memory: Memory, rows: int) -> None:
        """Add the activations of a gradient of `rows` rows in --accumulate parts; none for a model without a pool."""
        model = self.model
        if not abilities_of(model).pool:
            return
        model.pool.memory = memory
        w, g = (self.device.zeros(self.length, self.dtype) for _ in range(2))
        for part in self.rows(rows).split(min(self.options.accumulate, max(1, rows))):
            model.loss_and_gradient(w, part, g)
        model.pool.memory = None

    def hold_step(self, memory: Memory, rows: int, parameters: float = 1, optimizer: float | None = None) -> None:
        """Add vectors as `hold_state` does, and the activations of `rows` rows."""
        self.hold_state(memory, parameters, optimizer)
        self.hold_activations(memory, rows)

    def hold_slice(self, memory: Memory, rank: int, service: Service, optimizer: int) -> None:
        """Add a server's slice and its replicas of other slices: values, copies in flight, gradients, optimizer state.
        In rounds all workers get one copy of the values; otherwise each worker may get another version."""
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
        """The bytes of a vector as long as all parameters."""
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
        """Return the mean number of columns that are not zero in a batch of `rows` rows. UsageError for dense data.
        A column with d nonzeros in n rows is zero in a batch of b with probability C(n - d, b) / C(n, b)."""
        if self.data.nonzero is None:
            raise UsageError("--sparse-push is for sparse data, and these are dense: leave it out")
        n, lost = self.data.examples, 0.0
        for d, columns in zip(*np.unique(np.minimum(self.data.nonzero, n), return_counts=True), strict=True):
            if n - d >= rows:
                among = [math.lgamma(k + 1) for k in (n - d, n - rows, n, n - d - rows)]
                lost += columns * math.exp(among[0] + among[1] - among[2] - among[3])
        return len(self.data.nonzero) - lost
