"""A data set from arrays, or from the arrays that a user's function returns."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.csr import CSR
from hpcdl.data.augment import Augment, make_augment
from hpcdl.data.data_options import DataOptions, Standardize, held_out_rows, model_type
from hpcdl.data.dataset import Data, Split
from hpcdl.data.digest import rows_digest
from hpcdl.data.formats.sparse_file import check_elements, sparse_rows
from hpcdl.data.hdf5 import check_x, check_y, largest_input, shown
from hpcdl.data.placement import Comm, MemoryRows, memory_type, run_together, standardized
from hpcdl.data.readers import MemoryReader
from hpcdl.data.sampler import order_name
from hpcdl.data.schema import Schema
from hpcdl.data.standard import array_slabs, training_statistics, without_rows
from hpcdl.errors import UsageError
from hpcdl.plugins import call_plugin, load_plugin, plugin_errors

RETURNED_KEYS = {
    "x",
    "y",
    "x_test",
    "y_test",
    "name",
    "classes",
    "labels",
    "scale",
}  # keys that a data function may return
OPTION_NAMES = ("partition", "dtype", "seed", "validation", "augment", "standardize", "data_seed")


def from_arrays(
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    name: str = "arrays",
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    scale: float = 1.0,
    partition: str = "iid",
    dtype: DTypeLike = "float32",
    seed: int = 0,
    validation: float = 0.0,
    augment: str = "",
    standardize: Standardize = False,
    data_seed: int | None = None,
) -> Data:
    """Return `Data` from arrays x (rows, features...) and y (rows,), which every rank holds in full.

    x may be sparse, a matrix of scipy.sparse or a CSR (hpcdl/csr.py); x of batches is then sparse, too.

    y: (rows, outputs), too, for regression. classes: None: the largest label + 1 for integers, 0 (regression) for
    floats. labels: names of the classes. The model sees x * scale. The other options are those of `open_data`. Arrays
    of a suitable type are used in place, not copied.
    """
    options = DataOptions(partition, model_type(dtype), seed, validation, augment, standardize, data_seed=data_seed)
    x, y = _as_arrays(x, y, "")
    test = None if x_test is None and y_test is None else _as_arrays(x_test, y_test, "_test")
    if test and isinstance(x, CSR) != isinstance(test[0], CSR):
        raise UsageError("x and x_test should both be sparse, or both dense")
    if test and test[0].shape[1:] != x.shape[1:]:
        raise UsageError(f"x has rows of shape {x.shape[1:]}, but x_test of shape {test[0].shape[1:]}")
    if test and test[1].shape[1:] != y.shape[1:]:
        raise UsageError(f"y has rows of shape {y.shape[1:]}, but y_test of shape {test[1].shape[1:]}")
    targets = [y] if test is None else [y, test[1]]
    whole = all(part.dtype.kind in "iu" for part in targets) and y.ndim == 1
    if classes is None and labels is not None:
        classes = len(labels)
    if classes is None:
        classes = max(int(part.max()) for part in targets) + 1 if whole else 0
    if labels is not None and (len(set(map(str, labels))) != classes or len(labels) != classes):
        raise UsageError(f"labels should name each of the {classes} classes, by names of their own")
    if classes < 0 or classes == 1 or (classes and not whole):
        raise UsageError(f"classes={classes} does not fit y; use 0 for regression, 2 or more with integer labels")
    features = x.shape[1:]
    options.check_fit(classes, features, len(x), scale, sparse=isinstance(x, CSR))
    if options.column:
        raise UsageError(f"partition {partition!r} is read from a file; arrays have no such column")
    augmentation = make_augment(options.augment, features, options.seed)
    train, test_rows = _memory_rows(x, y, classes, scale, options.dtype, "", augmentation), None
    if test is not None:
        test_rows = _memory_rows(*test, classes, scale, options.dtype, suffix="_test")
    held_out = held_out_rows(train.y, classes, options)
    schema = Schema(scale, None if labels is None else tuple(map(str, labels)))
    values = None if classes else y.astype(np.float64)

    def statistics() -> dict[str, np.ndarray]:
        rows_of_x = without_rows(array_slabs(x.reshape(len(x), -1)), held_out)  # in their own type, with all digits
        return training_statistics(rows_of_x, scale, values, held_out)

    standard = options.standard(statistics, schema)
    train = standardized(train, standard)
    if test_rows is not None:
        test_rows = standardized(test_rows, standard)
    digest = partial(rows_digest, features, classes, scale, {"train": train, "test": test_rows})
    return in_memory(name, features, classes, options, train, test_rows, held_out, [], digest, schema=schema)


def in_memory(
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
    *,
    schema: Schema,
) -> Data:
    """Return data whose rows are all in memory."""
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
        schema=schema,
        order=order_name("shared", options.partition, classes),
        digest=digest,
    )


def _as_arrays(x: Any, y: Any, suffix: str) -> tuple[Any, np.ndarray]:
    """Return x (rows, features...) and y as arrays; UsageError for a wrong type or shape."""
    if x is None or y is None:
        raise UsageError(f"x{suffix} and y{suffix} belong together; one of them is missing")
    sparse = isinstance(x, CSR) or hasattr(x, "tocsr")
    x, y = (sparse_rows(x, suffix) if sparse else np.asarray(x)), np.asarray(y)
    x, y = (array.view(np.uint8) if array.dtype == bool and not isinstance(array, CSR) else array for array in (x, y))
    for array, name in ((x, "x"), (y, "y")):
        if array.dtype.kind not in "iuf":
            raise UsageError(f"{name}{suffix} holds elements of type {array.dtype}; it must hold integers or floats")
    if x.ndim < 2 or 0 in x.shape:
        raise UsageError(f"x{suffix} has shape {x.shape}; it must have shape (rows, features...), and none of them 0")
    if y.ndim not in (1, 2) or y.shape[:1] != x.shape[:1] or 0 in y.shape:
        raise UsageError(f"x{suffix} has {len(x)} rows, but y{suffix} has shape {y.shape}")
    return x, y


def _memory_rows(
    x: Any,
    y: np.ndarray,
    classes: int,
    scale: float,
    dtype: np.dtype,
    suffix: str,
    augment: Augment | None = None,
) -> MemoryRows:
    """Return arrays as rows, in types that the kernels support; without a copy where they have them already."""
    check_y(y, classes, f"y{suffix}")  # before the conversion to int64, which overflows for large uint64
    with np.errstate(over="ignore"):
        y = y.astype(np.int64 if classes else dtype, copy=False)
    check_y(y, classes, f"y{suffix}")
    kind = memory_type(x.dtype, dtype)
    if isinstance(x, CSR):
        x = CSR(np.require(x.data, kind, ["C", "A"]), x.indices, x.indptr, x.shape)
        check_elements(x.data[: x.nnz], x.indptr, f"x{suffix}", most=largest_input(scale, dtype))
    else:
        x = np.require(x.reshape(len(x), -1), kind, ["C", "A"])
        check_x(x, f"x{suffix}", most=largest_input(scale, dtype))
    return MemoryRows(x, y, scale, dtype, augment)


def call_data_function(spec: str, seed: int) -> dict[str, Any]:
    """Call the user's function package.module:function (settings as in :function,year=2020); return its data by name.

    The function returns (x, y), (x, y, x_test, y_test), a dictionary of arguments of `from_arrays`, x alone (rows to
    predict), or the result of hpcdl.torch.from_dataset. It gets `seed` if it takes one. UsageError if it cannot be
    called or returns something else.
    """
    source = f"--data {spec}"
    function, settings = load_plugin(spec, source)
    returned = call_plugin(function, settings, {"seed": seed}, source)
    if hasattr(returned, "reopened"):  # of hpcdl.torch.from_dataset
        return {"reopened": returned.reopened}
    if isinstance(returned, np.ndarray):
        returned = {"x": returned}
    elif isinstance(returned, tuple | list) and len(returned) in (2, 4):
        returned = dict(zip(("x", "y", "x_test", "y_test"), returned, strict=False))
    if not (isinstance(returned, dict) and {"x"} <= set(returned) <= RETURNED_KEYS):
        what = f"a dictionary with {shown(sorted(map(str, returned)))}" if isinstance(returned, dict) else "other"
        raise UsageError(
            f"{source}: it should return (x, y), (x, y, x_test, y_test) or a dictionary of them, not {what}"
        )
    return {"name": function.__name__} | returned


def from_returned(spec: str, returned: dict[str, Any], **options: Any) -> Data:
    """Return the data made of a user function's result; options: of `from_arrays`."""
    source = f"--data {spec}"
    if "y" not in returned and "reopened" not in returned:
        raise UsageError(f"{source}: it returns x alone; to train and to score, y is needed, too")
    with plugin_errors(source):
        data: Data = returned["reopened"](**options) if "reopened" in returned else from_arrays(**returned, **options)
    data.source = spec
    return data


def from_function(spec: str, comm: Comm, options: DataOptions) -> Data:
    """Return the data of a user's function; collective over `comm`.

    Each rank calls the function and holds its arrays; a memory-mapped array (numpy.load with mmap_mode="r") is in
    memory once. UsageError, too, if the ranks get different arrays.
    """
    how = {name: getattr(options, name) for name in OPTION_NAMES}
    data = run_together(comm, lambda: from_returned(spec, call_data_function(spec, options.drawn_by), **how))
    digests = [data.digest] if comm is None else comm.allgather(data.digest)
    for rank, each in enumerate(digests):
        if each != digests[0]:
            raise UsageError(
                f"--data {spec} returns other arrays on rank {rank} than on rank 0: let it draw by a fixed seed"
            )
    return data
