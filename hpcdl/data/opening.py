"""Open a data set from an HDF5 file under one of three placements, or from a user's function."""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.csr import COLUMN, CSR, START
from hpcdl.data import row_cache
from hpcdl.data.arrays import from_function
from hpcdl.data.augment import Augment, make_augment
from hpcdl.data.data_options import (
    DataOptions,
    Standardize,
    check_placement,
    held_out_owners,
    held_out_rows,
    model_type,
)
from hpcdl.data.dataset import Data
from hpcdl.data.digest import file_digest
from hpcdl.data.fills import unfilled_slabs, with_recomputed_fills
from hpcdl.data.format import KNOWN, Info, find_data_file, owner_columns, read_info
from hpcdl.data.formats.sparse_file import open_rows
from hpcdl.data.hdf5 import dataset, open_file
from hpcdl.data.order.mixture import mixed, parse_mixture
from hpcdl.data.order.readers import LocalExamples, MemoryReader, StreamReader, rows_before, training_numbers
from hpcdl.data.order.sampler import order_name
from hpcdl.data.partition import partition as make_partition
from hpcdl.data.placement import (
    Arena,
    Comm,
    FileRows,
    MemoryRows,
    check_room,
    memory_type,
    on_first_rank,
    read_x,
    read_y,
    refuse_other_files,
    run_together,
)
from hpcdl.data.standard import file_slabs, training_statistics, without_rows
from hpcdl.errors import UsageError, unknown
from hpcdl.plugins import is_mixture, is_plugin
from hpcdl.random import Random


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
    standardize: Standardize = False,
    parts: tuple[list[int], int] | None = None,
    keep: bool = False,
    data_seed: int | None = None,
    shuffle_window: int = 8,
    validation_by: str = "",
) -> Data:
    """Open a known data set (`digits`, `text`), an HDF5 file, the arrays that a user's function returns (arrays.py), or
    a mixture of data sets, `mix:A=0.7,B=0.3` (order/mixture.py).

    Collective over `comm` (of mpi4py, or None). A bad file or option is a UsageError, the same on every rank.

    placement   shared, partitioned or streamed (see placement.py)
    partition   of the rows among ranks: iid, by-label, shards:S, dirichlet:ALPHA or column:NAME (see partition.py)
    dtype       of the model: float32 or float64
    seed        of the order, the partition, the held-out rows and the augmentation
    validation  fraction of the training rows to hold out, stratified by class
    augment     for images: `shift:N`, `flip` or `shift:N,flip` (see augment.py)
    standardize True: rows to mean 0 and deviation 1 (see standard.py); "auto": only rows of tables; or `statistics` of
                other data
    parts       (numbers, count), placement partitioned, for data servers: this rank holds the parts with these numbers,
                of `count` parts; None: each rank holds one
    keep        placement shared: the rows of the file stay in memory for later calls (row_cache.py)
    data_seed   of the held-out rows and of a user's function, so that several runs share these; None: seed

    shuffle_window  placement streamed: blocks among which rows are shuffled, and that are in memory (order/sampler.py)
    validation_by   column of the file (`document`, say): rows with the same value are held out together, or none"""
    placements = {"shared": _open_shared, "partitioned": _open_partitioned, "streamed": _open_streamed}
    if placement not in placements:
        raise unknown("placement", placement, placements)
    how = partition, model_type(dtype), seed, validation, augment, standardize, parts, keep, data_seed
    options = DataOptions(*how, shuffle_window, validation_by)
    if is_mixture(str(name)):
        return _open_mixture(str(name), placement, comm, options)
    if is_plugin(str(name)) and not os.path.exists(name):
        if validation_by:
            raise UsageError(
                f"--validation-by {validation_by}: --data {name} has no columns, which only data files have"
            )
        return from_function(name, comm, options, placement)

    def read() -> Info:
        info = read_info(find_data_file(name))
        check_room(info, placement, options.dtype, 1 if comm is None else comm.size)
        return info

    info = on_first_rank(comm, read)
    refuse_other_files(comm, info.path)
    if not info.rows["train"]:
        groups = " and ".join(group for group, rows in info.rows.items() if rows)
        raise UsageError(f"{info.path} has no rows to train on (group train): it holds {groups} alone")
    text = info.vocabulary is not None
    options.check_fit(info.classes, info.features, info.rows["train"], info.scale, text, info.sparse)
    check_placement(placement, partition)
    data = placements[placement](_DataFile(info, placement, comm, options))
    data.source = str(name) if str(name) in KNOWN else os.path.abspath(info.path)
    return data


