"""Imputation of a table's missing numbers by the mean or the median of their column over the training rows.

    prepare-data   fills missing numbers from all training rows, and marks them: GROUP/filled (rows, ceil(k / 8)) uint8
                   holds a bit for each of the k number columns, 1 if the number was filled in
    open_data      with --validation recomputes the fills from the remaining training rows (unmarked cells only), and
                   puts them into all marked cells as rows are read
    evaluate       puts the fills that the model was trained with into the rows of another file

Otherwise the held-out rows would leak into the training data, and their score would be too good (Hastie, Tibshirani,
Friedman, "The Elements of Statistical Learning", 2009, section 7.10.2). The file and its digest do not change. A file
without marks (of an older version) keeps its fills; so does a file made by --like, whose fills are another file's."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from hpcdl.data.format import Info
from hpcdl.data.formats.recipe import Recipe, recipe_in
from hpcdl.data.hdf5 import DataFile, dataset, follow_links, open_file, short, slabs, slabs_of
from hpcdl.errors import UsageError

FILLED = "filled"  # in a group: the marks
MEDIAN_BYTES = 256 << 20  # of the columns whose medians are taken at a time


def averages(which: str, parts: Callable[[], Iterable[np.ndarray]], width: int, rows: int) -> np.ndarray:
    """Return the "mean" or "median" (width,) of each column without its NaN; NaN for an empty column. parts() yields
    `rows` rows in arrays (some, width). Medians are taken of some columns at a time, to save memory."""
    if which == "mean":
        total, count = np.zeros(width), np.zeros(width)
        with np.errstate(all="ignore"):  # the caller refuses infinities and NaN
            for part in parts():
                total += np.nansum(part, axis=0)
                count += (~np.isnan(part)).sum(axis=0)
            return total / count
    result, step = [], max(1, MEDIAN_BYTES // (8 * rows))
    for start in range(0, width, step):
        values, at = np.empty((rows, min(step, width - start))), 0
        for part in parts():
            values[at : at + len(part)] = part[:, start : start + step]
            at += len(part)
        for column in values.T:
            there = column[~np.isnan(column)]
            result.append(np.median(there) if len(there) else np.nan)
    return np.array(result)


def marks(raw: np.ndarray, rows: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the marks of the rows numbered `rows`. raw (all rows, columns of the recipe): NaN for a missing number."""
    numbers = number_columns(recipe)
    result = np.empty((len(rows), -(-len(numbers) // 8)), np.uint8)
    for slab in slabs(len(rows), 8 * raw.shape[1]):
        result[slab] = np.packbits(np.isnan(raw[rows[slab]][:, numbers]), axis=1)
    return result


def unfilled_slabs(info: Info) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the number columns of train/x slab by slab: (slice of rows, float64 with NaN in marked cells)."""
    with open_file(info.path) as file:
        x, marks = dataset(file, "train/x"), FillMarks(file, info, "train")
        for slab in slabs_of(x, across=True):
            values = x[slab][:, marks.places].astype(np.float64)
            values[marks.mask(slab)] = np.nan
            yield slab, values


def with_recomputed_fills(info: Info, known: Callable[[], Iterable[np.ndarray]], rows: int) -> Info:
    """Return `info` with the fills that the rows of known() give; unchanged without marks, or with fills of --like.
    known() yields parts of `unfilled_slabs`, `rows` rows in all. UsageError for a column without (finite) values."""
    recipe = recipe_in(info) if has_marks(info) else None
    if recipe is None or recipe.like:
        return info
    fills = averages(recipe.missing, known, len(number_columns(recipe)), rows)
    for number, fill in zip(number_columns(recipe), fills.tolist(), strict=True):
        if not np.isfinite(fill):
            name = short(recipe.columns[number].name)
            what = "infinite" if np.isinf(fill) else "unknown: none of them has a value"
            raise UsageError(
                f"{info.path}: column {name}: the {recipe.missing} of the rows that --validation leaves is {what}; "
                f"hold out fewer, or leave the column out: prepare-data --drop {name}"
            )
    return _with_fills(info, recipe, tuple(fills.tolist()))


def with_model_fills(info: Info, other: dict | None) -> Info:
    """Return `info` with the fills of the recipe `other`; unchanged without marks, or if more than fills differs."""
    if not other or not info.schema.recipe or other.get("columns") == info.schema.recipe.get("columns"):
        return info
    mine = recipe_in(info) if has_marks(info) else None
    if mine is None:
        return info
    theirs = Recipe.read(other, "the recipe of the data that the model was trained on")
    bare = [[dataclasses.replace(column, fill=None) for column in each.columns] for each in (mine, theirs)]
    fills = [column.fill for column in theirs.columns if column.values is None]
    if bare[0] != bare[1] or None in fills:
        return info
    return _with_fills(info, mine, tuple(fill for fill in fills if fill is not None))


class FillMarks:
    """The marks of a group of a file. places: for each number column, the number of its feature."""

    def __init__(self, file: DataFile, info: Info, group: str):
        recipe = recipe_in(info)
        assert recipe is not None  # the file has marks
        starts = np.cumsum([0, *(len(column.features) for column in recipe.columns)])
        self.places, self.bits = starts[number_columns(recipe)], dataset(file, f"{group}/{FILLED}")
        shape, self.fills = (info.rows[group], -(-len(self.places) // 8)), np.array(info.fills)
        if self.bits.dtype != np.uint8 or self.bits.shape != shape:
            form = f"{self.bits.dtype} of shape {self.bits.shape}"
            raise UsageError(f"{info.path}: {group}/{FILLED} is {form}; it must be uint8 of shape {shape}")

    def mask(self, rows: slice) -> np.ndarray:
        """Return (rows, columns): True for each cell of the number columns that was filled in."""
        return np.unpackbits(self.bits[rows], axis=1, count=len(self.places)).view(bool)

    def refill(self, rows: slice, x: np.ndarray) -> None:
        """Put the fills (`Info.fills`) into the marked cells of x (rows, features), which holds these rows."""
        row, number = np.nonzero(self.mask(rows))
        x[row, self.places[number]] = self.fills[number]


def number_columns(recipe: Recipe) -> list[int]:
    """Return the places of the columns of numbers among all columns."""
    return [number for number, column in enumerate(recipe.columns) if column.values is None]


def has_marks(info: Info) -> bool:
    """True if each group of a table marks the numbers that were filled in."""
    if info.schema.recipe is None or info.sparse:
        return False
    with open_file(info.path) as file:
        return all(follow_links(file, f"{group}/{FILLED}") is not None for group in info.kinds)


def _with_fills(info: Info, recipe: Recipe, fills: tuple[float, ...]) -> Info:
    """Return `info` with these fills. Integer rows are then read as floats, for fills may be fractions."""
    numbers = number_columns(recipe)
    if fills == tuple(recipe.columns[number].fill for number in numbers):
        return info
    assert info.schema.recipe is not None
    columns = list(info.schema.recipe["columns"])
    for number, fill in zip(numbers, fills, strict=True):
        columns[number] = columns[number] | {"fill": fill}
    schema = dataclasses.replace(info.schema, recipe=info.schema.recipe | {"columns": columns})
    kinds = {group: kind if kind.kind == "f" else np.dtype(np.float64) for group, kind in info.kinds.items()}
    return dataclasses.replace(info, schema=schema, kinds=kinds, fills=fills)
