"""Rows to predict, from any supported file, in the form that the model was trained on.

    a data file (HDF5)       rows of its group test, train or rows; its classes are matched by name
    csv, Parquet, Arrow      by the recipe of the training data; without one, each column is a feature
    npz                      the array x, or x_test, x_train; or a sparse matrix of scipy's
    libsvm                   sparse rows as text, whose features are numbered as in the training data
    idx                      one file of MNIST's format, gzipped or not
    package.module:function  its result: x alone, or as for --data

Each source comes in blocks; a rank parses only those that it predicts.
"""

import dataclasses
import gzip
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcdl.csr import COLUMN, CSR, START
from hpcdl.data.arrays import call_data_function, from_returned
from hpcdl.data.batch import RowBlock
from hpcdl.data.dataset import Split
from hpcdl.data.fills import with_model_fills
from hpcdl.data.format import KNOWN, find_data_file, read_info
from hpcdl.data.formats.libsvm import LibsvmParser, TextBlock
from hpcdl.data.formats.libsvm import blocks as texts
from hpcdl.data.formats.prepare_idx import idx_header, idx_slabs
from hpcdl.data.formats.prepare_npz import SPARSE, load_npz, sparse_matrix
from hpcdl.data.formats.recipe import Column, Recipe
from hpcdl.data.formats.recognition import format_of
from hpcdl.data.formats.sparse_file import check_elements, sparse_rows
from hpcdl.data.formats.table_rows import TableRows, open_table
from hpcdl.data.formats.table_source import is_number
from hpcdl.data.hdf5 import SLAB_BYTES, check_x, check_y, largest_input, shown
from hpcdl.data.placement import FileRows, MemoryRows, memory_type
from hpcdl.data.schema import Schema
from hpcdl.errors import UsageError, blamed_on
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.kernels import libsvm
from hpcdl.plugins import is_plugin

ROWS = 8192  # of a block, at most


class PredictionRows(NamedTuple):
    """Rows to predict. name: in messages; blocks(): yields a parser for each block; labelled: True if rows have a y;
    ids: True if rows have ids.
    """

    name: str
    blocks: Callable[[], Iterator[Callable[[], RowBlock]]]
    labelled: bool = False
    ids: bool = False


def prediction_rows(
    source: str,
    trained: TrainedModel,
    group: str = "",
    ranks: int = 1,
    delimiter: str = "",
) -> PredictionRows:
    """Return the rows of a source for a model. group: test, train or rows of a data file. Raises UsageError.

    ranks: that share the blocks; at least as many blocks are made if the number of rows is known. delimiter: of a csv,
    if it differs from that of the training data.
    """
    if source in KNOWN:
        return file_rows(source, trained, group, ranks)
    if is_plugin(source) and not os.path.exists(source):
        returned = call_data_function(source, trained.seed)
        if "x" in returned and "y" not in returned and not group:
            x = returned["x"]
            sparse = isinstance(x, CSR) or hasattr(x, "tocsr")
            return array_rows(sparse_rows(x) if sparse else np.asarray(x), source, trained, ranks)
        data = from_returned(source, returned, dtype=trained.dtype, standardize=trained.of_features or False)
        split: Any = {"": data.test or data.train, "test": data.test, "train": data.train}.get(group)
        if split is None:
            raise UsageError(f"{source} has no {group} rows")
        return split_rows(split, data.features, data.classes, data.outputs, data.schema, source, trained, ranks=ranks)
    form = format_of(source)
    if form == "hdf5":
        return file_rows(source, trained, group, ranks)
    if group:
        hint = "prepare-data makes one, of a table by --like the training data; hpcdl predict takes this as it is"
        raise UsageError(f"{source} is no data file (HDF5) with a part {group}: {hint}")
    if trained.schema.vocabulary is not None:
        raise UsageError(f"{source}: the model was trained on a text; make a data file of it by prepare-data text")
    if form == "npz":
        return npz_rows(source, trained, ranks)
    if form == "libsvm" or (trained.schema.base is not None and form in ("gzip", "unknown")):
        return libsvm_rows(source, trained)
    if form in ("idx", "gzip"):
        return idx_rows(source, trained)
    return table_rows(source, trained, delimiter)


def file_rows(source: str, trained: TrainedModel, group: str = "", ranks: int = 1) -> PredictionRows:
    """Return the rows of a group of a data file; by default of `rows`, else of `test`, else of `train`."""
    info = read_info(find_data_file(source))
    group = group or next(each for each in ("rows", "test", "train") if info.rows[each])
    if not info.rows[group]:
        raise UsageError(
            f"{info.path} has no group {group}; it has {' and '.join(g for g, n in info.rows.items() if n)}"
        )
    info = with_model_fills(info, trained.schema.recipe)
    if trained.schema.recipe is not None:
        info = dataclasses.replace(info, scale=trained.schema.scale)
    split = Split(FileRows(info, group, trained.dtype, trained.standard()), None, trained.dtype)
    labelled = group != "rows"
    about = info.features, info.classes, info.outputs, info.schema, info.name
    return split_rows(split, *about, trained, labelled, ranks)


