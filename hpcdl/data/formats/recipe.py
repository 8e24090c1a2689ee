"""A recipe: the encoding of a table's columns as features, which can be applied to new rows (table_rows.py).

    column of numbers    one feature; a missing value becomes `fill`        age             -> "age"
    column of texts      one feature per text, 1 where the row has it       color           -> "color=blue", "color=red"
    the same, hashed     one feature per bucket, crc32(text) mod buckets    airport         -> "airport=#0", ...
    the same, as means   the mean label of its text (target_encoding.py)    airport         -> "airport:mean(delay)"
    column of times      one number column for each part                    day             -> "day.year", "day.weekday"

A data file made from a table stores its recipe as JSON in the attribute `table` (prepare_table.py)."""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any

from hpcdl.data.format import TABLE, Info, find_data_file, read_info
from hpcdl.data.hdf5 import FilePath, shown
from hpcdl.errors import UsageError

PARTS = ("year", "month", "weekday", "sine", "cosine", "hour", "days")  # of a time: see Source.derive
MISSING = ("refuse", "drop", "mean", "median")  # treatments of missing values


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table. number: from 0. values: its texts; None: numbers. fill: for missing numbers, or None.
    hashed: `values` are names of buckets (Weinberger et al., "Feature hashing for large scale multitask learning",
    2009, without signs). part: the number that a time gives, one of PARTS; "": it is no time. time: format of its
    texts, as of strptime; "": the source has times. first: seconds since 1970 from which "days" count. of: names of the
    targets whose means the texts become; means: these by text, and for other texts."""

    name: str
    number: int
    values: tuple[str, ...] | None = None
    fill: float | None = None
    hashed: bool = False
    part: str = ""
    time: str = ""
    first: float = 0.0
    of: tuple[str, ...] = ()
    means: tuple[tuple[float, ...], ...] = ()

    @property
    def features(self) -> list[str]:
        """Names of the column's features."""
        if self.of:
            return [f"{self.name}:mean({each})" for each in self.of]
        if self.values is None:
            return [f"{self.name}.{self.part}" if self.part else self.name]
        return [f"{self.name}={value}" for value in self.values]

    def coder(self, absent: frozenset[str]) -> Callable[[str], float] | None:
        """Return the number of each text's feature: -1 for a new text, NaN for one of `absent`; None: no texts."""
        if self.values is None:
            return None
        if self.hashed:
            buckets = len(self.values)
            return lambda text: math.nan if (text := text.strip()) in absent else zlib.crc32(text.encode()) % buckets
        codes = {value: code for code, value in enumerate(self.values)}
        return lambda text: math.nan if (text := text.strip()) in absent else codes.get(text, -1)


LATER = {field.name: field.default for field in dataclasses.fields(Column)[4:]}  # of hashed texts, times and means


