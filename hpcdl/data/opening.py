"""Open a data set: from an HDF5 file under one of three placements, or from a function of one's own."""

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
from hpcdl.data.digest import of_file
from hpcdl.data.fills import filled_anew, known_slabs
from hpcdl.data.format import KNOWN, Info, find, read_info
from hpcdl.data.partition import partition as make_partition
from hpcdl.data.placement import (
    Arena,
    Comm,
    FileRows,
    MemoryRows,
    agreed,
    as_rows,
    check_room,
    elements_of_rows,
    read_owners,
    read_x,
    read_y,
    refuse_other_files,
    specs,
)
from hpcdl.data.readers import LocalExamples, MemoryReader, StreamReader, rows_before
from hpcdl.data.sampler import named
from hpcdl.data.standard import Standard, file_slabs, measured, without
from hpcdl.errors import UsageError, unknown
from hpcdl.plugins import is_own


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
    """Open a known data set (`digits`, `text`), an HDF5 file or what a function of one's own returns (arrays.py).

    Collective over `comm` (of mpi4py, or None).

    placement   shared, partitioned or streamed (see placement.py)
    partition   iid, by-label, shards:S, dirichlet:ALPHA or column:NAME (see partition.py): which rows belong to which
                rank
    dtype       of the model: float32 or float64
    seed        of the order, the partition, the held-out rows and the augmentation
    validation  fraction of the training rows to hold out, stratified by class
    augment     for images: `shift:N`, `flip` or `shift:N,flip` (see augment.py)
    standardize features to mean 0 and deviation 1 (see standard.py), or by the `statistics` of other data; auto: those
                of a table
    parts       (numbers, of): under placement partitioned this rank holds the parts with these numbers, of so many,
                instead of one part per rank: for who serves others
    keep        of a file under placement shared: its rows stay in memory, for others who open it (row_cache.py)
    data_seed   of the held-out rows, and of a function of one's own, where several runs are to share these; None: seed
    A bad file or option is a UsageError, with the same message on every rank.
    """
    placements = {"shared": _open_shared, "partitioned": _open_partitioned, "streamed": _open_streamed}
    if placement not in placements:
        raise unknown("placement", placement, placements)
    options = DataOptions(partition, model_type(dtype), seed, validation, augment, standardize, parts, keep, data_seed)
    if is_own(str(name)) and not os.path.exists(name):
        if placement != "shared":
            raise UsageError(f"--data {name} is in the memory of each rank: it needs placement shared, not {placement}")
        return from_function(name, comm, options)

    def look() -> Info:
        found = read_info(find(name))
        check_room(found, placement, options.dtype, 1 if comm is None else comm.size)
        return found

    info = _by_one(comm, look)
    refuse_other_files(comm, info.path)
    if not info.rows["train"]:
        there = " and ".join(group for group, rows in info.rows.items() if rows)
        raise UsageError(f"{info.path} has no rows to train on (group train): it holds {there} alone")
    text = info.vocabulary is not None
    options.check_fit(info.classes, info.features, info.rows["train"], info.scale, text, info.sparse)
    data = placements[placement](info, comm, options)
    data.source = str(name) if str(name) in KNOWN else os.path.abspath(info.path)
    return data


def _by_one(comm: Comm, work: Callable[[], Any]) -> Any:
    """Do the work on the first rank; all ranks get its result, or raise its UsageError."""
    result = agreed(comm, work, here=comm is None or comm.rank == 0)
    return result if comm is None else comm.bcast(result)


def _fill(info: Info, group: str, options: DataOptions, arrays: list[np.ndarray]) -> None:
    """Read a group, where it is there, into arrays."""
    x, y = _empty(info, arrays)
    if info.rows[group]:
        y[...] = read_y(info, group, options.dtype)
        read_x(info, group, x, options.dtype)


