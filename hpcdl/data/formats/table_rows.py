"""New rows of a table, encoded by the recipe of the training data.

numbers                      as they are; a missing one becomes the recipe's fill
texts                        1 at the feature of the text; 0 everywhere if it is missing or new
other rows                   zeros, and the reason: a text in the place of a number, an infinite number, or a missing
                             value where the training data have none, or none in the rows that were kept"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from hpcdl.data.batch import RowBlock
from hpcdl.data.formats.recipe import Column, Recipe
from hpcdl.data.formats.table_source import ABSENT, BLOCK_ROWS, Cells, ColumnCoders, Source, name_coder
from hpcdl.data.hdf5 import SLAB_BYTES, FilePath


class TableRows:
    """The rows of a table, encoded by a recipe; other columns are ignored. ids: True if the table has the id column."""

    def __init__(self, path: FilePath, recipe: Recipe):
        self.recipe = recipe
        self.source = Source(path, recipe.delimiter, recipe.decimal)
        if recipe.header:
            self.source.take_header()
        self.columns = [recipe_column(self.source, each, recipe.header) for each in recipe.columns]
        self.id = -1 if recipe.id is None else self.source.recipe_column(recipe.id, None, recipe.header, False)
        self.ids = self.id >= 0
        self.most = block_rows(len(recipe.features))

    def blocks(self) -> Iterator[Callable[[], RowBlock]]:
        """Yield a parser for each block of some thousand rows; a block that is not parsed costs next to nothing."""
        for _, cells in self.source.blocks(self.most):
            yield partial(self._rows, cells)

    def _rows(self, parse: Callable[[], Cells]) -> RowBlock:
        cells = parse()
        names: dict[str, int] = {}
        fixed = (column.coder(ABSENT) for column in self.recipe.columns)
        coders: ColumnCoders = dict(zip(self.columns, fixed, strict=True))
        if self.ids:
            coders[self.id] = name_coder(names)
        reasons: dict[int, str] = {}
        table = cells.read(coders, reasons)
        raw = table[:, : len(self.columns)]
        if self.recipe.missing in ("refuse", "drop"):
            for row, at in np.argwhere(np.isnan(raw)).tolist():
                reasons.setdefault(row, f"{self.source.column_label(self.columns[at])}: a value is missing")
        kept = np.ones(len(raw), bool)
        kept[list(reasons)] = False
        x = np.zeros((len(raw), len(self.recipe.features)))
        x[kept], filled, unseen = encode(raw[kept], self.recipe)
        ids = list(np.array(list(names), object)[table[:, -1].astype(np.int64)]) if self.ids else None
        why = [reasons.get(row, "") for row in range(len(raw))]
        return RowBlock(x, cells.first + np.arange(len(raw)), None, ids, why, filled, unseen)


def recipe_column(source: Source, column: Column, by_name: bool) -> int:
    """Return the number of a recipe's column in a table; a part of a time is derived. UsageError if it is missing."""
    found = source.recipe_column(column.name, column.number, by_name)
    return source.derive(found, column.time, column.part, column.first) if column.part else found


def block_rows(features: int) -> int:
    return max(1, min(BLOCK_ROWS, SLAB_BYTES // (8 * features)))


def known_codes(codes: np.ndarray, count: int) -> np.ndarray:
    """Return codes as whole numbers, `count` for texts that are missing or unknown."""
    return np.where(codes >= 0, codes, count).astype(np.int64)


def encode(raw: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, int, int]:
    """Encode rows of numbers and codes (-1: unknown, NaN: missing); return (x, count of missing, count of unknown)."""
    x = np.zeros((len(raw), len(recipe.features)))
    filled, unseen, at = int(np.isnan(raw).sum()), 0, 0
    plain: list[tuple[int, int, float]] = []
    for number, column in enumerate(recipe.columns):
        if column.values is None:
            plain.append((number, at, column.fill or 0.0))
            at += 1
        elif column.of:
            codes = raw[:, number]
            x[:, at : at + len(column.of)] = np.array(column.means)[known_codes(codes, len(column.values))]
            unseen += int((codes < 0).sum())
            at += len(column.of)
        else:
            codes = raw[:, number]
            rows = np.flatnonzero(codes >= 0)
            x[rows, at + codes[rows].astype(np.int64)] = 1
            unseen += int((codes < 0).sum())
            at += len(column.values)
    if plain:
        columns, places, fills = zip(*plain, strict=True)
        values = raw[:, columns]
        x[:, places] = np.where(np.isnan(values), fills, values)
    return x, filled, unseen