def buckets(name: str, number: int, count: int) -> Column:
    """Return a column whose texts go to so many buckets."""
    return Column(name, number, tuple(f"#{bucket}" for bucket in range(count)), hashed=True)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The encoding of a table. Columns are found by name, or without a header by number (which is then their name)."""

    columns: tuple[Column, ...]  # in the order of their features
    label: tuple[str, ...] = ()  # names of the label columns: several for several targets, none without labels
    id: str | None = None  # name of the column with the rows' names
    missing: str = "refuse"  # one of MISSING
    header: bool = True  # of the source
    delimiter: str = ","
    decimal: str = "."  # before the decimals of numbers
    like: bool = False  # the fills come from the data file of --like

    @property
    def features(self) -> list[str]:
        """Names of the features, in order."""
        return [name for column in self.columns for name in column.features]

    @property
    def indicators(self) -> list[bool]:
        """For each feature, True if it says by 1 or 0 whether a row has a text; such features are not standardized."""
        return [each.values is not None and not each.of for each in self.columns for _ in each.features]

    def describe(self) -> dict:
        """Return the recipe as a JSON object. A plain column has the members of older versions alone: the columns of
        two recipes are compared as they were written."""
        columns = [
            {name: value for name, value in dataclasses.asdict(each).items() if LATER.get(name, ...) != value}
            for each in self.columns
        ]
        return dataclasses.asdict(self) | {"columns": columns}

    @classmethod
    def read(cls, value: Any, where: str) -> "Recipe":
        """Return the recipe that `describe` gave; UsageError, which begins with `where`, for other values."""
        try:
            columns = tuple(_column(each) for each in _typed(value["columns"], list, "columns"))
            label = tuple(_typed(each, str, "a label column") for each in _typed(value["label"], list, "label"))
            id = None if value["id"] is None else _typed(value["id"], str, "id")
            missing, delimiter = (_typed(value[name], str, name) for name in ("missing", "delimiter"))
            like = value.get("like", False) is True  # older versions did not say it
            decimal = _typed(value.get("decimal", "."), str, "decimal")
            recipe = cls(columns, label, id, missing, value["header"], delimiter, decimal, like)
            names = [column.name for column in columns]
            named = {(column.name, column.part) for column in columns}
            numbered = {(column.number, column.part) for column in columns}
            if len(named) < len(names) or len(numbered) < len(names):
                raise ValueError("two columns have the same name or number")
            if (
                recipe.missing not in MISSING
                or not isinstance(recipe.header, bool)
                or len(recipe.delimiter) != 1
                or decimal not in (".", ",")
            ):
                raise ValueError("'missing', 'header', 'delimiter' or 'decimal' has an impossible value")
            if recipe.id in names:
                raise ValueError("the id column is a feature, too")
            if recipe.missing in ("mean", "median") and any(each.values is each.fill is None for each in columns):
                raise ValueError(f"a column of numbers has no fill (its {recipe.missing})")
            if not recipe.features:
                raise ValueError("it has no features")
        except KeyError as error:
            raise UsageError(f"{where} is no recipe of a table: {error.args[0]} is missing") from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(f"{where} is no recipe of a table: {shown(str(error), 200)}") from None
        return recipe


def read_recipe(value: Any, shape: tuple[int, ...], where: str) -> Recipe:
    """Return the recipe that `describe` gave; UsageError if malformed, or not of features of this shape."""
    recipe = Recipe.read(value, where)
    if shape != (len(recipe.features),):
        problem = f"a recipe of {len(recipe.features)} features, but the rows of the file have shape {shape}"
        raise UsageError(f"{where} is {problem}")
    return recipe


def recipe_in(info: Info) -> Recipe | None:
    """Return the recipe of a data file, None without one; UsageError as of `read_recipe`."""
    recipe = info.schema.recipe
    return None if recipe is None else read_recipe(recipe, info.features, f"{info.path}: the attribute {TABLE}")


def recipe_of(name_or_path: FilePath) -> Recipe | None:
    """Return `recipe_in` of a known data set or a path; UsageError also if it is no data file."""
    return recipe_in(read_info(find_data_file(str(name_or_path))))


def _column(value: Any) -> Column:
    values, fill, number = value["values"], value["fill"], value["number"]
    if values is not None:
        values = tuple(_typed(each, str, "a value of a column") for each in _typed(values, list, "values"))
        if len(set(values)) < len(values):
            raise ValueError("a column has the same text twice")
    if fill is not None and (isinstance(fill, bool) or not math.isfinite(fill) or values is not None):
        raise ValueError("a fill is no number, or belongs to a column of texts")
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError("the number of a column is no whole number of 0 or more")
    part, time = (_typed(value.get(name, ""), str, name) for name in ("part", "time"))
    first = value.get("first", 0.0)
    if part and (part not in PARTS or values is not None):
        raise ValueError(f"a column has the part {part} of a time")
    if isinstance(first, bool) or not math.isfinite(first):
        raise ValueError("the first time of a column is no number")
    of = tuple(_typed(each, str, "a target") for each in _typed(value.get("of", []), list, "of"))
    means = tuple(tuple(map(float, each)) for each in _typed(value.get("means", []), list, "means"))
    if of and (values is None or {len(each) for each in means} != {len(of)} or len(means) != len(values) + 1):
        raise ValueError("a column does not have a mean of each target for each of its texts")
    if not all(map(math.isfinite, itertools.chain(*means))):
        raise ValueError("the mean of a target is no number")
    name, fill = _typed(value["name"], str, "a column's name"), None if fill is None else float(fill)
    hashed = value.get("hashed", False) is True
    return Column(name, number, values, fill, hashed, part, time, float(first), of, means)


def _typed(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, (list, tuple) if kind is list else kind):
        raise TypeError(f"{what} is no {'list' if kind is list else 'text'}")
    return value
