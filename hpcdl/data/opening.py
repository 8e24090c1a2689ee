"""Open a data set from an HDF5 file under one of three placements, or from a user's function."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.data import row_cache
from hpcdl.data.arrays import from_function, in_memory
from hpcdl.data.augment import make_augment
from hpcdl.data.data_options import DataOptions, Standardize, held_out_rows, model_type
from hpcdl.data.dataset import Data, Split
from hpcdl.data.digest import file_digest
from hpcdl.data.fills import unfilled_slabs, with_recomputed_fills
from hpcdl.data.format import KNOWN, Info, find_data_file, read_info
from hpcdl.data.partition import partition as make_partition
from hpcdl.data.placement import (
    Arena,
    Comm,
    FileRows,
    MemoryRows,
    array_specs,
    as_rows,
    check_room,
    elements_of_rows,
    read_owners,
    read_x,
    read_y,
    refuse_other_files,
    run_together,
)
from hpcdl.data.readers import LocalExamples, MemoryReader, StreamReader, rows_before
from hpcdl.data.sampler import order_name
from hpcdl.data.standard import Standard, file_slabs, training_statistics, without_rows
from hpcdl.errors import UsageError, unknown
from hpcdl.plugins import is_plugin


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
) -> Data:
    """Open a known data set (`digits`, `text`), an HDF5 file, or the arrays that a user's function returns (arrays.py).

    Collective over `comm` (of mpi4py, or None).

    placement   shared, partitioned or streamed (see placement.py)
    partition   of the rows among ranks: iid, by-label, shards:S, dirichlet:ALPHA or column:NAME (see partition.py)
    dtype       of the model: float32 or float64
    seed        of the order, the partition, the held-out rows and the augmentation
    validation  fraction of the training rows to hold out, stratified by class
    augment     for images: `shift:N`, `flip` or `shift:N,flip` (see augment.py)
    standardize features to mean 0 and deviation 1 (see standard.py), or by the `statistics` of other data; auto:
                features of a table only
    parts       (numbers, count), placement partitioned: this rank holds the parts with these numbers, of `count`,
                instead of one part per rank; for data servers
    keep        placement shared: the rows of the file stay in memory for later calls (row_cache.py)
    data_seed   of the held-out rows and of a user's function, so that several runs share these; None: seed
    A bad file or option is a UsageError, with the same message on every rank.
    """
    placements = {"shared": _open_shared, "partitioned": _open_partitioned, "streamed": _open_streamed}
    if placement not in placements:
        raise unknown("placement", placement, placements)
    options = DataOptions(partition, model_type(dtype), seed, validation, augment, standardize, parts, keep, data_seed)
    if is_plugin(str(name)) and not os.path.exists(name):
        if placement != "shared":
            raise UsageError(f"--data {name} is in the memory of each rank: it needs placement shared, not {placement}")
        return from_function(name, comm, options)

    def read_checked_info() -> Info:
        read = read_info(find_data_file(name))
        check_room(read, placement, options.dtype, 1 if comm is None else comm.size)
        return read

    info = _on_first_rank(comm, read_checked_info)
    refuse_other_files(comm, info.path)
    if not info.rows["train"]:
        groups = " and ".join(group for group, rows in info.rows.items() if rows)
        raise UsageError(f"{info.path} has no rows to train on (group train): it holds {groups} alone")
    text = info.vocabulary is not None
    options.check_fit(info.classes, info.features, info.rows["train"], info.scale, text, info.sparse)
    data = placements[placement](info, comm, options)
    data.source = str(name) if str(name) in KNOWN else os.path.abspath(info.path)
    return data


def _on_first_rank(comm: Comm, work: Callable[[], Any]) -> Any:
    """Do the work on the first rank; return its result, or raise its UsageError, on all ranks."""
    result = run_together(comm, work, here=comm is None or comm.rank == 0)
    return result if comm is None else comm.bcast(result)


def _fill(info: Info, group: str, options: DataOptions, arrays: list[np.ndarray]) -> None:
    """Read a group of the file, if it exists, into arrays."""
    x, y = _empty_rows(info, arrays)
    if info.rows[group]:
        y[...] = read_y(info, group, options.dtype)
        read_x(info, group, x, options.dtype)


def _empty_rows(info: Info, arrays: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    """Return x and y as views of arrays that are filled next; the row starts of sparse x are 0."""
    x, y = as_rows(info, arrays)
    if info.sparse:
        x.indptr[:] = 0
    return x, y


def _fill_arena(comm: Comm, arena: Arena, fill: Callable[..., None]) -> list[np.ndarray]:
    """Fill the arena by one rank of each node; a UsageError frees the arena and is raised on every rank."""
    try:
        run_together(comm, lambda: fill(*arena.arrays), here=arena.fills)
    except UsageError:
        arena.close()
        raise
    arena.ready()
    return arena.arrays


def _held_out_rows(
    info: Info, comm: Comm, options: DataOptions, cache: row_cache.CachedRows | None = None
) -> np.ndarray:
    """Return the training rows that validation holds out, drawn by one rank; cache: remembers them."""
    if not options.validation:
        return np.empty(0, np.int64)

    def draw() -> np.ndarray:
        return held_out_rows(read_y(info, "train", options.dtype), info.classes, options)

    key = "held out", options.drawn_by, options.validation
    return _on_first_rank(comm, draw if cache is None else lambda: cache.remember(key, draw))


def _training_owners(info: Info, options: DataOptions, held_out: np.ndarray) -> np.ndarray | None:
    """Return the owner of each training example for the partition column:NAME; else None."""
    return np.delete(read_owners(info, options.column), held_out) if options.column else None


def _recompute_fills(
    info: Info,
    placement: str,
    comm: Comm,
    options: DataOptions,
    held_out: np.ndarray,
    cache: row_cache.CachedRows | None = None,
) -> Info:
    """Return the file with missing numbers filled in from the rows left for training, computed by one rank.

    Collective: all ranks raise its UsageError. cache: remembers the result.
    """
    if not options.validation:
        return info

    def work() -> Info:
        refilled = with_recomputed_fills(
            info, lambda: without_rows(unfilled_slabs(info), held_out), info.rows["train"] - len(held_out)
        )
        if refilled.fills:
            check_room(refilled, placement, options.dtype, 1 if comm is None else comm.size)
        return refilled

    key = "fills", options.drawn_by, options.validation
    return _on_first_rank(comm, work if cache is None else lambda: cache.remember(key, work))


def _standardization(
    info: Info, comm: Comm, options: DataOptions, held_out: np.ndarray, cache: row_cache.CachedRows | None = None
) -> Standard | None:
    """Return the standardization of a file's rows, measured by one rank; cache: remembers the statistics."""
    if info.sparse:
        return None

    def work() -> dict[str, np.ndarray]:
        y = None if info.classes else read_y(info, "train", np.dtype(np.float64))
        return training_statistics(without_rows(file_slabs(info), held_out), info.scale, y, held_out)

    key = "statistics", options.drawn_by, options.validation
    measure = work if cache is None else lambda: cache.remember(key, work)
    return options.standard(lambda: _on_first_rank(comm, measure), info.schema)


