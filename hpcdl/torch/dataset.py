"""Any map-style Dataset of PyTorch as a data set: rows are made by `dataset[i]` when a batch needs them.

    data = from_dataset(FashionMNIST(..., transform=...), test=FashionMNIST(..., train=False), classes=10)

A row is dataset[i], its transforms included, after collate_fn (default_collate). x (rows, features) is flattened, in
the model's type; a module gets (rows, *features) again. Before each example the generators of torch, numpy and Python
are seeded with (seed, epoch, i), so a random transform is the same on any number of ranks and workers, and differs in
each epoch. `--data package.module:function` takes the result of a function that calls from_dataset, with the run's
seed, partition and held-out rows; each rank calls it, and holds the data set in its memory.

Placement streamed: examples are drawn block by block, in the order of a file with the same rows and blocks
(`sampler.WindowOrder`), for data sets that lie in files and are slow at random places."""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from hpcdl.chunks import chunks
from hpcdl.data.data_options import DataOptions, check_placement, held_out_rows, model_type
from hpcdl.data.dataset import Data
from hpcdl.data.digest import Digest
from hpcdl.data.hdf5 import slabs
from hpcdl.data.order.readers import MemoryReader, training_numbers
from hpcdl.data.order.sampler import order_name, training_counts
from hpcdl.data.schema import Schema
from hpcdl.errors import LoneError, UsageError
from hpcdl.plugins import plugin_errors
from hpcdl.torch.workers import Workers

DIGEST_EXAMPLES = 8  # examples in the digest, beside the targets
Form = tuple[tuple[int, ...], int, tuple[int, ...]]  # features, classes, outputs


