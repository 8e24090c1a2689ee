"""Rows to predict, from any supported file, in the form that the model was trained on.

    a data file (HDF5)       the given group, else rows, else test, else train; classes are matched by name
    plain text               of a model of text: its tokens in rows, the last one up to its end
    csv, Parquet, Arrow      by the recipe of the training data; without one, each column is a feature
    npz                      the array x, or x_test, x_train; or a sparse matrix of scipy's
    libsvm                   sparse rows as text, whose features are numbered as in the training data
    idx                      one file of MNIST's format, gzipped or not
    package.module:function  its result, x alone or data as for --data

Each source comes in blocks; a rank parses only the blocks that it predicts."""

import dataclasses
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hpcdl.csr import CSR
from hpcdl.data.arrays import call_data_function, from_returned
from hpcdl.data.batch import PredictionRows, RowBlock, in_blocks
from hpcdl.data.dataset import Split
from hpcdl.data.fills import with_model_fills
from hpcdl.data.format import KNOWN, find_data_file, read_info
from hpcdl.data.formats.documents import TextOptions, read, survey
from hpcdl.data.formats.prepare_idx import idx_rows
from hpcdl.data.formats.prepare_libsvm import libsvm_rows
from hpcdl.data.formats.prepare_npz import array_rows, npz_rows
from hpcdl.data.formats.recipe import Column, Recipe
from hpcdl.data.formats.recognition import format_of
from hpcdl.data.formats.sparse_file import check_elements, sparse_rows
from hpcdl.data.formats.table_rows import TableRows
from hpcdl.data.formats.table_source import Source, is_number
from hpcdl.data.formats.vocabulary import BYTES
from hpcdl.data.hdf5 import check_x, check_y, largest_input
from hpcdl.data.mixture import test_source
from hpcdl.data.placement import FileRows, MemoryRows, memory_type
from hpcdl.errors import UsageError, blamed_on
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.plugins import is_plugin


def prediction_rows(
    source: str, trained: TrainedModel, group: str = "", ranks: int = 1, delimiter: str = ""
) -> PredictionRows:
    """Return the rows of `source` in the form of a model. Raises UsageError. group: rows, test or train; "": see above.
    ranks: number of ranks that share the blocks. delimiter: of a csv; default: that of the training data."""
    source = test_source(source)
    if source in KNOWN:
        return file_rows(source, trained, group, ranks)
    if is_plugin(source) and not os.path.exists(source):
        returned = call_data_function(source, trained.seed)
        if "x" in returned and "y" not in returned and not group:
            x = returned["x"]
            sparse = isinstance(x, CSR) or hasattr(x, "tocsr")
            return of_model(array_rows(sparse_rows(x) if sparse else np.asarray(x), source, ranks), trained)
        data = from_returned(source, returned, dtype=trained.dtype, standardize=trained.of_features or False)
        split: Any = {"": data.test or data.train, "test": data.test, "train": data.train}.get(group)
        if split is None:
            raise UsageError(f"{source} has no {group} rows")
        return split_rows(split, data, source, trained, ranks)
    form = format_of(source)
    if form == "hdf5":
        return file_rows(source, trained, group, ranks)
    if group:
        hint = "make one by prepare-data (of a table: with --like the training data), or give the file to hpcdl predict"
        raise UsageError(f"{source} is no data file (HDF5) with a part {group}: {hint}")
    if trained.schema.vocabulary is not None:
        if form not in ("unknown", "gzip"):
            raise UsageError(
                f"{source}: the model was trained on text; give plain text, or what prepare-data text makes"
            )
        return of_model(text_rows(source, trained, ranks), trained)
    base = trained.schema.base
    if form == "npz":
        rows = npz_rows(source, ranks)
    elif form == "libsvm" or (base is not None and form in ("gzip", "unknown")):
        if base is None:
            hint = "convert the file by prepare-data libsvm with --zero-based and --features"
            raise UsageError(f"{source}: the training data do not say whether indices count from 0 or from 1; {hint}")
        rows = libsvm_rows(source, base, math.prod(trained.features), f"{trained.name} was trained on")
    elif form in ("idx", "gzip"):
        rows = idx_rows(source)
    else:
        table = TableRows(source, model_recipe(source, trained, delimiter))
        features = (len(table.recipe.features),)
        rows = PredictionRows(source, table.blocks, ids=table.ids, reasons=True, features=features)
    return of_model(rows, trained)


def text_rows(source: str, trained: TrainedModel, ranks: int) -> PredictionRows:
    """Return the rows of a plain text: its tokens, the last row up to the end of the text; a rest at the beginning is
    left out. The prediction of a row is the token that follows."""
    length = math.prod(trained.features)
    options = TextOptions(errors="surrogateescape" if trained.schema.vocabulary.description == BYTES else "strict")
    text = "".join(part.text for span in survey(source, options) for part in read(span, options))
    tokens = trained.schema.vocabulary.encode(text)
    if len(tokens) < length:
        raise UsageError(
            f"{source} has {len(tokens)} tokens; the model was trained on rows of {length}: give more text"
        )
    return array_rows(tokens[len(tokens) % length :].astype(np.uint32).reshape(-1, length), source, ranks)