def _empty(info: Info, arrays: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    """x and y that are to be filled; sparse ones begin at 0."""
    x, y = as_rows(info, arrays)
    if info.sparse:
        x.indptr[:] = 0
    return x, y


def _filled(comm: Comm, arena: Arena, fill: Callable[..., None]) -> list[np.ndarray]:
    """Let one rank of each node fill the arena; a UsageError frees it and is raised on every rank."""
    try:
        agreed(comm, lambda: fill(*arena.arrays), here=arena.fills)
    except UsageError:
        arena.close()
        raise
    arena.ready()
    return arena.arrays


def _held_out_of(info: Info, comm: Comm, options: DataOptions, there: row_cache.CachedRows | None = None) -> np.ndarray:
    """The rows of train that validation holds out, drawn by one rank; there: where it remembers them."""
    if not options.validation:
        return np.empty(0, np.int64)

    def draw() -> np.ndarray:
        return held_out_rows(read_y(info, "train", options.dtype), info.classes, options)

    key = "held out", options.drawn_by, options.validation
    return _by_one(comm, draw if there is None else lambda: there.remember(key, draw))


def _owners_of(info: Info, options: DataOptions, held_out: np.ndarray) -> np.ndarray | None:
    """Whose each training example is, where the partition asks for it."""
    return np.delete(read_owners(info, options.column), held_out) if options.column else None


def _filled_anew(
    info: Info,
    placement: str,
    comm: Comm,
    options: DataOptions,
    held_out: np.ndarray,
    there: row_cache.CachedRows | None = None,
) -> Info:
    """The file with missing numbers filled in from the rows that train; found by one rank; there: where it remembers.

    Collective, and UsageErrors are agreed on.
    """
    if not options.validation:
        return info

    def work() -> Info:
        found = filled_anew(info, lambda: without(known_slabs(info), held_out), info.rows["train"] - len(held_out))
        if found.fills:
            check_room(found, placement, options.dtype, 1 if comm is None else comm.size)
        return found

    key = "fills", options.drawn_by, options.validation
    return _by_one(comm, work if there is None else lambda: there.remember(key, work))


def _standard_of(
    info: Info, comm: Comm, options: DataOptions, held_out: np.ndarray, there: row_cache.CachedRows | None = None
) -> Standard | None:
    """What standardizes the rows of a file; measured by one rank; there: where it remembers that."""
    if info.sparse:
        return None

    def work() -> dict[str, np.ndarray]:
        y = None if info.classes else read_y(info, "train", np.dtype(np.float64))
        return measured(without(file_slabs(info), held_out), info.scale, y, held_out)

    key = "statistics", options.drawn_by, options.validation
    measure = work if there is None else lambda: there.remember(key, work)
    return options.standard(lambda: _by_one(comm, measure), info.meaning)


def _open_shared(info: Info, comm: Comm, options: DataOptions) -> Data:
    """Train and test in memory, once per node; where they are kept there, those."""
    there = row_cache.find(info.path, options.dtype, comm)
    held_out = _held_out_of(info, comm, options, there)
    info = _filled_anew(info, "shared", comm, options, held_out, there)
    standard = _standard_of(info, comm, options, held_out, there)
    if info.fills:  # what is kept has the fills of the file
        there = row_cache.find(info.path, options.dtype, comm, info.fills)
    owners = _by_one(comm, lambda: _owners_of(info, options, held_out))
    forms = [specs(info, group, info.rows[group], options.dtype) for group in ("train", "test")]
    half = len(forms[0])

    def fill(*arrays: np.ndarray) -> None:
        _fill(info, "train", options, list(arrays[:half]))
        _fill(info, "test", options, list(arrays[half:]))

    if there is None:
        arena = Arena(comm, forms[0] + forms[1])
        arrays, resources = _filled(comm, arena, fill), [arena]
        if options.keep:
            there, resources = row_cache.keep(info.path, options.dtype, arena, info.fills), []
    else:
        arrays, resources = there.arrays, []
    (x, y), (x_test, y_test) = as_rows(info, arrays[:half]), as_rows(info, arrays[half:])
    augment = make_augment(options.augment, info.features, options.seed)
    train = MemoryRows(x, y, info.scale, options.dtype, augment, standard)
    test = MemoryRows(x_test, y_test, info.scale, options.dtype, None, standard) if info.rows["test"] else None
    about, digest = (info.name, info.features, info.classes, options), partial(of_file, info)
    if there is not None:
        digest = partial(there.remember, "digest", digest)
    return in_memory(*about, train, test, held_out, resources, digest, owners, meaning=info.meaning)


def _open_partitioned(info: Info, comm: Comm, options: DataOptions) -> Data:
    """Each rank's own training rows in its memory; test and validation once per node; train as a whole in the file."""
    held_out = _held_out_of(info, comm, options)
    info = _filled_anew(info, "partitioned", comm, options, held_out)
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

    elements = _by_one(comm, lambda: elements_of_rows(info, "train", held_out))
    forms = [
        specs(info, "test", info.rows["test"], options.dtype),
        specs(info, "train", len(held_out), options.dtype, elements),
    ]
    arena, half = Arena(comm, forms[0] + forms[1]), len(forms[0])

    def fill(*arrays: np.ndarray) -> None:
        _fill(info, "test", options, list(arrays[:half]))
        x, y = _empty(info, list(arrays[half:]))
        y[...] = read_y(info, "train", options.dtype)[held_out]
        read_x(info, "train", x, options.dtype, held_out)

    arrays = _filled(comm, arena, fill)

    def own_arrays() -> list[np.ndarray]:
        form = specs(info, "train", len(mine), options.dtype, elements_of_rows(info, "train", kept[mine]))
        return [np.empty(*spec) for spec in form]

    try:
        x, y = _empty(info, agreed(comm, own_arrays))
    except UsageError:
        arena.close()
        raise

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
        for part in (as_rows(info, arrays[:half]), as_rows(info, arrays[half:]))
    )
    whole = agreed(comm, lambda: FileRows(info, "train", options.dtype, standard))
    return Data(
        name=info.name,
        features=info.features,
        classes=info.classes,
        train=Split(whole, kept, options.dtype),
        test=Split(test, None, options.dtype) if info.rows["test"] else None,
        validation=Split(validation, None, options.dtype) if len(held_out) else None,
        reader=MemoryReader(
            rows, None, info.classes, options.seed, options.partition, local=dict(zip(shares, local, strict=True))
        ),
        threaded=augment is not None,
        shares=shares,
        resources=[arena, rows, test, validation, whole],
        meaning=info.meaning,
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
        if info.rows["test"]:
            read_y(info, "test", options.dtype)
        return held_out_rows(read_y(info, "train", options.dtype), info.classes, options)

    held_out = _by_one(comm, held_out_after_reading_labels)
    info = _filled_anew(info, "streamed", comm, options, held_out)
    augment = make_augment(options.augment, info.features, options.seed)
    standard = _standard_of(info, comm, options, held_out)
    there = ["train"] + ["test"] * bool(info.rows["test"])
    files = agreed(comm, lambda: {group: FileRows(info, group, options.dtype, standard) for group in there})
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
        meaning=info.meaning,
        order=named("streamed", options.partition, info.classes, train.block),
        digest=partial(of_file, info),
    )
