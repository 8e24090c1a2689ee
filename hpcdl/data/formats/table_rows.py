"""New rows of a table, by the recipe of the table that a model was trained on.

    numbers                      as they are; a missing one is what the recipe fills in
    texts                        1 at the feature of the text; at none where it is missing, or new
    rows with missing values     left out, where the recipe drops them; refused, where it knows nothing to do with them

Several ranks may go through one file: each calls the blocks that are its own.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from hpcdl.data.format import SLAB_BYTES, FilePath
from hpcdl.data.formats.recipe import Column, Recipe
from hpcdl.data.formats.table_source import LINES, Cells, Wanted, knowing, naming, open_table
from hpcdl.errors import UsageError


class EncodedRows(NamedTuple):
    """Rows of a table. x (rows, features) float64; numbers (rows,) int64: of the rows in the source, from 0.

    ids: of the rows, where the table has the recipe's column of them. dropped: rows that were left out for missing
    values; filled: missing values that were filled in (numbers by the recipe's, texts by zeros); unseen: texts that the
    recipe does not have, and that are zeros, too.
    """

    x: np.ndarray
    numbers: np.ndarray
    ids: list[str] | None
    dropped: int
    filled: int
    unseen: int


class TableRows:
    """The rows of a table by a recipe. ids: whether it has the column that says which row a row is."""

    def __init__(self, path: FilePath, recipe: Recipe):
        """UsageError for a file that cannot be read, and for a column that it lacks; it may have others."""
        self.recipe = recipe
        self.source = open_table(path, recipe.delimiter)
        if recipe.header:
            self.source.take_header()
        self.source.hint = "the model was trained on numbers in column {}"
        self.columns = [self._find(column) for column in recipe.columns]
        self.id = -1 if recipe.id is None else self.source.known(recipe.id, None, recipe.header)
        self.ids = self.id >= 0
        self.most = block_rows(len(recipe.features))

    def blocks(self) -> Iterator[Callable[[], EncodedRows]]:
        """Calls that parse a block of some thousand rows each; one that is not called costs next to nothing."""
        for _, cells in self.source.blocks(self.most):
            yield partial(self._rows, cells)

    def _find(self, column: Column) -> int:
        found = self.source.known(column.name, column.number, self.recipe.header)
        if found < 0:
            raise self.source.lacks(column.name if self.recipe.header else str(column.number), self.recipe.header)
        return found

    def _rows(self, parse: Callable[[], Cells]) -> EncodedRows:
        cells = parse()
        names: dict[str, int] = {}
        wanted = wanted_of(self.recipe, self.columns)
        if self.ids:
            wanted[self.id] = naming(names)
        table = cells.read(wanted)
        raw = table[:, : len(self.columns)]
        kept = keep(cells, raw, self.recipe, self.columns)
        x, filled, unseen = encode(raw[kept], self.recipe)
        ids = None
        if self.ids:
            ids = list(np.array(list(names), object)[table[:, -1].astype(np.int64)][kept])
        return EncodedRows(x, cells.first + np.flatnonzero(kept), ids, int((~kept).sum()), filled, unseen)


def block_rows(features: int) -> int:
    """How many rows to take at a time."""
    return max(1, min(LINES, SLAB_BYTES // (8 * features)))


def wanted_of(recipe: Recipe, columns: list[int]) -> Wanted:
    """What of these columns of a source is to be read by a recipe."""
    return {
        at: None if column.values is None else knowing({value: code for code, value in enumerate(column.values)})
        for at, column in zip(columns, recipe.columns, strict=True)
    }


def keep(cells: Cells, raw: np.ndarray, recipe: Recipe, columns: list[int]) -> np.ndarray:
    """Which rows stay (rows,); UsageError where values are missing for which the recipe has nothing."""
    missing = np.isnan(raw)
    kept = ~missing.any(axis=1)
    if recipe.missing == "refuse" and not kept.all():
        row, at = map(int, np.argwhere(missing)[0])
        where = cells.source.cell(cells.where(row), columns[at])
        raise UsageError(
            f"{where}: a value is missing, and the recipe of the training data refuses that; fill it in, or make those "
            f"data again with --missing mean, median or drop"
        )
    return kept if recipe.missing == "drop" else np.ones(len(raw), bool)


def encode(raw: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, int, int]:
    """Features of rows (rows, columns) of numbers and codes: (x, values filled in, texts that are none of the recipe).

    A code is the place of a text among the values of its column; -1: it is not there; NaN: it is missing.
    """
    x = np.zeros((len(raw), len(recipe.features)))
    filled, unseen, at = int(np.isnan(raw).sum()), 0, 0
    plain: list[tuple[int, int, float | None]] = []
    for number, column in enumerate(recipe.columns):
        if column.values is None:
            plain.append((number, at, column.fill))
            at += 1
        else:
            codes = raw[:, number]
            rows = np.flatnonzero(codes >= 0)
            x[rows, at + codes[rows].astype(np.int64)] = 1
            unseen += int((codes < 0).sum())
            at += len(column.values)
    if plain:
        columns, places, fills = zip(*plain, strict=True)
        fill = np.array([0.0 if each is None else each for each in fills])
        values = raw[:, columns]
        x[:, places] = np.where(np.isnan(values), fill, values)
    return x, filled, unseen
