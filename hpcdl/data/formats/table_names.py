"""How the options of a table name its columns, and whether its first line holds names."""

import csv

from hpcdl.data.format import shown
from hpcdl.data.formats.table_source import ABSENT, CsvSource, Source, is_index, is_number
from hpcdl.errors import UsageError


def has_header(source: CsvSource, named: dict[str, str], header: bool | None) -> bool:
    """Whether the first line holds names: as one is told, as a name is used, or as the line looks.

    A line in which features are numbers is no header, one in which none is, is one. One in which some are is a header
    where the next line has numbers in the place of names; UsageError where it has not.
    """
    if header is not None:
        return header
    asked = [part for text in named.values() for part in _parts(text)]
    width = source.width
    if not all(is_index(part) and (-width <= int(part) < width or part not in source.first) for part in asked):
        return True
    apart = [what for what in ("label", "group", "id") if what in named]
    others = {column for what in apart for column in columns_of(source, named[what], what)}
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
    """The columns that an option names: one, or several with commas between."""
    if source.header and text in source.names:
        return source.find(text, what)
    try:
        return [column for part in _parts(text) or [""] for column in source.find(part, what)]
    except csv.Error:
        raise UsageError(f"the names of columns cannot be read: {shown(text)}") from None


def column_of(source: Source, text: str, what: str) -> int:
    """The one column that an option names."""
    found = columns_of(source, text, what)
    if len(found) > 1:
        raise UsageError(f"{source.path}: there is one {what}, not several as in {shown(text)}")
    return found[0]


def check_names(source: Source, used: list[int], features: list[int]) -> None:
    """UsageError where a column is used whose name says nothing: it is there twice, or a feature has none."""
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