def file_rows(source: str, trained: TrainedModel, group: str = "", ranks: int = 1) -> PredictionRows:
    """Return the rows of a group of a data file; by default of `rows`, else of `test`, else of `train`."""
    info = read_info(find_data_file(source))
    group = group or next(each for each in ("rows", "test", "train") if info.rows[each])
    if not info.rows[group]:
        others = " and ".join(each for each, count in info.rows.items() if count)
        raise UsageError(f"{info.path} has no group {group}; it has {others}")
    info = with_model_fills(info, trained.schema.recipe)
    if trained.schema.recipe is not None:
        info = dataclasses.replace(info, scale=trained.schema.scale)
    split = Split(FileRows(info, group, trained.dtype, trained.standard()), None, trained.dtype)
    return split_rows(split, info, info.name, trained, ranks, group != "rows")._replace(group=group)


def split_rows(
    split: Any, about: Any, name: str, trained: TrainedModel, ranks: int, labelled: bool = True
) -> PredictionRows:
    """Return the rows of a split of `about` (Data or Info); class numbers become those of the model, by class names."""
    trained.check_rows(about.features, name)
    trained.schema.refuse_other_columns(about.schema, name)
    classes, numbers = about.classes, None
    if labelled:
        if bool(classes) != bool(trained.classes) or about.outputs != trained.outputs:
            kinds = [
                f"{each.classes} classes" if each.classes else f"{math.prod(each.outputs)} values to predict"
                for each in (about, trained)
            ]
            raise UsageError(f"{name} has {kinds[0]}; the model was trained on {kinds[1]}")
        if classes:
            numbers = trained.schema.class_numbers(about.schema, trained.classes, classes, name)
    columns, nnz = getattr(split.source, "columns", {}), None
    if getattr(split.source, "sparse", False):
        if trained.standard() is not None:
            raise UsageError(f"{name} has sparse rows, but the model was trained on standardized rows: give dense rows")
        nnz = split.source.x.nnz

    def load(part: slice) -> RowBlock:
        x, y = split.rows(part.start, part.stop)
        if labelled and len(y):
            check_y(y, classes, name)
            y = y if numbers is None else numbers[y]
        with blamed_on(f"{name} is damaged"):
            notes = {column: values[part] for column, values in columns.items()}
        numbers_of_rows, ids = notes.get("row", np.arange(part.start, part.stop)), None
        if "id" in notes:
            ids = [each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each) for each in notes["id"]]
        return RowBlock(x, numbers_of_rows, y if labelled else None, ids)

    blocks = partial(in_blocks, load, split.examples, about.features, ranks, nnz)
    return PredictionRows(name, blocks, labelled, "id" in columns, schema=about.schema)


def model_recipe(source: str, trained: TrainedModel, delimiter: str) -> Recipe:
    """Return the recipe of the training data; without one, a recipe by which each column of `source` is a feature."""
    if trained.schema.recipe is not None:
        recipe = Recipe.read(trained.schema.recipe, f"{trained.name}: the recipe of its data")
        return dataclasses.replace(recipe, delimiter=delimiter) if delimiter else recipe
    table, wanted = Source(source, delimiter or None), math.prod(trained.features)
    numbered = [str(number) for number in range(wanted)]  # the header of a plain array
    header = table.header or not any(map(is_number, table.first)) or table.first == numbered
    if table.width != wanted:
        raise UsageError(f"{source} has {table.width} columns; the model was trained on {wanted} features")
    if header:
        table.take_header()
    columns = (Column(name, number) for number, name in enumerate(table.names if header else numbered))
    return Recipe(tuple(columns), header=header, delimiter=table.delimiter, decimal=table.decimal or ".")


def of_model(rows: PredictionRows, trained: TrainedModel) -> PredictionRows:
    """Return rows in the model's form; UsageError if their shape does not fit."""
    trained.check_rows(rows.features, rows.name)

    def load(parse: Callable[[], RowBlock]) -> RowBlock:
        block = parse()
        return block._replace(x=model_rows(block.x, trained, rows.name, block.numbers))

    return rows._replace(blocks=lambda: (partial(load, parse) for parse in rows.blocks()))


def model_rows(x: Any, trained: TrainedModel, where: str, numbers: np.ndarray) -> Any:
    """Return raw rows x scaled and standardized like batches. where, numbers: names of x and its rows, for errors."""
    kind, scale, standard = memory_type(x.dtype, trained.dtype), trained.schema.scale, trained.standard()
    most, sparse = largest_input(scale, trained.dtype), isinstance(x, CSR)
    if sparse and standard is not None:
        raise UsageError(f"{where} has sparse rows, but the model was trained on standardized rows: give dense rows")
    with np.errstate(over="ignore"):
        raw: Any = np.require(x.data if sparse else x.reshape(len(x), -1), kind, ["C", "A"])
    if sparse:
        raw = CSR(raw, x.indices, x.indptr, x.shape)
        check_elements(raw.data[: raw.nnz], raw.indptr, where, int(numbers[0]) if len(numbers) else 0, most)
        into: Any = CSR.empty(len(raw), raw.shape[1], trained.dtype, raw.nnz)
    else:
        check_x(raw, where, numbers, most=most)
        into = np.empty(raw.shape, trained.dtype)
    rows = MemoryRows(raw, np.zeros(len(raw), np.int64), scale, trained.dtype, None, standard)
    rows.gather(np.arange(len(raw)), into, np.empty(len(raw), np.int64))
    return into
