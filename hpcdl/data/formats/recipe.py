"""A recipe: what was done with the columns of a table, so that it can be done again on new rows.

    column of numbers    one feature; what is missing becomes `fill`        age             -> "age"
    column of texts      one feature per text, 1 where the row has it       color           -> "color=blue", "color=red"

A data file that was made from a table keeps it as JSON in its attribute `table` (prepare_table.py); new rows go through
it in table_rows.py.
"""

import dataclasses
import math
from typing import Any

from hpcdl.data.format import TABLE, FilePath, Info, find_data_file, read_info, shown
from hpcdl.errors import UsageError

MISSING = ("refuse", "drop", "mean", "median")  # what can be done with values that are missing


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the source. number: from 0; values: the texts that it may hold, one-hot, None for numbers.

    fill: what a missing number becomes, None where there is no such number.
    """

    name: str
    number: int
    values: tuple[str, ...] | None = None
    fill: float | None = None

    @property
    def features(self) -> list[str]:
        """The names of its features."""
        return [self.name] if self.values is None else [f"{self.name}={value}" for value in self.values]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What was done with a table's columns. columns: those of the features, in the order of the features.

    label: names of the columns with labels; several for several values to predict, none where there were no labels.
    id: name of the column that says which row a row is. missing: one of MISSING. header, delimiter: how the source was
    read: with a header columns are found by name, in whatever order, else by number (which then is their name, too).
    like: the fills are those of another data file, which --like has named.
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
        """The names of the features, in order."""
        return [name for column in self.columns for name in column.features]

    def describe(self) -> dict:
        """The same as what JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, found: Any, where: str) -> "Recipe":
        """What `describe` gave, or JSON gave back. UsageError for anything else, which starts with `where`."""
        try:
            columns = tuple(_column(each) for each in _list(found["columns"]))
            recipe = cls(
                columns=columns,
                label=tuple(_text(each) for each in _list(found["label"])),
                id=None if found["id"] is None else _text(found["id"]),
                missing=_text(found["missing"]),
                header=found["header"],
                delimiter=_text(found["delimiter"]),
                like=found.get("like", False) is True,  # older versions did not say it
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
    """What was done with the table that a data file was made from; None where it was made from none, or says nothing.

    UsageError if its recipe is malformed, or for another number of features.
    """
    if info.schema.recipe is None:
        return None
    where = f"{info.path}: the attribute {TABLE}"
    recipe = Recipe.read(info.schema.recipe, where)
    if info.features != (len(recipe.features),):
        said = f"{len(recipe.features)} features, but the rows of the file have shape {info.features}"
        raise UsageError(f"{where} has {said}")
    return recipe


def recipe_of(name_or_path: FilePath) -> Recipe | None:
    """The same, of a known data set or a path; UsageError, too, if it is no data file."""
    return recipe_in(read_info(find_data_file(str(name_or_path))))


def _column(found: Any) -> Column:
    values, fill, number = found["values"], found["fill"], found["number"]
    if values is not None:
        values = tuple(_text(each) for each in _list(values))
        if len(set(values)) < len(values):
            raise ValueError("a column has a value twice")
    if fill is not None and (isinstance(fill, bool) or not math.isfinite(fill) or values is not None):
        raise ValueError("fill is no number, or not one of a column of numbers")
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError("the number of a column is none")
    return Column(_text(found["name"]), number, values, None if fill is None else float(fill))


def _list(found: Any) -> list | tuple:
    if not isinstance(found, (list, tuple)):
        raise TypeError("what should be a list is none")
    return found


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError("what should be a text is none")
    return found