def _open_mixture(text: str, placement: str, comm: Comm, options: DataOptions) -> Data:
    """Open the sources of a mixture: the first one as if it were alone, the others with its statistics."""
    weights = parse_mixture(text)
    if placement == "partitioned" or options.partition != "iid":
        what = "--placement partitioned" if placement == "partitioned" else f"--partition {options.partition}"
        raise UsageError(
            f"{what}: every rank reads all sources of a mixture; take placement shared or streamed, and iid"
        )
    how = {name: getattr(options, name) for name in ("partition", "dtype", "augment", "keep", "shuffle_window")}
    how |= {"comm": comm, "placement": placement}
    own = {name: getattr(options, name) for name in ("seed", "validation", "validation_by", "standardize", "data_seed")}
    opened: list[Data] = []
    try:
        for number, name in enumerate(weights):
            opened.append(open_data(name, **how | own))
            # The orders of sources with equally many rows differ by the seed.
            own = {"seed": int(Random(options.seed)("source", number).integers(2**31))}
            own |= {"standardize": opened[0].statistics or False}
        return mixed(text, opened, list(weights.values()), options.seed)
    except UsageError:
        for each in opened:
            each.close()
        raise


class _DataFile:
    """A data file being opened under a placement. Collective: the first rank draws, fills and measures for all ranks.
    held_out: training rows for validation. info: of the file, with fills from the rows left for training. standard: the
    standardization. cache: rows and results of earlier calls (placement shared); None: there are none."""

    def __init__(self, info: Info, placement: str, comm: Comm, options: DataOptions):
        self.comm, self.options, self.placement, self.path = comm, options, placement, info.path
        self.text = info.vocabulary is not None
        self.cache = row_cache.find(info.path, options.dtype, comm) if placement == "shared" else None
        self.augment = make_augment(options.augment, info.features, options.seed)

        def draw() -> np.ndarray:
            if placement == "streamed" and info.rows["test"]:
                read_y(info, "test", options.dtype)
            if options.validation and options.validation_by:
                if placement == "streamed":
                    read_y(info, "train", options.dtype)
                return held_out_owners(self.column(options.validation_by), options.validation_by, options)
            return held_out_rows(read_y(info, "train", options.dtype), info.classes, options)

        def refill() -> Info:
            rows = info.rows["train"] - len(self.held_out)
            filled = with_recomputed_fills(info, lambda: without_rows(unfilled_slabs(info), self.held_out), rows)
            if filled.fills:
                check_room(filled, placement, options.dtype, 1 if comm is None else comm.size)
            return filled

        def measure() -> dict[str, np.ndarray]:
            y = None if info.classes else read_y(info, "train", np.dtype(np.float64))
            parts = without_rows(file_slabs(self.info), self.held_out)
            return training_statistics(parts, info.scale, y, self.held_out)

        drawn = options.validation or placement == "streamed"  # streamed: check all labels now
        self.held_out = self.once("held out", draw) if drawn else np.empty(0, np.int64)
        self.info: Info = self.once("fills", refill) if options.validation else info
        statistics = partial(self.once, "statistics", measure)
        self.standard = None if info.sparse else options.standard(statistics, self.info.schema)

    def once(self, what: str, work: Callable[[], Any]) -> Any:
        """Return the first rank's result of `work`; cached as `what` for later calls that hold out the same rows."""
        drawn = self.options.drawn_by, self.options.validation, self.options.validation_by
        key, cache = (what, *drawn), self.cache
        return on_first_rank(self.comm, work if cache is None else lambda: cache.remember(key, work))

    def owners(self) -> np.ndarray | None:
        """Return the owners of training examples (column:NAME), or None."""
        name = self.options.column
        return np.delete(self.column(name), self.held_out) if name else None

    def column(self, name: str) -> np.ndarray:
        """Return train/NAME, an integer for each row of the file. UsageError if the file has no such column."""
        with open_file(self.path) as file:
            if name not in owner_columns(file):
                if name == "document" and self.text:
                    todo = "make the file by prepare-data text --rows documents, or leave the column out"
                    raise UsageError(f"{self.path} has packed rows, which may hold parts of several documents: {todo}")
                others = ", ".join(owner_columns(file)) or "none"
                what = f"{self.path} has no whole number for each row in train/{name}"
                raise UsageError(f"{what}; columns with one: {others}")
            return dataset(file, f"train/{name}")[...]

    def elements(self, chosen: np.ndarray) -> int:
        """Return the number of elements of these sorted training rows; 0 for dense ones."""
        if not self.info.sparse:
            return 0
        with open_file(self.info.path) as file:
            return int(open_rows(file, "train/x").lengths(chosen).sum())

    def specs(self, group: str, rows: int, elements: int) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Return (shape, type) of the arrays that hold `rows` rows of a group. elements: of these rows, if sparse."""
        info, dtype = self.info, self.options.dtype
        y = (rows, *info.outputs), np.dtype(np.int64) if info.classes else dtype
        kind = memory_type(info.kinds.get(group, next(iter(info.kinds.values()))), dtype)
        if not info.sparse:
            return [((rows, math.prod(info.features)), kind), y]
        return [((elements,), kind), ((elements,), COLUMN), ((rows + 1,), START), y]

    def as_rows(self, arrays: list[np.ndarray]) -> tuple[Any, np.ndarray]:
        """Return x and y of the rows in arrays that `specs` describes."""
        if not self.info.sparse:
            return arrays[0], arrays[1]
        data, columns, starts, y = arrays
        return CSR(data, columns, starts, (len(y), math.prod(self.info.features))), y

    def read(self, group: str, arrays: list[np.ndarray], chosen: np.ndarray | None = None) -> None:
        """Read a group of the file, if it exists, into arrays: all rows, or the sorted rows `chosen`."""
        x, y = self.as_rows(arrays)
        if self.info.sparse:
            x.indptr[:] = 0
        if self.info.rows[group]:
            y[...] = read_y(self.info, group, self.options.dtype)[slice(None) if chosen is None else chosen]
            read_x(self.info, group, x, self.options.dtype, chosen)

    def memory_rows(self, arrays: list[np.ndarray], augment: Augment | None = None) -> MemoryRows:
        return MemoryRows(*self.as_rows(arrays), self.info.scale, self.options.dtype, augment, self.standard)

    def arena(self, *parts: tuple[str, int, int, np.ndarray | None]) -> Arena:
        """Return an arena that one rank of each node fills; its UsageError is raised on every rank.
        A part: (group, number of rows, number of elements, sorted rows or None: all). Its arrays follow one another."""
        arena = Arena(self.comm, [spec for group, *size, _ in parts for spec in self.specs(group, *size)])

        def fill() -> None:
            count = len(arena.arrays) // len(parts)
            for number, (group, _, _, chosen) in enumerate(parts):
                self.read(group, arena.arrays[number * count : (number + 1) * count], chosen)

        try:
            run_together(self.comm, fill, here=arena.fills)
        except UsageError:
            arena.close()
            raise
        arena.ready()
        return arena

    def data(self, block: int = 0, **parts: Any) -> Data:
        """Return the data. block: number of rows of a streamed block. parts: further arguments of `Data`."""
        info, options = self.info, self.options
        about: dict[str, Any] = {each: getattr(info, each) for each in ("name", "features", "classes", "schema")}
        about |= {"dtype": options.dtype, "held_out": self.held_out, "digest": partial(file_digest, info)}
        order = order_name(self.placement, options.partition, info.classes, block, options.shuffle_window)
        return Data(order=order, **about | parts)


def _open_shared(file: _DataFile) -> Data:
    """Open with training and test rows in memory once per node; rows in the cache are reused."""
    info, options, comm = file.info, file.options, file.comm
    if info.fills:  # the cached rows have the fills of the file
        file.cache = row_cache.find(info.path, options.dtype, comm, info.fills)
    owners, cache, resources = on_first_rank(comm, file.owners), file.cache, []
    if cache is None:
        parts = ((group, info.rows[group], info.elements.get(group, 0), None) for group in ("train", "test"))
        arena = file.arena(*parts)
        arrays = arena.arrays
        if options.keep:
            cache = row_cache.keep(info.path, options.dtype, arena, info.fills)
        else:
            resources = [arena]
    else:
        arrays = cache.arrays
    half = len(arrays) // 2
    train = file.memory_rows(arrays[:half], file.augment)
    numbers, digest = training_numbers(len(train), file.held_out), partial(file_digest, info)
    known = digest if cache is None else partial(cache.remember, "digest", digest)
    test = file.memory_rows(arrays[half:]) if info.rows["test"] else None
    reader = MemoryReader(train, numbers, info.classes, options.seed, options.partition, owners=owners)
    return file.data(train=train, test=test, reader=reader, resources=resources, digest=known)


def _open_partitioned(file: _DataFile) -> Data:
    """Open with each rank's training rows in its memory, test and validation once per node; `train` reads the file."""
    info, options, comm = file.info, file.options, file.comm
    training = np.delete(np.arange(info.rows["train"]), file.held_out)
    numbers, count = options.parts or (([0], 1) if comm is None else ([comm.rank], comm.size))

    def divide() -> list[np.ndarray]:
        labels = read_y(info, "train", options.dtype)[training]
        return make_partition(options.partition, labels, info.classes, count, options.seed, file.owners())

    parts = run_together(comm, divide, here=comm is None or comm.rank == 0)
    before = on_first_rank(comm, lambda: rows_before(parts))
    requested: Any = [numbers] if comm is None else comm.gather(numbers)
    handed = requested and [[parts[number] for number in each] for each in requested]
    own_parts = handed[0] if comm is None else comm.scatter(handed)
    own_rows = np.sort(np.concatenate([np.empty(0, np.int64), *own_parts]))
    placed = [LocalExamples(examples, np.searchsorted(own_rows, examples), before) for examples in own_parts]
    local = {(number, count): examples for number, examples in zip(numbers, placed, strict=True)}

    def read_own() -> list[np.ndarray]:
        chosen = training[own_rows]
        arrays = [np.empty(*spec) for spec in file.specs("train", len(chosen), file.elements(chosen))]
        file.read("train", arrays, chosen)
        return arrays

    own = file.memory_rows(run_together(comm, read_own), file.augment)
    whole = run_together(comm, lambda: FileRows(info, "train", options.dtype, file.standard))
    elements = on_first_rank(comm, lambda: file.elements(file.held_out))
    testing = "test", info.rows["test"], info.elements.get("test", 0), None
    arena = file.arena(testing, ("train", len(file.held_out), elements, file.held_out))
    half = len(arena.arrays) // 2
    test = file.memory_rows(arena.arrays[:half]) if info.rows["test"] else None
    reader = MemoryReader(own, None, info.classes, options.seed, options.partition, local)
    held, ours = file.memory_rows(arena.arrays[half:]), [arena, own]
    return file.data(train=whole, test=test, validation=held, reader=reader, shares=list(local), resources=ours)


def _open_streamed(file: _DataFile) -> Data:
    """Open with all rows left in the file; x is checked as it is read."""
    info, options = file.info, file.options
    groups = ["train"] + ["test"] * bool(info.rows["test"])
    files = run_together(file.comm, lambda: [FileRows(info, group, options.dtype, file.standard) for group in groups])
    train, test = (*files, None)[:2]
    how = file.held_out, options.seed, file.augment, options.shuffle_window
    reader = run_together(file.comm, lambda: StreamReader(train, *how))
    return file.data(train.block, train=train, test=test, reader=reader)
