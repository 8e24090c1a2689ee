"""New rows of a table, encoded by the recipe of the training data.

    numbers                      as they are; a missing one becomes the recipe's fill
    texts                        1 at the feature of the text; 0 everywhere if it is missing or new
    rows with missing values     left out or refused, if the recipe says so

Several ranks may share one file: each parses the blocks that are its own.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from hpcdl.data.batch import RowBlock
from hpcdl.data.formats.recipe import Column, Recipe
from hpcdl.data.formats.recognition import ARROW
from hpcdl.data.formats.table_source import BLOCK_ROWS, Cells, ColumnCoders, CsvSource, Source, fixed_coder, name_coder
from hpcdl.data.hdf5 import SLAB_BYTES, FilePath
from hpcdl.errors import UsageError, blamed_on


def open_table(path: FilePath, delimiter: str | None = None) -> Source:
    """Open a table; the file's first bytes tell its format. delimiter: of a csv (None: a tab for .tsv, else a comma).

    UsageError for a file that cannot be read, or that needs pyarrow, which is missing.
    """
    with blamed_on(f"{path} cannot be read"), open(path, "rb") as file:
        start = file.read(8)
    if start.startswith(ARROW):
        from hpcdl.data.formats.table_arrow import ArrowSource  # here: pyarrow takes long to import

        return ArrowSource(path, start)
    if delimiter is None:
        delimiter = "\t" if str(path).lower().endswith((".tsv", ".tab")) else ","
    return CsvSource(path, delimiter)


class TableRows:
    """The rows of a table under a recipe. ids: True if it has the id column."""

    def __init__(self, path: FilePath, recipe: Recipe):
        """Raise UsageError for an unreadable file or a missing column; further columns are ignored."""
        self.recipe = recipe
        self.source = open_table(path, recipe.delimiter)
        if recipe.header:
            self.source.take_header()
        self.source.hint = "the model was trained on numbers in column {}"
        self.columns = [self._find(column) for column in recipe.columns]
        self.id = -1 if recipe.id is None else self.source.recipe_column(recipe.id, None, recipe.header)
        self.ids = self.id >= 0
        self.most = block_rows(len(recipe.features))

    def blocks(self) -> Iterator[Callable[[], RowBlock]]:
        """Yield a parser for each block of some thousand rows; a block that is not parsed costs next to nothing."""
        for _, cells in self.source.blocks(self.most):
            yield partial(self._rows, cells)

    def _find(self, column: Column) -> int:
        found = self.source.recipe_column(column.name, column.number, self.recipe.header)
        if found < 0:
            raise self.source.missing_column(
                column.name if self.recipe.header else str(column.number), self.recipe.header
            )
        return found

    def _rows(self, parse: Callable[[], Cells]) -> RowBlock:
        cells = parse()
        names: dict[str, int] = {}
        coders = recipe_coders(self.recipe, self.columns)
        if self.ids:
            coders[self.id] = name_coder(names)
        table = cells.read(coders)
        raw = table[:, : len(self.columns)]
        kept = kept_rows(cells, raw, self.recipe, self.columns)
        x, filled, unseen = encode(raw[kept], self.recipe)
        ids = None
        if self.ids:
            ids = list(np.array(list(names), object)[table[:, -1].astype(np.int64)][kept])
        return RowBlock(x, cells.first + np.flatnonzero(kept), None, ids, int((~kept).sum()), filled, unseen)


def block_rows(features: int) -> int:
    """Return the number of rows of a block."""
    return max(1, min(BLOCK_ROWS, SLAB_BYTES // (8 * features)))


def recipe_coders(recipe: Recipe, columns: list[int]) -> ColumnCoders:
    """Return the coders of these columns of a source under a recipe."""
    return {
        at: None if column.values is None else fixed_coder({value: code for code, value in enumerate(column.values)})
        for at, column in zip(columns, recipe.columns, strict=True)
    }


def kept_rows(cells: Cells, raw: np.ndarray, recipe: Recipe, columns: list[int]) -> np.ndarray:
    """Return True for each row to keep (rows,); UsageError for missing values that the recipe refuses."""
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
    """Encode rows (rows, columns) of numbers and codes: (x, number of values filled in, number of unknown texts).

    A code is the place of a text among the values of its column; -1: unknown; NaN: missing.
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