def split_rows(
    split: Any,
    features: tuple[int, ...],
    classes: int,
    outputs: tuple[int, ...],
    schema: Schema,
    name: str,
    trained: TrainedModel,
    labelled: bool = True,
    ranks: int = 1,
) -> PredictionRows:
    """Return the rows of a split; its classes are mapped to the model's class numbers by name."""
    trained.check_rows(features, name)
    trained.schema.refuse_other_columns(schema, name)
    numbers = None
    if labelled:
        if bool(classes) != bool(trained.classes) or outputs != trained.outputs:
            kinds = [
                f"{c} classes" if c else f"{math.prod(o)} values to predict"
                for c, o in ((classes, outputs), (trained.classes, trained.outputs))
            ]
            raise UsageError(f"{name} has {kinds[0]}; the model was trained on {kinds[1]}")
        if classes:
            numbers = trained.schema.class_numbers(schema, trained.classes, classes, name)
    columns, row = getattr(split.source, "columns", {}), 0.0
    if getattr(split.source, "sparse", False):
        if trained.standard() is not None:
            raise UsageError(f"{name} has sparse rows, but the model was trained on standardized ones: give dense ones")
        row = START.itemsize + 16 * split.source.x.nnz / max(1, len(split.source))

    def load(start: int, stop: int) -> RowBlock:
        x, y = split.rows(start, stop)
        if labelled and len(y):
            check_y(y, classes, name)
            y = y if numbers is None else numbers[y]
        with blamed_on(f"{name} is damaged"):
            notes = {column: values[start:stop] for column, values in columns.items()}
        ids = [id_text(each) for each in notes["id"]] if "id" in notes else None
        return RowBlock(x, notes.get("row", np.arange(start, stop)), y if labelled else None, ids)

    def blocks() -> Iterator[Callable[[], RowBlock]]:
        most = rows_per_block(trained, split.examples, ranks, row)
        for start in range(0, split.examples, most):
            yield partial(load, start, min(start + most, split.examples))

    return PredictionRows(name, blocks, labelled, "id" in columns)


def id_text(each: Any) -> str:
    """Return an id as a text."""
    return each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each)


def table_rows(source: str, trained: TrainedModel, delimiter: str = "") -> PredictionRows:
    """Return the rows of a table, encoded by the recipe of the training data."""
    found = trained.schema.recipe
    where = f"{trained.name}: the recipe of its data"
    recipe = plain_recipe(source, trained, delimiter) if found is None else Recipe.read(found, where)
    recipe = dataclasses.replace(recipe, delimiter=delimiter) if delimiter else recipe
    trained.check_rows((len(recipe.features),), source)
    table = TableRows(source, recipe)

    def load(parse: Callable[[], RowBlock]) -> RowBlock:
        rows = parse()
        return rows._replace(x=model_rows(rows.x, trained, source, rows.numbers))

    def blocks() -> Iterator[Callable[[], RowBlock]]:
        for parse in table.blocks():
            yield partial(load, parse)

    return PredictionRows(source, blocks, ids=table.ids)


def plain_recipe(source: str, trained: TrainedModel, delimiter: str) -> Recipe:
    """Return a recipe for a model that was not trained on a table: each column is a feature, in order."""
    table, wanted = open_table(source, delimiter or None), math.prod(trained.features)
    numbered = [str(number) for number in range(wanted)]  # the header of a plain array
    header = table.header or not any(map(is_number, table.first)) or table.first == numbered
    if table.width != wanted:
        raise UsageError(f"{source} has {table.width} columns; the model was trained on {wanted} features, no more")
    if header:
        table.take_header()
    names = table.names if header else numbered
    return Recipe(
        tuple(Column(name, number) for number, name in enumerate(names)), header=header, delimiter=table.delimiter
    )


def npz_rows(source: str, trained: TrainedModel, ranks: int) -> PredictionRows:
    """Return the rows of an npz archive."""
    arrays = load_npz(source)
    if set(arrays) >= SPARSE:
        return array_rows(sparse_matrix(source, arrays), source, trained, ranks)
    name = next((each for each in ("x", "x_test", "x_train") if each in arrays), None)
    if name is None:
        others = ", ".join(sorted(map(shown, arrays))) or "none"
        raise UsageError(f"{source} has no array x, x_test or x_train; it has {others}")
    return array_rows(arrays[name], f"{source}: {name}", trained, ranks)