def _open_shared(info: Info, comm: Comm, options: DataOptions) -> Data:
    """Open with training and test rows in memory once per node; rows in the cache are reused."""
    cache = row_cache.find(info.path, options.dtype, comm)
    held_out = _held_out_rows(info, comm, options, cache)
    info = _recompute_fills(info, "shared", comm, options, held_out, cache)
    standard = _standardization(info, comm, options, held_out, cache)
    if info.fills:  # the cached rows have the fills of the file
        cache = row_cache.find(info.path, options.dtype, comm, info.fills)
    owners = _on_first_rank(comm, lambda: _training_owners(info, options, held_out))
    forms = [array_specs(info, group, info.rows[group], options.dtype) for group in ("train", "test")]
    half = len(forms[0])

    def fill(*arrays: np.ndarray) -> None:
        _fill(info, "train", options, list(arrays[:half]))
        _fill(info, "test", options, list(arrays[half:]))

    if cache is None:
        arena = Arena(comm, forms[0] + forms[1])
        arrays, resources = _fill_arena(comm, arena, fill), [arena]
        if options.keep:
            cache, resources = row_cache.keep(info.path, options.dtype, arena, info.fills), []
    else:
        arrays, resources = cache.arrays, []
    (x, y), (x_test, y_test) = as_rows(info, arrays[:half]), as_rows(info, arrays[half:])
    augment = make_augment(options.augment, info.features, options.seed)
    train = MemoryRows(x, y, info.scale, options.dtype, augment, standard)
    test = MemoryRows(x_test, y_test, info.scale, options.dtype, None, standard) if info.rows["test"] else None
    description, digest = (info.name, info.features, info.classes, options), partial(file_digest, info)
    if cache is not None:
        digest = partial(cache.remember, "digest", digest)
    return in_memory(*description, train, test, held_out, resources, digest, owners, schema=info.schema)


