"""A data set from arrays, or from the arrays that a user's function returns."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.csr import CSR
from hpcdl.data.augment import Augment, make_augment
from hpcdl.data.data_options import DataOptions, Standardize, held_out_rows, model_type
from hpcdl.data.dataset import Data
from hpcdl.data.digest import rows_digest
from hpcdl.data.formats.sparse_file import check_elements, sparse_rows
from hpcdl.data.hdf5 import check_x, check_y, largest_input, shown, slabs
from hpcdl.data.order.readers import MemoryReader, training_numbers
from hpcdl.data.order.sampler import order_name
from hpcdl.data.placement import Comm, MemoryRows, memory_type, run_together
from hpcdl.data.schema import Schema
from hpcdl.data.standard import training_statistics, without_rows
from hpcdl.errors import UsageError
from hpcdl.plugins import call_plugin, load_plugin, plugin_errors

RETURNED_KEYS = {"x", "y", "x_test", "y_test", "name", "classes", "labels", "scale"}  # of a data function's dictionary
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
    """Return the `Data` of arrays that every rank holds: x (rows, features...), and y (rows,) or (rows, outputs).
    x may be a matrix of scipy.sparse or a CSR (hpcdl/csr.py); batches then have a CSR. labels: names of the classes.
    classes: their number, 0 for regression. None: len(labels); without labels the largest class number + 1, or 0 if y
    holds floats. The model sees x * scale. Other options: see `open_data`. Arrays of a suitable type are not copied."""
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
        raise UsageError(f"labels must hold {classes} different names, one for each class")
    if classes < 0 or classes == 1 or (classes and not whole):
        raise UsageError(f"classes={classes} does not fit y; use 0 for regression, 2 or more with integer labels")
    features = x.shape[1:]
    options.check_fit(classes, features, len(x), scale, sparse=isinstance(x, CSR))
    if options.column:
        raise UsageError(f"partition {partition!r} is read from a file; arrays have no such column")
    schema = Schema(scale, None if labels is None else tuple(map(str, labels)))
    train = _memory_rows(x, y, classes, scale, options.dtype, "", make_augment(augment, features, seed))
    test_rows = None if test is None else _memory_rows(*test, classes, scale, options.dtype, "_test")
    held_out = held_out_rows(train.y, classes, options)

    def statistics() -> dict[str, np.ndarray]:
        flat = x.reshape(len(x), -1)  # in their own type, with all digits
        parts = ((slab, flat[slab]) for slab in slabs(len(x), flat.nbytes // len(x)))
        targets = None if classes else y.astype(np.float64)
        return training_statistics(without_rows(parts, held_out), scale, targets, held_out)

    standard = options.standard(statistics, schema)
    for rows in [train] if test_rows is None else [train, test_rows]:
        rows.standard = standard
    about: dict[str, Any] = {"name": name, "features": features, "classes": classes, "schema": schema}
    about |= {"dtype": options.dtype, "held_out": held_out, "order": order_name("shared", partition, classes)}
    reader = MemoryReader(train, training_numbers(len(train), held_out), classes, seed, partition)
    digest = partial(rows_digest, features, classes, scale, {"train": train, "test": test_rows})
    return Data(train=train, test=test_rows, reader=reader, digest=digest, **about)


def _as_arrays(x: Any, y: Any, suffix: str) -> tuple[Any, np.ndarray]:
    """Return x (rows, features...) and y as arrays; UsageError for a wrong type or shape. suffix: of their names."""
    if x is None or y is None:
        raise UsageError(f"x{suffix} and y{suffix} must be given together; one of them is missing")
    sparse = isinstance(x, CSR) or hasattr(x, "tocsr")
    x, y = (sparse_rows(x, suffix) if sparse else np.asarray(x)), np.asarray(y)
    x, y = (array.view(np.uint8) if array.dtype == bool and not isinstance(array, CSR) else array for array in (x, y))
    for array, name in ((x, "x"), (y, "y")):
        if array.dtype.kind not in "iuf":
            raise UsageError(f"{name}{suffix} holds elements of type {array.dtype}; it must hold integers or floats")
    if x.ndim < 2 or 0 in x.shape:
        raise UsageError(f"x{suffix} has shape {x.shape}; it must have shape (rows, features...), without a 0")
    if y.ndim not in (1, 2) or y.shape[:1] != x.shape[:1] or 0 in y.shape:
        wanted = f"({len(x)},) or ({len(x)}, outputs)"
        raise UsageError(f"x{suffix} has {len(x)} rows, but y{suffix} has shape {y.shape}; it must be {wanted}")
    return x, y


def _memory_rows(
    x: Any, y: np.ndarray, classes: int, scale: float, dtype: np.dtype, suffix: str, augment: Augment | None = None
) -> MemoryRows:
    """Check arrays, and return them as rows of types that the kernels support; without a copy if possible."""
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
    The function returns (x, y), (x, y, x_test, y_test), a dictionary for `from_arrays`, x alone (to predict), or the
    result of hpcdl.torch.from_dataset. It gets `seed` if it has such an argument. Raises UsageError."""
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
        what = f"a dictionary with {shown(sorted(map(str, returned)))}"
        what = what if isinstance(returned, dict) else f"a value of type {type(returned).__name__}"
        wanted = "(x, y), (x, y, x_test, y_test) or a dictionary of them"
        raise UsageError(f"{source}: the function should return {wanted}, not {what}")
    return {"name": function.__name__} | returned


def from_returned(spec: str, returned: dict[str, Any], **options: Any) -> Data:
    """Return the data made of what `call_data_function` returned; UsageError for x alone. options: of `from_arrays`."""
    source = f"--data {spec}"
    if "y" not in returned and "reopened" not in returned:
        raise UsageError(f"{source}: the function returns x alone; training and scoring need y, too")
    with plugin_errors(source):
        data: Data = returned["reopened"](**options) if "reopened" in returned else from_arrays(**returned, **options)
    data.source = spec
    return data


def from_function(spec: str, comm: Comm, options: DataOptions, placement: str = "shared") -> Data:
    """Return the data of a user's function; UsageError if the ranks get different arrays. Collective. Each rank calls
    the function and holds its arrays; memory-mapped arrays (numpy.load, mmap_mode="r") are in a node's memory once."""

    def make() -> Data:
        returned = call_data_function(spec, options.drawn_by)
        how = {name: getattr(options, name) for name in OPTION_NAMES}
        if "reopened" in returned:  # a Dataset of PyTorch, which makes examples in any order
            how |= {"placement": placement, "shuffle_window": options.shuffle_window}
        elif placement != "shared":
            raise UsageError(f"--data {spec} is in the memory of each rank: it needs placement shared, not {placement}")
        return from_returned(spec, returned, **how)

    data = run_together(comm, make)
    digests = [data.digest] if comm is None else comm.allgather(data.digest)
    for rank, each in enumerate(digests):
        if each != digests[0]:
            problem = f"returns other arrays on rank {rank} than on rank 0"
            raise UsageError(f"--data {spec} {problem}: draw its random numbers by a fixed seed")
    return data
