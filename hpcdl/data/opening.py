"""Open a data set: from an HDF5 file under one of three placements, or from one's own arrays."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from hpcdl.data.augment import Augment, make_augment
from hpcdl.data.dataset import Data, Split
from hpcdl.data.digest import of_file, of_rows
from hpcdl.data.format import Info, check_x, check_y, find, most_of, read_info
from hpcdl.data.order import named
from hpcdl.data.partition import check_shards, hold_out, parse_partition
from hpcdl.data.partition import partition as make_partition
from hpcdl.data.placement import (
    Arena,
    Comm,
    FileRows,
    MemoryRows,
    agreed,
    check_room,
    memory_type,
    read_owners,
    read_x,
    read_y,
    refuse_other_files,
    refuse_others,
)
from hpcdl.data.readers import LocalExamples, MemoryReader, StreamReader, rows_before
from hpcdl.data.standard import Standard, array_slabs, file_slabs, measure, without
from hpcdl.data.vocabulary import Vocabulary
from hpcdl.errors import UsageError, unknown
from hpcdl.random import Random


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """How to open a data set; `dtype` is the model's."""

    partition: str
    dtype: np.dtype
    seed: int
    validation: float
    augment: str
    standardize: bool | dict[str, np.ndarray]
    parts: tuple[list[int], int] | None = None

    def check_fit(self, classes: int, features: tuple[int, ...], rows: int, scale: float, text: bool = False) -> None:
        """UsageError if something makes no sense for such data, of so many training rows."""
        if text and self.standardize is not False:
            raise UsageError("tokens of a text are names, not quantities: they cannot be standardized")
        if self.dtype not in (np.float32, np.float64):
            raise UsageError(f"dtype must be float32 or float64, not {self.dtype}")
        most_of(scale, self.dtype)
        if not 0 <= self.validation < 1:
            raise UsageError(f"validation must be a fraction from 0 up to 1, as 0.1, not {self.validation}")
        check_shards(*parse_partition(self.partition, classes), rows)
        make_augment(self.augment, features, self.seed)

    @property
    def column(self) -> str:
        """The NAME of the partition column:NAME, or nothing."""
        name, _, column = self.partition.partition(":")
        return column if name == "column" else ""

    def standard(self, measured: Callable[[], tuple[np.ndarray, np.ndarray]]) -> Standard | None:
        """What standardizes, if anything is to: by the statistics that were given, or that `measured` computes."""
        if self.standardize is False:
            return None
        given = self.standardize
        mean, deviation = measured() if given is True else (given["mean"], given["deviation"])
        return Standard(mean, deviation, self.dtype)


def open_data(
    name: str,
    *,
    comm: Comm = None,
    placement: str = "shared",
    partition: str = "iid",
    dtype: DTypeLike = "float32",
    seed: int = 0,
    validation: float = 0.0,
    augment: str = "",
    standardize: bool | dict[str, np.ndarray] = False,
    parts: tuple[list[int], int] | None = None,
) -> Data:
    """Open a known data set (`digits`, `text`) or an HDF5 file. Collective over `comm` (of mpi4py, or None).

    placement   shared, partitioned or streamed (see placement.py)
    partition   iid, by-label, shards:S, dirichlet:ALPHA or column:NAME (see partition.py): which rows belong to which
                rank
    dtype       of the model: float32 or float64
    seed        of the order, the partition, the held-out rows and the augmentation
    validation  fraction of the training rows to hold out, stratified by class
    augment     for images: `shift:N`, `flip` or `shift:N,flip` (see augment.py)
    standardize features to mean 0 and deviation 1 (see standard.py), or by the `statistics` of other data
    parts       (numbers, of): under placement partitioned this rank holds the parts with these numbers, of so many,
                instead of one part per rank: for who serves others
    A bad file or option is a UsageError, with the same message on every rank.
    """
    placements = {"shared": _open_shared, "partitioned": _open_partitioned, "streamed": _open_streamed}
    if placement not in placements:
        raise unknown("placement", placement, placements)
    options = DataOptions(partition, _model_type(dtype), seed, validation, augment, standardize, parts)

    def look() -> Info:
        found = read_info(find(name))
        refuse_others(found)
        check_room(found, placement, options.dtype, 1 if comm is None else comm.size)
        return found

    info = _by_one(comm, look)
    refuse_other_files(comm, info.path)
    options.check_fit(info.classes, info.features, info.rows["train"], info.scale, info.vocabulary is not None)
    return placements[placement](info, comm, options)


