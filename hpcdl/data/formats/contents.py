"""What a data file or a folder of shards holds, as JSON data, for `hpcdl data show`.

    of all        name, bytes, shards, features, type, classes, origin, recipe, digest
    by group      rows, elements of sparse rows, other columns, rows by class or the range of the targets
    columns       of a table: numbers with their range, mean and missing values; texts with their number of values
    range         of plain features (rows, features): least, mean and largest value of all features
    examples      the first rows: images as numbers, text decoded, features by name

Labels are read slab by slab, and so are the rows of tables and plain features; of images, texts and sparse rows only
the examples are read."""

import contextlib
import math
import os
from collections import Counter
from typing import Any

import numpy as np

from hpcdl.csr import CSR
from hpcdl.data.digest import file_digest
from hpcdl.data.fills import FillMarks, has_marks
from hpcdl.data.format import Info, row_notes
from hpcdl.data.formats.recipe import Column, recipe_in
from hpcdl.data.formats.sparse_file import open_rows
from hpcdl.data.hdf5 import DataFile, dataset, open_file, slabs_of
from hpcdl.data.shards import shard_paths
from hpcdl.files import parse_json

CHANNELS = (1, 3, 4)  # of an image (height, width, channels)


def is_image(features: tuple[int, ...]) -> bool:
    """True for the shape of an image: (height, width), or with channels."""
    return (len(features) == 2 or (len(features) == 3 and features[2] in CHANNELS)) and min(features[:2]) > 1


def contents(info: Info, examples: int) -> dict[str, Any]:
    """Return the contents of a data set as JSON data. examples: rows to show. Raises UsageError."""
    paths = shard_paths(info.path) or [info.path]
    with open_file(info.path) as file:
        recipe: Any = None
        with contextlib.suppress(ValueError):
            recipe = parse_json(str(file.attrs.get("recipe", "null")))
        origin = file.attrs.get("source")
        kinds = {str(kind) for kind in info.kinds.values()}
        found: dict[str, Any] = {
            "path": info.path,
            "name": info.name,
            "shards": len(paths) if os.path.isdir(info.path) else None,
            "bytes": sum(os.path.getsize(path) for path in paths),
            "features": list(info.features),
            "type": " and ".join(sorted(kinds)),
            "sparse": info.sparse,
            "scale": info.scale,
            "classes": info.classes,
            "vocabulary": None if info.vocabulary is None else len(info.vocabulary),
            "origin": None if origin is None else str(origin),
            "recipe": recipe,
            "digest": file_digest(info),
            "groups": {group: _group(file, info, group) for group in info.kinds},
        }
        first = next(iter(info.kinds))
        if len(info.features) == 1 and not info.sparse and info.vocabulary is None:
            found |= _ranges(file, info, first)
        found["examples"] = [_example(file, info, first, row) for row in range(min(examples, info.rows[first]))]
    return found


def _group(file: DataFile, info: Info, group: str) -> dict[str, Any]:
    """Return rows, elements, other columns, and the balance of classes or ranges of targets of a group."""
    others = sorted(set(map(str, file[group])) - {"x", "y"})
    found: dict[str, Any] = {"rows": info.rows[group], "columns": others}
    if info.sparse:
        found["elements"] = info.elements[group]
    if group == "rows" or info.vocabulary is not None:
        return found
    y = dataset(file, f"{group}/y")
    if info.classes:
        counts = np.zeros(info.classes, np.int64)
        for slab in slabs_of(y):
            counts += np.bincount(np.clip(y[slab].astype(np.int64), 0, info.classes - 1), minlength=info.classes)
        return found | {"by_class": dict(zip(info.schema.names(info.classes), counts.tolist(), strict=True))}
    spread = Spread(math.prod(info.outputs))
    for slab in slabs_of(y):
        spread.add(y[slab].reshape(slab.stop - slab.start, -1))
    names = info.schema.output_names(info.outputs)
    return found | {"targets": [{"name": name} | spread.of(k) for k, name in enumerate(names)]}