def array_rows(x: Any, name: str, trained: TrainedModel, ranks: int) -> PredictionRows:
    """Return the rows of an array."""
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise UsageError(f"{name} is {x.dtype} of shape {x.shape}; it must hold numbers (rows, features...)")
    trained.check_rows(x.shape[1:], name)
    x = x.view(np.uint8) if x.dtype == bool else x

    def load(part: slice) -> RowBlock:
        numbers = np.arange(part.start, part.stop)
        rows = x[part].copy() if isinstance(x, CSR) else x[part]
        return RowBlock(model_rows(rows, trained, name, numbers), numbers)

    def blocks() -> Iterator[Callable[[], RowBlock]]:
        row = START.itemsize + 16 * x.nnz / len(x) if isinstance(x, CSR) else 0.0
        most = rows_per_block(trained, len(x), ranks, row)
        for start in range(0, len(x), most):
            yield partial(load, slice(start, min(start + most, len(x))))

    return PredictionRows(name, blocks)


def idx_rows(source: str, trained: TrainedModel) -> PredictionRows:
    """Return the rows of an idx file."""
    if format_of(source) == "gzip":
        with blamed_on(f"{source} cannot be read"), gzip.open(source) as file:
            if file.read(2) != b"\0\0":
                raise UsageError(f"{source} is gzipped, and holds no idx file; unpack it first")
    path = Path(source)
    _, shape = idx_header(path)
    if len(shape) < 2:
        raise UsageError(f"{source} holds one number for each row: labels; give the file of the images")
    trained.check_rows(shape[1:], source)

    def load(part: np.ndarray, numbers: np.ndarray) -> RowBlock:
        return RowBlock(model_rows(part, trained, source, numbers), numbers)

    def blocks() -> Iterator[Callable[[], RowBlock]]:
        at = 0
        for part in idx_slabs(path):
            numbers = np.arange(at, at + len(part))
            yield partial(load, part, numbers)
            at += len(part)

    return PredictionRows(source, blocks)


def libsvm_rows(source: str, trained: TrainedModel) -> PredictionRows:
    """Return the rows of libsvm's text; its labels are ignored."""
    base, width = trained.schema.base, math.prod(trained.features)
    if base is None:
        hint = "make a data file of it by prepare-data libsvm with --zero-based and --features"
        raise UsageError(f"{source}: the training data do not say whether indices count from 0 or from 1; {hint}")

    def load(text: TextBlock, first: int) -> RowBlock:
        rows, _ = LibsvmParser(base, width, f"{trained.name} was trained on").rows(text)
        numbers = np.arange(first, first + len(rows))
        columns = rows.indices - COLUMN.type(base)
        x = CSR(rows.data, columns, rows.indptr, (len(rows), width))
        return RowBlock(model_rows(x, trained, source, numbers), numbers)

    def blocks() -> Iterator[Callable[[], RowBlock]]:
        first = 0
        for text in texts(source):
            yield partial(load, text, first)
            first += libsvm.count(text.content, len(text.content))[1]

    return PredictionRows(source, blocks)


def rows_per_block(trained: TrainedModel, rows: int, ranks: int, row: float = 0) -> int:
    """Return the number of rows of a block. rows: in all; row: bytes of a sparse one."""
    return max(1, min(ROWS, int(SLAB_BYTES / (row or 8 * math.prod(trained.features))), -(-rows // ranks)))


def model_rows(x: Any, trained: TrainedModel, where: str, numbers: np.ndarray) -> Any:
    """Return raw rows in the model's form, scaled and standardized by the code that makes batches."""
    kind = memory_type(x.dtype, trained.dtype)
    if isinstance(x, CSR):
        return sparse_model_rows(x, trained, where, numbers, kind)
    with np.errstate(over="ignore"):
        raw = np.require(x.reshape(len(x), -1), kind, ["C", "A"])
    check_x(raw, where, numbers, most=largest_input(trained.schema.scale, trained.dtype))
    rows = MemoryRows(raw, np.zeros(len(raw), np.int64), trained.schema.scale, trained.dtype, None, trained.standard())
    into = np.empty(raw.shape, trained.dtype)
    rows.gather(np.arange(len(raw)), into, np.empty(len(raw), np.int64))
    return into


def sparse_model_rows(x: CSR, trained: TrainedModel, where: str, numbers: np.ndarray, kind: np.dtype) -> CSR:
    """Return raw sparse rows in the model's form. UsageError if the model was trained on standardized rows."""
    if trained.standard() is not None:
        raise UsageError(f"{where} has sparse rows, but the model was trained on standardized ones: give dense ones")
    with np.errstate(over="ignore"):
        raw = CSR(np.require(x.data, kind, ["C", "A"]), x.indices, x.indptr, x.shape)
    most = largest_input(trained.schema.scale, trained.dtype)
    check_elements(raw.data[: raw.nnz], raw.indptr, where, int(numbers[0]) if len(numbers) else 0, most)
    rows = MemoryRows(raw, np.zeros(len(raw), np.int64), trained.schema.scale, trained.dtype)
    into = CSR.empty(*raw.shape, trained.dtype, raw.nnz)
    rows.gather(np.arange(len(raw)), into, np.empty(len(raw), np.int64))
    return into