def from_arrays(
    x: ArrayLike,
    y: ArrayLike,
    x_test: ArrayLike | None = None,
    y_test: ArrayLike | None = None,
    *,
    name: str = "arrays",
    classes: int | None = None,
    scale: float = 1.0,
    partition: str = "iid",
    dtype: DTypeLike = "float32",
    seed: int = 0,
    validation: float = 0.0,
    augment: str = "",
    standardize: bool | dict[str, np.ndarray] = False,
) -> Data:
    """The same `Data` from arrays x (rows, features...) and y (rows,) that every rank has in full.

    classes: None takes it from y: the largest label + 1 for integers, 0 (regression) for floats. The model sees
    x * scale. The other options are those of `open_data`. Arrays of a fitting type are used in place, not copied.
    """
    options = DataOptions(partition, _model_type(dtype), seed, validation, augment, standardize)
    x, y = _as_arrays(x, y, "")
    test = None if x_test is None and y_test is None else _as_arrays(x_test, y_test, "_test")
    if test and test[0].shape[1:] != x.shape[1:]:
        raise UsageError(f"x has rows of shape {x.shape[1:]}, but x_test of shape {test[0].shape[1:]}")
    labels = [y] if test is None else [y, test[1]]
    whole = all(part.dtype.kind in "iu" for part in labels)
    if classes is None:
        classes = max(int(part.max()) for part in labels) + 1 if whole else 0
    if classes < 0 or classes == 1 or (classes and not whole):
        raise UsageError(f"classes={classes} does not fit y; use 0 for regression, 2 or more with integer labels")
    features = x.shape[1:]
    options.check_fit(classes, features, len(x), scale)
    if options.column:
        raise UsageError(f"partition {partition!r} is read from a file; arrays have no such column")
    moved = make_augment(options.augment, features, options.seed)
    train, tested = _from_memory(x, y, classes, scale, options.dtype, "", moved), None
    if test is not None:
        tested = _from_memory(*test, classes, scale, options.dtype, suffix="_test")
    held_out = _hold_out(train.y, classes, options)
    standard = options.standard(lambda: measure(without(array_slabs(train.x), held_out), scale))
    for rows in (train, tested):
        if rows is not None:
            rows.standard = standard
    digest = partial(of_rows, features, classes, scale, {"train": train, "test": tested})
    return _in_memory(name, features, classes, options, train, tested, held_out, [], digest)


def _model_type(dtype: DTypeLike) -> np.dtype:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise UsageError(f"dtype must be float32 or float64, not {dtype!r}") from None


def _by_one(comm: Comm, work: Callable[[], Any]) -> Any:
    """Do the work on the first rank; all ranks get its result, or raise its UsageError."""
    result = agreed(comm, work, here=comm is None or comm.rank == 0)
    return result if comm is None else comm.bcast(result)


def _hold_out(labels: np.ndarray, classes: int, options: DataOptions) -> np.ndarray:
    """The rows (sorted) that validation holds out; empty without."""
    rows = hold_out(labels, classes, options.validation, Random(options.seed)("validation"))
    if options.validation and not 0 < len(rows) < len(labels):
        raise UsageError(f"validation={options.validation} would hold out {len(rows)} of {len(labels)} training rows")
    return rows


def _in_memory(
    name: str,
    features: tuple[int, ...],
    classes: int,
    options: DataOptions,
    train: MemoryRows,
    test: MemoryRows | None,
    held_out: np.ndarray,
    resources: list[Any],
    digest: Callable[[], str],
    owners: np.ndarray | None = None,
    vocabulary: Vocabulary | None = None,
) -> Data:
    """Data whose rows all lie in memory."""
    numbers = np.delete(np.arange(len(train)), held_out) if len(held_out) else None
    return Data(
        name=name,
        features=features,
        classes=classes,
        train=Split(train, numbers, options.dtype),
        test=Split(test, None, options.dtype) if test is not None else None,
        validation=Split(train, held_out, options.dtype) if len(held_out) else None,
        reader=MemoryReader(train, numbers, classes, options.seed, options.partition, owners=owners),
        threaded=train.augment is not None,
        resources=[*resources, train, *([] if test is None else [test])],
        vocabulary=vocabulary,
        order=named("shared", options.partition, classes),
        digest=digest,
    )


