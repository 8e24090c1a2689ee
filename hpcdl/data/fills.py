"""What missing numbers of a table become: the mean or the median of their column over the rows that train.

    prepare-data   fills them in from all training rows, and marks them: train/filled, test/filled, rows/filled
                   (rows, ceil(k / 8)) uint8 hold a bit for each of the k columns of numbers, 1 where it was filled in
    open_data      whose --validation holds rows out, computes the fills of the training rows that are left
                   (cells with a mark do not count) and puts them into all cells with a mark, as rows are read
    evaluate       puts the fills that the model was trained with into the rows of another file

The held-out rows would have a part in what the model is trained on otherwise, and their score would be too good
(Hastie, Tibshirani, Friedman, "The Elements of Statistical Learning", 2009, section 7.10.2). The file stays as it is,
and so does its digest. A file of an older version has no marks, and keeps its fills; so does one that was made by
--like, whose fills are those of another file's rows.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import h5py
import numpy as np

from hpcdl.data.format import Info, dataset, linked, open_file, short, slabs, slabs_of
from hpcdl.data.formats.recipe import Recipe, recipe_in
from hpcdl.errors import UsageError

FILLED = "filled"  # in a group: the marks
MEDIAN_BYTES = 256 << 20  # of columns of which medians are taken at a time


def means(parts: Iterable[np.ndarray], width: int) -> np.ndarray:
    """Of each column over the rows of these parts (rows, width), of the values that are there; NaN where none is."""
    total, count = np.zeros(width), np.zeros(width)
    with np.errstate(all="ignore"):  # what is infinite or unknown is refused
        for part in parts:
            total += np.nansum(part, axis=0)
            count += (~np.isnan(part)).sum(axis=0)
        return total / count


def medians(parts: Callable[[], Iterable[np.ndarray]], width: int, rows: int) -> np.ndarray:
    """The same of so many rows, some columns at a time; each time the parts are gone through."""
    found, step = [], max(1, MEDIAN_BYTES // (8 * rows))
    for start in range(0, width, step):
        values, at = np.empty((rows, min(step, width - start))), 0
        for part in parts():
            values[at : at + len(part)] = part[:, start : start + step]
            at += len(part)
        for column in values.T:
            there = column[~np.isnan(column)]
            found.append(np.median(there) if len(there) else np.nan)
    return np.array(found)


def marks(raw: np.ndarray, rows: np.ndarray, recipe: Recipe) -> np.ndarray:
    """The marks of these rows of a table (rows, columns of the recipe), in which NaN is missing."""
    numbers = _numbers(recipe)
    found = np.empty((len(rows), -(-len(numbers) // 8)), np.uint8)
    for slab in slabs(len(rows), 8 * raw.shape[1]):
        found[slab] = np.packbits(np.isnan(raw[rows[slab]][:, numbers]), axis=1)
    return found


def known_slabs(info: Info) -> Iterator[tuple[slice, np.ndarray]]:
    """The columns of numbers of train/x, slab by slab: (which rows, float64 with NaN for what was filled in)."""
    with open_file(info.path) as file:
        x, marked = dataset(file, "train/x"), _Marks(file, info, "train")
        for slab in slabs_of(x):
            values = x[slab][:, marked.places].astype(np.float64)
            values[marked.where(slab)] = np.nan
            yield slab, values


def filled_anew(info: Info, known: Callable[[], Iterable[np.ndarray]], rows: int) -> Info:
    """The file with the fills of these rows, if it has marks, and fills of its own; else as it is.

    known: the parts of `known_slabs` that count, with so many rows in all. UsageError where a column has no values.
    """
    recipe = recipe_in(info) if _is_marked(info) else None
    if recipe is None or recipe.like:
        return info
    width = len(_numbers(recipe))
    found = means(known(), width) if recipe.missing == "mean" else medians(known, width, rows)
    for number, fill in zip(_numbers(recipe), found.tolist(), strict=True):
        if not np.isfinite(fill):
            name = short(recipe.columns[number].name)
            what = "infinite" if np.isinf(fill) else "unknown: none of them has a value"
            raise UsageError(
                f"{info.path}: column {name}: the {recipe.missing} of the rows that --validation leaves is {what}; "
                f"hold out fewer, or leave the column out: prepare-data --drop {name}"
            )
    return _with(info, recipe, tuple(found.tolist()))


def filled_as(info: Info, other: dict | None) -> Info:
    """The file with the fills of another recipe, if it has marks, and the columns differ in nothing else."""
    if not other or not info.meaning.recipe or other.get("columns") == info.meaning.recipe.get("columns"):
        return info
    mine = recipe_in(info) if _is_marked(info) else None
    if mine is None:
        return info
    theirs = Recipe.read(other, "the recipe of the data that the model was trained on")
    bare = [[dataclasses.replace(column, fill=None) for column in each.columns] for each in (mine, theirs)]
    fills = [column.fill for column in theirs.columns if column.values is None]
    if bare[0] != bare[1] or None in fills:
        return info
    return _with(info, mine, tuple(fill for fill in fills if fill is not None))


class Refill:
    """What puts the fills of `info` into rows of a group that were read; nothing, where they are the file's own."""

    def __init__(self, file: h5py.File, info: Info, group: str):
        self.marked = _Marks(file, info, group) if info.fills else None
        self.fills = np.array(info.fills)

    def __call__(self, rows: slice, x: np.ndarray) -> None:
        """x (rows, features), of these rows."""
        if self.marked is not None:
            row, number = np.nonzero(self.marked.where(rows))
            x[row, self.marked.places[number]] = self.fills[number]