class Examples:
    """Makes rows of a data set; can be pickled."""

    def __init__(self, dataset: Any, collate: Callable | None, seed: int):
        self.dataset, self.collate, self.seed = dataset, collate or default_collate, seed

    def rows(self, index: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return x (rows, features...) and y of the rows with these numbers, as in this epoch (-1: for scoring)."""
        examples = []
        with generators_kept():
            for i in index.tolist():
                self.draw_by(epoch, i)
                examples.append(self.dataset[i])
            batch = self.collate(examples)
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise UsageError(f"collated examples must be (x, y), and are a {type(batch).__name__}: give a collate_fn")
        x, y = (as_numbers(each) for each in batch)
        for each, what in ((x, "x"), (y, "y")):
            if each.dtype.kind not in "biuf" or len(each) != len(index):
                expected = f"numbers for each of {len(index)} examples"
                raise UsageError(f"{what} is {each.dtype} of shape {each.shape}, and should be {expected}")
        return x, y

    def draw_by(self, epoch: int, i: int) -> None:
        """Seed all generators for example i of this epoch."""
        text = f"{self.seed} example {epoch} {i}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  (transforms may know no other)


def as_numbers(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Context that restores the generators of torch, numpy and Python at its end."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


class DatasetRows:
    """Rows that are made on demand, with the interface of `hpcdl.data.placement.MemoryRows`.
    targets: the labels of all rows; None if they are unknown before the rows are made."""

    sparse, scale = False, 1.0

    def __init__(
        self, examples: Examples, form: Form, targets: np.ndarray | None, options: DataOptions, workers: int, name: str
    ):
        self.examples, (self.features, self.classes, self.outputs) = examples, form
        self.targets, self.partition, self.dtype, self.name = targets, options.partition, options.dtype, name
        self.width = int(np.prod(self.features))
        self.y_kind = np.dtype(np.int64) if self.classes else options.dtype
        self.augment: Any = SimpleNamespace(moves=lambda epoch, *_: epoch)  # for an Augment; passes the epoch on
        self.standard = options.standard(dict, Schema())
        self.workers = Workers(examples.rows, workers) if workers else None
        blocks = [each.start for each in slabs(len(self), self.width * self.dtype.itemsize)]
        self.starts = np.array([*blocks, len(self)])
        self.block = int(self.starts[1])  # rows of a block

    def __len__(self) -> int:
        return len(self.examples.dataset)

    @property
    def y(self) -> np.ndarray:
        """The labels of all rows, for partitions. Raises UsageError if a partition needs them and they are unknown."""
        if self.targets is not None:
            return self.targets
        if self.partition != "iid":
            raise UsageError(f"partition {self.partition!r} needs all labels: give {self.name} an attribute `targets`")
        return np.zeros(len(self), self.y_kind)

    def gather(self, index: np.ndarray, x: np.ndarray, y: np.ndarray, moves: int | None = None) -> None:
        """Set x[:] = rows[index], y[:] = labels[index]. moves: epoch; None: for scoring. LoneError if this fails."""
        epoch = -1 if moves is None else moves
        if not len(index):
            return
        try:
            with plugin_errors(f"an example of {self.name} cannot be made"):
                if self.workers is None:
                    results = [(slice(0, len(index)), *self.examples.rows(index, epoch))]
                else:
                    parts = [part for part in chunks(len(index), self.workers.count) if part.stop > part.start]
                    rows_of_parts = self.workers.all((index[part], epoch) for part in parts)
                    results = [(part, *each) for part, each in zip(parts, rows_of_parts, strict=True)]
                for part, rows, labels in results:
                    self.check(rows, labels)
                    x[part], y[part] = rows.reshape(len(rows), -1), labels.reshape(len(rows), *self.outputs)
        except UsageError as error:
            raise LoneError(str(error)) from error.__cause__
        if self.standard is not None:
            self.standard.apply(x)
            self.standard.apply_target(y)

    def check(self, x: np.ndarray, y: np.ndarray) -> None:
        """Raise UsageError if rows differ in shape from the first row, or hold invalid numbers."""
        if (x.shape[1:] or (1,)) != self.features:
            raise UsageError(f"{self.name}: an example has shape {x.shape[1:]}, and the first one {self.features}")
        if not np.isfinite(x).all():
            raise UsageError(f"{self.name}: an example holds NaN or an infinite number")
        if self.classes and (y.dtype.kind not in "iub" or y.min() < 0 or y.max() >= self.classes):
            raise UsageError(f"{self.name}: labels are integers below {self.classes}, not {y.min()} to {y.max()}")
        if not self.classes and not np.isfinite(y).all():
            raise UsageError(f"{self.name}: a value to predict is not finite")

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


class DatasetData(Data):
    """The data set of `from_dataset`. reopened: opens it again with a run's options."""

    reopened: Callable[..., Data]

    def _check_in_memory(self, share: tuple[int, int] | None = None) -> Any:
        raise UsageError("this needs all training rows in memory, and a Dataset of PyTorch makes each row on demand")

    @property
    def scales(self) -> None:
        """Return None: the scales of features are unknown without making many examples."""
        return None


def from_dataset(
    dataset: Any,
    test: Any = None,
    collate_fn: Callable | None = None,
    workers: int = 0,
    classes: int | None = None,
    *,
    name: str = "",
    partition: str = "iid",
    dtype: DTypeLike = "float32",
    seed: int = 0,
    validation: float = 0.0,
    augment: str = "",
    standardize: Any = False,
    data_seed: int | None = None,
    placement: str = "shared",
    shuffle_window: int = 8,
) -> Data:
    """Return the `Data` (hpcdl.data) whose training rows are the examples (x, y) of a Dataset; `test`: its test rows.
    collate_fn: makes x (rows, features...) and y (rows,) or (rows, outputs) from a list of examples. workers: processes
    of each rank that make examples during training; 0: the rank itself, between steps. They pay off if an example takes
    longer than its share of a step and cores are free. Workers are spawned, so the data set and collate_fn must be
    picklable. classes: None: from `dataset.targets` or `dataset.classes`; 0: regression, the default for float y.
    Other arguments as in `open_data`. UsageError for other kinds of data sets, and if the first example fails."""
    how = partition, model_type(dtype), seed, validation, augment, standardize
    options = DataOptions(*how, data_seed=data_seed, shuffle_window=shuffle_window)
    if placement not in ("shared", "streamed"):
        raise UsageError(f"placement {placement!r}: every rank makes its examples; take placement shared or streamed")
    check_placement(placement, partition)
    name = name or type(dataset).__name__
    for each in (dataset, test):
        if each is not None and (isinstance(each, IterableDataset) or not hasattr(each, "__getitem__")):
            raise UsageError(f"{name}: {type(each).__name__} has no examples by number, [i]; take a map-style Dataset")
        if each is not None and (not hasattr(each, "__len__") or not len(each)):
            raise UsageError(f"{name}: {type(each).__name__} has no examples, or does not say how many (__len__)")
    if augment or standardize is True:
        what = "--augment" if augment else "--standardize"
        raise UsageError(f"{what}: a Dataset of PyTorch changes examples by its own transforms; leave out {what}")
    if workers < 0:
        raise UsageError(f"workers={workers}: give 0 or more processes")
    examples = Examples(dataset, collate_fn, options.seed)
    with plugin_errors(f"the first example of {name} cannot be made"):
        x, y = examples.rows(np.arange(1), -1)
    features, targets = x.shape[1:] or (1,), targets_of(dataset, y)  # a number is an example of one feature
    if classes is None:
        classes = classes_of(dataset, y, targets, name)
    if targets is not None and classes and (targets.min() < 0 or targets.max() >= classes):
        raise UsageError(f"{name}: targets go from {targets.min()} to {targets.max()}, and there are {classes} classes")
    outputs = () if classes else y.shape[1:]
    options.check_fit(classes, features, len(dataset), 1.0)
    if options.column or (validation and classes and targets is None):
        if options.column:
            raise UsageError(f"partition {partition!r}: {name} has no columns, which only data files have")
        raise UsageError(f"validation goes by the labels of all rows: give {name} an attribute `targets`")
    form = features, classes, outputs
    train, test_rows = DatasetRows(examples, form, targets, options, workers, name), None
    if test is not None:
        of_test = Examples(test, collate_fn, options.seed)
        test_rows = DatasetRows(of_test, form, None, options, workers, f"{name} (test)")
    held_out = held_out_rows(np.zeros(len(train), np.int64) if targets is None else targets, classes, options)
    for rows in (train, test_rows):
        if rows is not None:
            rows.check(*rows.examples.rows(np.arange(1), -1))
    source: Any = train
    numbers = training_numbers(len(train), held_out)
    blocks = (training_counts(train.starts, held_out), shuffle_window) if placement == "streamed" else None
    data = DatasetData(
        name=name,
        features=features,
        classes=classes,
        schema=Schema(labels=labels_of(dataset, classes)),
        dtype=options.dtype,
        train=train,
        test=test_rows,
        held_out=held_out,
        reader=MemoryReader(source, numbers, classes, options.seed, options.partition, blocks=blocks),
        threaded=workers > 0,  # else the thread would draw from the generators that a module draws from
        order=order_name(placement, options.partition, classes, train.block, shuffle_window),
        digest=partial(digest_of, features, classes, train, test_rows),
    )
    data.reopened = partial(from_dataset, dataset, test, collate_fn, workers, classes, name=name)
    return data


def targets_of(dataset: Any, y: np.ndarray) -> np.ndarray | None:
    """Return the labels of all examples, None if unknown; y: label of the first example, after transforms."""
    if isinstance(dataset, Subset):
        base = targets_of(dataset.dataset, None)  # type: ignore[arg-type]
        targets: Any = None if base is None else base[np.asarray(dataset.indices, np.int64)]
    elif isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        targets = dataset.tensors[1]
    else:
        targets = getattr(dataset, "targets", None)
    with contextlib.suppress(ValueError, TypeError):
        labels = None if targets is None else as_numbers(targets)
        if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != len(dataset):
            return None
        if y is None or (y.shape == (1,) and y.dtype.kind in "iu" and labels[0] == y[0]):  # no transform changes it
            return labels.astype(np.int64)
    return None


def classes_of(dataset: Any, y: np.ndarray, targets: np.ndarray | None, name: str) -> int:
    """Return the number of classes; 0: regression. Raises UsageError if it is unknown."""
    if y.dtype.kind == "f" or y.ndim > 1:
        return 0
    if targets is not None:
        return max(2, int(targets.max()) + 1)
    if isinstance(names := getattr(dataset, "classes", None), list | tuple):
        return len(names)
    raise UsageError(f"{name} does not say how many classes it has: give from_dataset(..., classes=N)")


def labels_of(dataset: Any, classes: int) -> tuple[str, ...] | None:
    """Return the names of the classes; None if the data set has no distinct name for each class."""
    names = getattr(dataset.dataset if isinstance(dataset, Subset) else dataset, "classes", None)
    if not (classes and isinstance(names, list | tuple) and len(names) == classes):
        return None
    labels = tuple(map(str, names))
    return labels if len(set(labels)) == classes else None


def digest_of(features: tuple[int, ...], classes: int, train: DatasetRows, test: DatasetRows | None) -> str:
    """Return the digest by which a run recognizes its data: number of rows, targets, and some examples."""
    digest = Digest()
    for group, rows in (("train", train), ("test", test)):
        if rows is not None:
            index = np.unique(np.linspace(0, len(rows) - 1, DIGEST_EXAMPLES).astype(np.int64))
            x, y = rows.examples.rows(index, -1)
            digest.add(f"{group}/x", x.astype(np.float64))
            digest.add(f"{group}/y", y if rows.targets is None else rows.targets, labels=True)
            digest.add(f"{group}/rows", np.array([len(rows)]))
    return digest.finish(features, classes, 1.0)