def _as_arrays(x: ArrayLike | None, y: ArrayLike | None, suffix: str) -> tuple[np.ndarray, np.ndarray]:
    """Check the form of x and y, and make x of shape (rows, features...)."""
    if x is None or y is None:
        raise UsageError(f"x{suffix} and y{suffix} belong together; one of them is missing")
    x, y = np.asarray(x), np.asarray(y)
    x, y = (array.view(np.uint8) if array.dtype == bool else array for array in (x, y))
    for array, name in ((x, "x"), (y, "y")):
        if array.dtype.kind not in "iuf":
            raise UsageError(f"{name}{suffix} holds elements of type {array.dtype}; it must hold integers or floats")
    if x.ndim < 2 or 0 in x.shape:
        raise UsageError(f"x{suffix} has shape {x.shape}; it must have shape (rows, features...), and none of them 0")
    if y.shape != x.shape[:1]:
        raise UsageError(f"x{suffix} has {len(x)} rows, but y{suffix} has shape {y.shape}")
    return x, y


def _from_memory(
    x: np.ndarray,
    y: np.ndarray,
    classes: int,
    scale: float,
    dtype: np.dtype,
    suffix: str,
    augment: Augment | None = None,
) -> MemoryRows:
    """The rows of arrays, in a type that the loops can use; without a copy where they already have it."""
    check_y(y, classes, f"y{suffix}")  # before they are int64, which the largest of uint64 are not
    with np.errstate(over="ignore"):
        y = y.astype(np.int64 if classes else dtype, copy=False)
    check_y(y, classes, f"y{suffix}")
    x = np.require(x.reshape(len(x), -1), memory_type(x.dtype, dtype), ["C", "A"])
    check_x(x, f"x{suffix}", most=most_of(scale, dtype))
    return MemoryRows(x, y, scale, dtype, augment)


def _specs(info: Info, group: str, rows: int, options: DataOptions) -> list[tuple[tuple[int, ...], np.dtype]]:
    """Shapes and types of x and y of so many rows of a group."""
    y_kind = np.dtype(np.int64) if info.classes else options.dtype
    x_kind = memory_type(info.kinds[group], options.dtype)
    return [((rows, math.prod(info.features)), x_kind), ((rows,), y_kind)]


def _filled(comm: Comm, arena: Arena, fill: Callable[..., None]) -> list[np.ndarray]:
    """Let one rank of each node fill the arena; a UsageError frees it and is raised on every rank."""
    try:
        agreed(comm, lambda: fill(*arena.arrays), here=arena.fills)
    except UsageError:
        arena.close()
        raise
    arena.ready()
    return arena.arrays


def _held_out_of(info: Info, comm: Comm, options: DataOptions) -> np.ndarray:
    """The rows of train that validation holds out, drawn by one rank."""
    if not options.validation:
        return np.empty(0, np.int64)
    return _by_one(comm, lambda: _hold_out(read_y(info, "train", options.dtype), info.classes, options))


def _owners_of(info: Info, options: DataOptions, held_out: np.ndarray) -> np.ndarray | None:
    """Whose each training example is, where the partition asks for it."""
    return np.delete(read_owners(info, options.column), held_out) if options.column else None


def _standard_of(info: Info, comm: Comm, options: DataOptions, held_out: np.ndarray) -> Standard | None:
    """What standardizes the rows of a file; measured by one rank."""
    return options.standard(lambda: _by_one(comm, lambda: measure(without(file_slabs(info), held_out), info.scale)))