def _open_partitioned(info: Info, comm: Comm, options: DataOptions) -> Data:
    """Open with each rank's training rows in its memory, test and validation once per node.

    `Data.train`, all training rows, is read from the file.
    """
    held_out = _held_out_rows(info, comm, options)
    info = _recompute_fills(info, "partitioned", comm, options, held_out)
    standard = _standardization(info, comm, options, held_out)
    training = np.delete(np.arange(info.rows["train"]), held_out)
    numbers, count = options.parts or (([0], 1) if comm is None else ([comm.rank], comm.size))

    def divide() -> list[np.ndarray]:
        labels, owners = read_y(info, "train", options.dtype)[training], _training_owners(info, options, held_out)
        return make_partition(options.partition, labels, info.classes, count, options.seed, owners)

    parts = run_together(comm, divide, here=comm is None or comm.rank == 0)
    before = rows_before(parts) if parts is not None else np.empty(0, np.int64)
    if comm is None:
        own_parts = [parts[number] for number in numbers]
    else:
        requested = comm.gather(numbers)
        own_parts = comm.scatter(requested and [[parts[number] for number in each] for each in requested])
        before = comm.bcast(before)
    own_rows = np.sort(np.concatenate([np.empty(0, np.int64), *own_parts]))
    shares = [(number, count) for number in numbers]
    local = [LocalExamples(examples, np.searchsorted(own_rows, examples), before) for examples in own_parts]

    elements = _on_first_rank(comm, lambda: elements_of_rows(info, "train", held_out))
    forms = [
        array_specs(info, "test", info.rows["test"], options.dtype),
        array_specs(info, "train", len(held_out), options.dtype, elements),
    ]
    arena, half = Arena(comm, forms[0] + forms[1]), len(forms[0])

    def fill(*arrays: np.ndarray) -> None:
        _fill(info, "test", options, list(arrays[:half]))
        x, y = _empty_rows(info, list(arrays[half:]))
        y[...] = read_y(info, "train", options.dtype)[held_out]
        read_x(info, "train", x, options.dtype, held_out)

    arrays = _fill_arena(comm, arena, fill)

    def own_arrays() -> list[np.ndarray]:
        form = array_specs(
            info, "train", len(own_rows), options.dtype, elements_of_rows(info, "train", training[own_rows])
        )
        return [np.empty(*spec) for spec in form]

    try:
        x, y = _empty_rows(info, run_together(comm, own_arrays))
    except UsageError:
        arena.close()
        raise

    def fill_own() -> None:
        y[...] = read_y(info, "train", options.dtype)[training[own_rows]]
        read_x(info, "train", x, options.dtype, training[own_rows])

    try:
        run_together(comm, fill_own)
    except UsageError:
        arena.close()
        raise
    augment = make_augment(options.augment, info.features, options.seed)
    rows = MemoryRows(x, y, info.scale, options.dtype, augment, standard)
    test, validation = (
        MemoryRows(*part, info.scale, options.dtype, None, standard)
        for part in (as_rows(info, arrays[:half]), as_rows(info, arrays[half:]))
    )
    whole = run_together(comm, lambda: FileRows(info, "train", options.dtype, standard))
    return Data(
        name=info.name,
        features=info.features,
        classes=info.classes,
        train=Split(whole, training, options.dtype),
        test=Split(test, None, options.dtype) if info.rows["test"] else None,
        validation=Split(validation, None, options.dtype) if len(held_out) else None,
        reader=MemoryReader(
            rows, None, info.classes, options.seed, options.partition, local=dict(zip(shares, local, strict=True))
        ),
        threaded=augment is not None,
        shares=shares,
        resources=[arena, rows, test, validation, whole],
        schema=info.schema,
        order=order_name("partitioned", options.partition, info.classes),
        digest=partial(file_digest, info),
    )


def _open_streamed(info: Info, comm: Comm, options: DataOptions) -> Data:
    """Open with all rows left in the file; one rank checks the labels now, x is checked as it is read."""
    if options.partition != "iid":
        raise UsageError(
            f"placement streamed shares every block among the ranks: partition {options.partition!r} "
            "needs placement shared or partitioned"
        )

    def held_out_after_reading_labels() -> np.ndarray:
        if info.rows["test"]:
            read_y(info, "test", options.dtype)
        return held_out_rows(read_y(info, "train", options.dtype), info.classes, options)

    held_out = _on_first_rank(comm, held_out_after_reading_labels)
    info = _recompute_fills(info, "streamed", comm, options, held_out)
    augment = make_augment(options.augment, info.features, options.seed)
    standard = _standardization(info, comm, options, held_out)
    groups = ["train"] + ["test"] * bool(info.rows["test"])
    files = run_together(comm, lambda: {group: FileRows(info, group, options.dtype, standard) for group in groups})
    train, test = files["train"], files.get("test")
    numbers = np.delete(np.arange(len(train)), held_out) if len(held_out) else None
    return Data(
        name=info.name,
        features=info.features,
        classes=info.classes,
        train=Split(train, numbers, options.dtype),
        test=Split(test, None, options.dtype) if test is not None else None,
        validation=Split(train, held_out, options.dtype) if len(held_out) else None,
        reader=StreamReader(train, held_out, options.seed, augment),
        threaded=True,
        resources=list(files.values()),
        schema=info.schema,
        order=order_name("streamed", options.partition, info.classes, train.block),
        digest=partial(file_digest, info),
    )
