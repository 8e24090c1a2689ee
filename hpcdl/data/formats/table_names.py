"""Names of a table's columns, as options give them and as the first line holds them."""

import csv

from hpcdl.data.formats.table_source import ABSENT, Source, is_index, is_number
from hpcdl.data.hdf5 import shown
from hpcdl.errors import UsageError


def has_header(source: Source, named: dict[str, str], header: bool | None) -> bool:
    """True if the first line holds names. The option `header` decides, else a name in other options, else the line.
    A line whose features are all numbers is no header; one without numbers is a header. A mixed line is a header if the
    next line has numbers in place of names; otherwise UsageError."""
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
    todo = "pass --header if these are names, else --no-header"
    raise UsageError(f"{source.path}: the first line holds numbers and texts; {todo}")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in next(csv.reader([text.replace("\n", " ").replace("\r", " ")]), [])]


def columns_of(source: Source, text: str, what: str) -> list[int]:
    """Return the numbers of the columns in `text`: names or numbers, separated by commas. what: the option."""
    if source.header and text in source.names:
        return source.find(text, what)
    try:
        return [column for part in _parts(text) or [""] for column in source.find(part, what)]
    except csv.Error:
        raise UsageError(f"the names of columns cannot be read: {shown(text)}") from None


def column_of(source: Source, text: str, what: str) -> int:
    """Return the number of the one column in `text`; UsageError for several. what: the option."""
    columns = columns_of(source, text, what)
    if len(columns) > 1:
        raise UsageError(f"{source.path}: --{what} takes one column, not several as in {shown(text)}")
    return columns[0]


def check_names(source: Source, used: list[int], features: list[int]) -> None:
    """Raise UsageError for a used column with an ambiguous name, or a feature without a name."""
    if not source.header:
        return
    for column in used:
        name = source.names[column]
        if (count := source.names.count(name)) > 1:
            todo = "give them different names, or leave them out by --drop"
            raise UsageError(f"{source.path} has {count} columns named {shown(name)}; {todo}")
    for column in features:
        if not source.first[column]:
            todo = f"if it numbers the rows, add --drop {column} or --id {column}; else give it a name"
            raise UsageError(f"{source.path}: column {column} has no name in the header; {todo}")