class Spread:
    """Least, largest and mean value of columns, whose rows are added part by part."""

    def __init__(self, width: int):
        self.low, self.high = np.full(width, np.inf), np.full(width, -np.inf)
        self.sums, self.rows = np.zeros(width), 0

    def add(self, part: np.ndarray) -> None:
        """Add rows (some, width)."""
        self.low, self.high = np.minimum(self.low, part.min(axis=0)), np.maximum(self.high, part.max(axis=0))
        self.sums, self.rows = self.sums + part.sum(axis=0, dtype=np.float64), self.rows + len(part)

    def of(self, column: int) -> dict[str, float]:
        low, high = float(self.low[column]), float(self.high[column])
        return {"min": low, "mean": float(self.sums[column]) / self.rows, "max": high}


def _ranges(file: DataFile, info: Info, group: str) -> dict[str, Any]:
    """Return the columns of a table, or the range of plain features, over the rows of a group."""
    recipe, x = recipe_in(info), dataset(file, f"{group}/x")
    spread, missing = Spread(info.features[0]), Counter[int]()
    starts = np.cumsum([0, *(len(column.features) for column in recipe.columns)]).tolist() if recipe else []
    marks = FillMarks(file, info, group) if recipe and has_marks(info) else None
    numbers = [k for k, column in enumerate(recipe.columns) if column.values is None] if recipe else []
    texts = [k for k, each in enumerate(recipe.columns) if each.values is not None and not each.of] if recipe else []
    for slab in slabs_of(x):
        part = x[slab]
        spread.add(part)
        for k in texts:
            missing[k] += int((~part[:, starts[k] : starts[k + 1]].any(axis=1)).sum())
        if marks is not None:
            missing.update(dict(zip(numbers, marks.mask(slab).sum(axis=0).tolist(), strict=True)))
    if recipe is None:
        middle = float(spread.sums.mean()) / spread.rows
        return {"range": {"min": float(spread.low.min()), "mean": middle, "max": float(spread.high.max())}}
    columns = []
    for k, column in enumerate(recipe.columns):
        about: dict[str, Any] = {"name": column.name, "kind": _kind(column)}
        if k in texts or marks is not None:
            about["missing"] = missing[k]
        if k in texts:
            assert column.values is not None
            counts = dict(zip(column.values, spread.sums[starts[k] : starts[k + 1]].astype(int).tolist(), strict=True))
            about |= {"values": len(counts), "counts": counts}
        else:
            about |= spread.of(starts[k])
        columns.append(about)
    return {"columns": columns}


def _kind(column: Column) -> str:
    if column.values is None:
        return f"{column.part} of a time" if column.part else "number"
    if column.of:
        return "text, as means of the label"
    return "text, hashed" if column.hashed else "text"


def _example(file: DataFile, info: Info, group: str, row: int) -> dict[str, Any]:
    """Return a row for people: its label, its id, and text, image, or features."""
    x, found = open_rows(file, f"{group}/x"), dict[str, Any]()
    if info.sparse:
        one = CSR.empty(1, x.shape[1], x.dtype)
        x.read(row, row + 1, one)
        values = one.data[one.part]
        found["elements"] = dict(zip(map(str, one.indices[one.part].tolist()), values.tolist(), strict=True))
    elif info.vocabulary is not None:
        found["text"] = info.vocabulary.decode(x[row])
    else:
        recipe, values = recipe_in(info), np.asarray(x[row])
        named = recipe is not None and len(info.features) == 1
        found["x"] = dict(zip(recipe.features, values.tolist(), strict=True)) if recipe and named else values.tolist()
    if group != "rows" and info.vocabulary is None:
        y = dataset(file, f"{group}/y")[row]
        found["y"] = info.schema.names(info.classes)[int(y)] if info.classes else np.asarray(y).tolist()
    for name, column in row_notes(file, group, info.rows[group]).items():
        value = column[row : row + 1][0]
        found[name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else np.asarray(value).tolist()
    return found
