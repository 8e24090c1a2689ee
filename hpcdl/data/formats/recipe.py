"""A recipe: the encoding of a table's columns as features, which can be applied to new rows.

    column of numbers    one feature; a missing value becomes `fill`        age             -> "age"
    column of texts      one feature per text, 1 where the row has it       color           -> "color=blue", "color=red"

A data file made from a table stores its recipe as JSON in the attribute `table` (prepare_table.py); table_rows.py
encodes new rows by it.
"""

import dataclasses
import math
from typing import Any

from hpcdl.data.format import TABLE, Info, find_data_file, read_info
from hpcdl.data.hdf5 import FilePath, shown
from hpcdl.errors import UsageError

MISSING = ("refuse", "drop", "mean", "median")  # treatments of missing values


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the source. number: from 0; values: its texts, one-hot, None for numbers.

    fill: the value of missing numbers; None if none is missing.
    """

    name: str
    number: int
    values: tuple[str, ...] | None = None
    fill: float | None = None

    @property
    def features(self) -> list[str]:
        """Names of the column's features."""
        return [self.name] if self.values is None else [f"{self.name}={value}" for value in self.values]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The encoding of a table. columns: those of the features, in the order of the features.

    label: names of the label columns: several for several targets, none without labels. id: name of the column with the
    rows' names. missing: one of MISSING. header, delimiter: of the source; with a header columns are found by name, in
    any order, else by number (which then is their name, too). like: the fills come from the data file of --like.
    """

    columns: tuple[Column, ...]
    label: tuple[str, ...] = ()
    id: str | None = None
    missing: str = "refuse"
    header: bool = True
    delimiter: str = ","
    like: bool = False

    @property
    def features(self) -> list[str]:
        """Names of the features, in order."""
        return [name for column in self.columns for name in column.features]

    def describe(self) -> dict:
        """Return the recipe as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, value: Any, where: str) -> "Recipe":
        """Return the recipe that `describe` gave; UsageError, which begins with `where`, for other values."""
        try:
            columns = tuple(_column(each) for each in _list(value["columns"]))
            recipe = cls(
                columns=columns,
                label=tuple(_text(each) for each in _list(value["label"])),
                id=None if value["id"] is None else _text(value["id"]),
                missing=_text(value["missing"]),
                header=value["header"],
                delimiter=_text(value["delimiter"]),
                like=value.get("like", False) is True,  # older versions did not say it
            )
            names = [column.name for column in columns]
            numbers = [column.number for column in columns]
            if len(set(names)) < len(names) or len(set(numbers)) < len(numbers):
                raise ValueError("a column is there twice")
            if recipe.missing not in MISSING or not isinstance(recipe.header, bool) or len(recipe.delimiter) != 1:
                raise ValueError("missing, header or delimiter is not what it can be")
            if recipe.id in names:
                raise ValueError("the column that says which row a row is, is a feature, too")
            if recipe.missing in ("mean", "median") and any(each.values is each.fill is None for each in columns):
                raise ValueError(f"a column of numbers has no {recipe.missing}")
            if not recipe.features:
                raise ValueError("it has no features")
        except KeyError as error:
            raise UsageError(f"{where} is no recipe of a table: {error.args[0]} is not there") from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(f"{where} is no recipe of a table: {shown(str(error), 200)}") from None
        return recipe


def recipe_in(info: Info) -> Recipe | None:
    """Return the recipe of a data file; None if it has none.

    UsageError if the recipe is malformed, or has another number of features.
    """
    if info.schema.recipe is None:
        return None
    where = f"{info.path}: the attribute {TABLE}"
    recipe = Recipe.read(info.schema.recipe, where)
    if info.features != (len(recipe.features),):
        problem = f"{len(recipe.features)} features, but the rows of the file have shape {info.features}"
        raise UsageError(f"{where} has {problem}")
    return recipe


def recipe_of(name_or_path: FilePath) -> Recipe | None:
    """Return the recipe of a known data set or a path, like `recipe_in`; UsageError, too, if it is no data file."""
    return recipe_in(read_info(find_data_file(str(name_or_path))))


def _column(value: Any) -> Column:
    values, fill, number = value["values"], value["fill"], value["number"]
    if values is not None:
        values = tuple(_text(each) for each in _list(values))
        if len(set(values)) < len(values):
            raise ValueError("a column has a value twice")
    if fill is not None and (isinstance(fill, bool) or not math.isfinite(fill) or values is not None):
        raise ValueError("fill is no number, or not one of a column of numbers")
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError("the number of a column is none")
    return Column(_text(value["name"]), number, values, None if fill is None else float(fill))


def _list(value: Any) -> list | tuple:
    if not isinstance(value, (list, tuple)):
        raise TypeError("what should be a list is none")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("what should be a text is none")
    return value