class _Marks:
    """The marks of a group. places: the features that columns of numbers are."""

    def __init__(self, file: h5py.File, info: Info, group: str):
        recipe = recipe_in(info)
        assert recipe is not None  # the file has marks
        starts = np.cumsum([0, *(len(column.features) for column in recipe.columns)])
        self.places, self.bits = starts[_numbers(recipe)], dataset(file, f"{group}/{FILLED}")
        shape = info.rows[group], -(-len(self.places) // 8)
        if self.bits.dtype != np.uint8 or self.bits.shape != shape:
            said = f"{self.bits.dtype} of shape {self.bits.shape}"
            raise UsageError(f"{info.path}: {group}/{FILLED} is {said}; it must be uint8 of shape {shape}")

    def where(self, rows: slice) -> np.ndarray:
        """Which cells of the columns of numbers were filled in, (rows, columns) bool."""
        return np.unpackbits(self.bits[rows], axis=1, count=len(self.places)).view(bool)


def _numbers(recipe: Recipe) -> list[int]:
    """Which columns of a recipe are numbers."""
    return [number for number, column in enumerate(recipe.columns) if column.values is None]


def _is_marked(info: Info) -> bool:
    """True if all groups of the file have marks."""
    if info.meaning.recipe is None or info.sparse:
        return False
    with open_file(info.path) as file:
        return all(linked(file, f"{group}/{FILLED}") is not None for group in info.kinds)


def _with(info: Info, recipe: Recipe, fills: tuple[float, ...]) -> Info:
    """The file with these fills. Rows that are bytes in the file become floats, as fills need not be whole."""
    numbers = _numbers(recipe)
    if fills == tuple(recipe.columns[number].fill for number in numbers):
        return info
    assert info.meaning.recipe is not None
    columns = list(info.meaning.recipe["columns"])
    for number, fill in zip(numbers, fills, strict=True):
        columns[number] = columns[number] | {"fill": fill}
    meaning = dataclasses.replace(info.meaning, recipe=info.meaning.recipe | {"columns": columns})
    kinds = {group: kind if kind.kind == "f" else np.dtype(np.float64) for group, kind in info.kinds.items()}
    return dataclasses.replace(info, meaning=meaning, kinds=kinds, fills=fills)