def _open_shared(info: Info, comm: Comm, options: DataOptions) -> Data:
    """Train and test in memory, once per node."""
    held_out = _held_out_of(info, comm, options)
    standard = _standard_of(info, comm, options, held_out)
    owners = _by_one(comm, lambda: _owners_of(info, options, held_out))
    specs = [_specs(info, group, info.rows[group], options) for group in ("train", "test")]
    arena = Arena(comm, specs[0] + specs[1])

    def fill(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> None:
        y[...], y_test[...] = (read_y(info, group, options.dtype) for group in ("train", "test"))
        read_x(info, "train", x, options.dtype)
        read_x(info, "test", x_test, options.dtype)

    x, y, x_test, y_test = _filled(comm, arena, fill)
    augment = make_augment(options.augment, info.features, options.seed)
    train = MemoryRows(x, y, info.scale, options.dtype, augment, standard)
    test = MemoryRows(x_test, y_test, info.scale, options.dtype, None, standard)
    about, digest = (info.name, info.features, info.classes, options), partial(of_file, info)
    return _in_memory(*about, train, test, held_out, [arena], digest, owners, info.vocabulary)


def _open_partitioned(info: Info, comm: Comm, options: DataOptions) -> Data:
    """Each rank's own training rows in its memory; test and validation once per node; train as a whole in the file."""
    held_out = _held_out_of(info, comm, options)
    standard = _standard_of(info, comm, options, held_out)
    kept = np.delete(np.arange(info.rows["train"]), held_out)
    numbers, of = options.parts or (([0], 1) if comm is None else ([comm.rank], comm.size))

    def divide() -> list[np.ndarray]:
        labels, owners = read_y(info, "train", options.dtype)[kept], _owners_of(info, options, held_out)
        return make_partition(options.partition, labels, info.classes, of, options.seed, owners)

    parts = agreed(comm, divide, here=comm is None or comm.rank == 0)
    before = rows_before(parts) if parts is not None else np.empty(0, np.int64)
    if comm is None:
        own = [parts[number] for number in numbers]
    else:
        wanted = comm.gather(numbers)
        own = comm.scatter(wanted and [[parts[number] for number in each] for each in wanted])
        before = comm.bcast(before)
    mine = np.sort(np.concatenate([np.empty(0, np.int64), *own]))
    shares = [(number, of) for number in numbers]
    local = [LocalExamples(examples, np.searchsorted(mine, examples), before) for examples in own]

    arena = Arena(
        comm, _specs(info, "test", info.rows["test"], options) + _specs(info, "train", len(held_out), options)
    )

    def fill(x_test: np.ndarray, y_test: np.ndarray, x_held_out: np.ndarray, y_held_out: np.ndarray) -> None:
        y_test[...] = read_y(info, "test", options.dtype)
        y_held_out[...] = read_y(info, "train", options.dtype)[held_out]
        read_x(info, "test", x_test, options.dtype)
        read_x(info, "train", x_held_out, options.dtype, held_out)

    x_test, y_test, x_held_out, y_held_out = _filled(comm, arena, fill)
    x, y = (np.empty(*spec) for spec in _specs(info, "train", len(mine), options))

    def fill_own() -> None:
        y[...] = read_y(info, "train", options.dtype)[kept[mine]]
        read_x(info, "train", x, options.dtype, kept[mine])

    try:
        agreed(comm, fill_own)
    except UsageError:
        arena.close()
        raise
    augment = make_augment(options.augment, info.features, options.seed)
    rows = MemoryRows(x, y, info.scale, options.dtype, augment, standard)
    test, validation = (
        MemoryRows(*part, info.scale, options.dtype, None, standard)
        for part in ((x_test, y_test), (x_held_out, y_held_out))
    )
    whole = agreed(comm, lambda: FileRows(info, "train", options.dtype, standard))
    return Data(
        name=info.name,
        features=info.features,
        classes=info.classes,
        train=Split(whole, kept, options.dtype),
        test=Split(test, None, options.dtype),
        validation=Split(validation, None, options.dtype) if len(held_out) else None,
        reader=MemoryReader(
            rows, None, info.classes, options.seed, options.partition, local=dict(zip(shares, local, strict=True))
        ),
        threaded=augment is not None,
        shares=shares,
        resources=[arena, rows, test, validation, whole],
        vocabulary=info.vocabulary,
        order=named("partitioned", options.partition, info.classes),
        digest=partial(of_file, info),
    )


def _open_streamed(info: Info, comm: Comm, options: DataOptions) -> Data:
    """All rows in the file; the labels are checked by one rank now, the rest when it is read."""
    if options.partition != "iid":
        raise UsageError(
            f"placement streamed shares every block among the ranks: partition {options.partition!r} "
            "needs placement shared or partitioned"
        )

    def held_out_after_reading_labels() -> np.ndarray:
        read_y(info, "test", options.dtype)
        return _hold_out(read_y(info, "train", options.dtype), info.classes, options)

    held_out = _by_one(comm, held_out_after_reading_labels)
    augment = make_augment(options.augment, info.features, options.seed)
    standard = _standard_of(info, comm, options, held_out)
    train, test = agreed(comm, lambda: [FileRows(info, group, options.dtype, standard) for group in ("train", "test")])
    numbers = np.delete(np.arange(len(train)), held_out) if len(held_out) else None
    return Data(
        name=info.name,
        features=info.features,
        classes=info.classes,
        train=Split(train, numbers, options.dtype),
        test=Split(test, None, options.dtype),
        validation=Split(train, held_out, options.dtype) if len(held_out) else None,
        reader=StreamReader(train, held_out, options.seed, augment),
        threaded=True,
        resources=[train, test],
        vocabulary=info.vocabulary,
        order=named("streamed", options.partition, info.classes, train.block),
        digest=partial(of_file, info),
    )
