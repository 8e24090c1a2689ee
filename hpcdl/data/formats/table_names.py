"""Column names of a table: as its options give them, and in its first line."""

import csv

from hpcdl.data.formats.table_source import ABSENT, CsvSource, Source, is_index, is_number
from hpcdl.data.hdf5 import shown
from hpcdl.errors import UsageError


def has_header(source: CsvSource, named: dict[str, str], header: bool | None) -> bool:
    """True if the first line holds names: by the option, by a name in other options, or by the line itself.

    A line whose features are all numbers is no header; one without numbers is a header. A mixed one is a header if the
    next line has numbers in place of names; UsageError if it has not.
    """
    if header is not None:
        return header
    named_columns = [part for text in named.values() for part in _parts(text)]
    width = source.width
    if not all(is_index(part) and (-width <= int(part) < width or part not in source.first) for part in named_columns):
        return True
    special = [what for what in ("label", "group", "id") if what in named]
    others = {column for what in special for column in columns_of(source, named[what], what)}
    features = [column for column in range(source.width) if column not in others]
    names = [column for column in features if not is_number(source.first[column])]
    names = [column for column in names if source.first[column] not in ABSENT or not source.first[column]]
    if not names or len(names) == len(features) or len(source.second) < source.width:
        return bool(names)
    if all(not source.first[column] for column in names):
        return False
    if any(is_number(source.second[column]) for column in names):
        return True
    raise UsageError(f"{source.path}: does the first line hold names? some of it are numbers: --header or --no-header")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in next(csv.reader([text.replace("\n", " ").replace("\r", " ")]), [])]


def columns_of(source: Source, text: str, what: str) -> list[int]:
    """Return the columns that an option gives, separated by commas."""
    if source.header and text in source.names:
        return source.find(text, what)
    try:
        return [column for part in _parts(text) or [""] for column in source.find(part, what)]
    except csv.Error:
        raise UsageError(f"the names of columns cannot be read: {shown(text)}") from None


def column_of(source: Source, text: str, what: str) -> int:
    """Return the one column that an option gives; UsageError for several."""
    columns = columns_of(source, text, what)
    if len(columns) > 1:
        raise UsageError(f"{source.path}: there is one {what}, not several as in {shown(text)}")
    return columns[0]


def check_names(source: Source, used: list[int], features: list[int]) -> None:
    """Raise UsageError for a used column with an ambiguous name, or a feature without a name."""
    if not source.header:
        return
    for column in used:
        name = source.names[column]
        if (count := source.names.count(name)) > 1:
            todo = "give each a name of its own, or leave them out by --drop"
            raise UsageError(f"{source.path} has {count} columns {shown(name)}; {todo}")
    for column in features:
        if not source.first[column]:
            raise UsageError(
                f"{source.path}: column {column} has no name in the header; if it numbers the rows, --drop {column} or "
                f"--id {column}; else give it a name"
            )
