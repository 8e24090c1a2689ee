"""The cells of a table, block by block: csv and tsv here, Parquet and Arrow in table_arrow.py; the rest is one path.

A source has columns with names (of a header; else their numbers) and cuts its rows into blocks. A block that nobody
parses costs the reading of its lines: several ranks can go through one file, each parsing its own blocks. Of a column
one asks for

    numbers    float64, NaN where the value is missing: empty, NA, N/A, NaN, null, None or ?
    codes      what a coder makes of each text, NaN where it is missing

A block of a csv without quotes is read by numpy.loadtxt, where all that is asked to be numbers are; any other by the
csv module, at two thirds of that speed: quoted fields may hold delimiters and ends of lines.
"""

import csv
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np

from hpcdl.data.format import FilePath, short, shown
from hpcdl.errors import UsageError, blamed_on

Coder: TypeAlias = Callable[[str], float]  # the code of a text, NaN of one that is missing
Wanted: TypeAlias = dict[int, Coder | None]  # columns by number: how to code their texts, None for numbers
LINES = 8192  # rows of a block, at most
CHARACTERS = 2 << 20  # of a block of csv, about; as fields they take some ten times as many bytes
ABSENT = frozenset(("", "NA", "N/A", "n/a", "NaN", "nan", "NAN", "null", "NULL", "None", "?"))
DAY = r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))"
TIME = r"\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?( ?[AaPp][Mm])?"
LOOKS = {  # what texts look like that are neither numbers nor names of something
    "a date or a time": re.compile(rf"{DAY}([T ]+{TIME}( ?(Z|UTC|[-+]\d\d:?\d\d))?)?|{TIME}", re.ASCII),
    "a number with thousands separators": re.compile(
        r"[-+]?\d{1,3}((,\d{3})+(\.\d*)?|(\.\d{3}){2,}(,\d*)?|(['’_  ]\d{3})+([.,]\d*)?|(\.\d{3})+,\d*)", re.ASCII
    ),
    "a number with a decimal comma": re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?", re.ASCII),
}


class Cells:
    """The parsed rows of a block. first: the number of its first row; how a message says where: `where(row)`."""

    first: int
    count: int

    def __init__(self, source: "Source"):
        self.source = source

    def where(self, row: int) -> str:
        """How a message calls the row of this number in the block."""
        raise NotImplementedError

    def texts(self, column: int) -> list[str]:
        """The texts of a column, without blanks around."""
        raise NotImplementedError

    def read(self, wanted: Wanted) -> np.ndarray:
        """What is wanted of columns, (rows, columns) in this order; UsageError for a text that should be a number."""
        table = np.empty((self.count, len(wanted)))
        for at, (column, coder) in enumerate(wanted.items()):
            table[:, at] = self.numbers(column) if coder is None else list(map(coder, self.texts(column)))
        return self.finite(table, wanted)

    def numbers(self, column: int) -> np.ndarray:
        """A column of numbers, NaN where one is missing."""
        return self.parsed(column, self.texts(column))

    def parsed(self, column: int, texts: list[str]) -> np.ndarray:
        """These texts of a column as numbers."""
        together = "".join(texts)
        if together.isascii() and "_" not in together:  # of what Python takes for numbers people write these only
            try:
                return np.array(list(map(float, texts)))
            except ValueError:
                pass
        found = np.full(len(texts), math.nan)
        for row, text in enumerate(texts):
            if text not in ABSENT:
                if not is_number(text):
                    raise self.source.no_number(self.where(row), column, text)
                found[row] = float(text)
        return found

    def finite(self, table: np.ndarray, wanted: Wanted) -> np.ndarray:
        """The table, if no number in it is infinite."""
        if (infinite := np.isinf(table)).any():
            row, at = map(int, np.argwhere(infinite)[0])
            where = self.source.cell(self.where(row), list(wanted)[at])
            raise UsageError(f"{where}: {table[row, at]:g} is infinite; correct it, or leave the row out")
        return table


class Source:
    """A table as it lies in a file. names, width: of its columns; header: whether the names are its own."""

    names: list[str]
    header: bool
    delimiter = ","
    said = ("column", "its columns are")
    hint = "correct it"  # what a message tells to do where a text is among numbers; {} is the column

    def __init__(self, path: FilePath):
        self.path = str(path)

    @property
    def width(self) -> int:
        """The number of columns."""
        return len(self.names)

    def kind(self, column: int) -> str | None:
        """What a column says that it holds: "number", "text", "time" or, as in a csv, nothing (None)."""
        return None

    def blocks(self, most: int = LINES) -> Iterator[tuple[int, Callable[[], Cells]]]:
        """Pairs: the number of the first row, and a call that parses the block, of `most` rows at most."""
        raise NotImplementedError

    def called(self, column: int) -> str:
        """How a message calls a column."""
        return f"column {shown(self.names[column]) if self.header else column}"

    def cell(self, where: str, column: int) -> str:
        """How a message calls a cell."""
        return f"{self.path}: {where}, {self.called(column)}"

    def no_number(self, where: str, column: int, text: str) -> UsageError:
        """The error for a text that should be a number."""
        looks = like(text)
        more = f"; it looks like {looks}" if looks else ""
        hint = self.hint.replace("{}", short(self.names[column]))
        return UsageError(f"{self.cell(where, column)}: {shown(text)} is not a number{more}; {hint}")

    def find(self, text: str, what: str) -> list[int]:
        """The columns that a text means: a name, else a number from 0, negative from the end.

        UsageError for none, and where one column has the text as its name and another as its number.
        """
        named = [column for column, name in enumerate(self.names) if name == text] if self.header else []
        if is_index(text):
            number = int(text) % self.width
            if named and -self.width <= int(text) < self.width and number not in named:
                by_name, by_number = named[0] - self.width, number - self.width
                raise UsageError(
                    f"{self.path}: {what} {text} is the name of a column and the number of {self.called(number)}; "
                    f"count from the end: {by_name} for the one of this name, {by_number} for the other"
                )
            if named:
                return named
            if not -self.width <= int(text) < self.width:
                raise UsageError(f"{self.path} has {self.width} columns; there is no {what} column {short(text)}")
            return [number]
        if not named:
            what, said = self.said
            raise UsageError(f"{self.path} has no {what} {shown(text)}; {said}: {short(', '.join(self.first), 400)}")
        return named

    @cached_property
    def first(self) -> list[str]:
        """The fields of the first line."""
        return self.names

    def take_header(self) -> None:
        """The first line holds names, where the file does not say."""

    def known(self, name: str, number: int | None, by_name: bool) -> int:
        """The one column that a recipe means by name, or where its table had no header by number; -1: it is not there.

        UsageError where several have the name.
        """
        if not by_name:
            place = number if number is not None else int(name) if is_index(name) else -1
            return place if place < self.width else -1
        found = [column for column, each in enumerate(self.names) if each == name]
        if len(found) > 1:
            raise UsageError(f"{self.path} has {len(found)} columns {shown(name)}; each needs a name of its own")
        return found[0] if found else -1

    def lacks(self, name: str, by_name: bool) -> UsageError:
        """The error for a column that a recipe has and this table has not."""
        if by_name:
            what = f"no column {shown(name)}, which the training data had; its columns are"
            one = f" (--delimiter is {self.delimiter!r})" if self.width == 1 else ""
            return UsageError(f"{self.path} has {what}: {short(', '.join(self.names), 400)}{one}")
        said = f"{self.width} columns and no column {short(name)}"
        return UsageError(f"{self.path} has {said}: without a header they go by number, those of labels counted")


class CsvCells(Cells):
    """Rows of a csv: one text each, in which quotes may hold ends of lines."""

    source: "CsvSource"

    def __init__(self, source: "CsvSource", first: int, numbers: Sequence[int], records: list[str], quoted: bool):
        super().__init__(source)
        self.first, self.count = first, len(records)
        self.lines, self.records, self.quoted = numbers, records, quoted

    def where(self, row: int) -> str:
        """The line in which the row begins, from 1."""
        return f"line {self.lines[row]}"

    @cached_property
    def columns(self) -> list[tuple[str, ...]]:
        """All fields."""
        return list(zip(*map(self.fields, range(self.count)), strict=True))

    def fields(self, row: int) -> list[str]:
        """The fields of a row; UsageError if there are more or fewer than in the first."""
        fields, width = self.source.fields(self.records[row], self.where(row)), self.source.width
        if len(fields) != width:
            said = f"has {len(fields)} columns, the first line {width}"
            raise UsageError(f"{self.source.path}: {self.where(row)} {said}")
        return fields

    def texts(self, column: int) -> list[str]:
        """The texts of a column, without blanks around."""
        return [text.strip() for text in self.columns[column]]

    def read(self, wanted: Wanted) -> np.ndarray:
        """As numpy reads it, at once, if it can."""
        source, between = self.source, self.source.delimiter
        counts = map(str.count, self.records, itertools.repeat(between))
        if source.plain and not self.quoted and all(count == source.width - 1 for count in counts):
            coders: Any = {column: coder for column, coder in wanted.items() if coder is not None}
            how: dict[str, Any] = {"delimiter": between, "comments": None, "encoding": None, "ndmin": 2}
            try:
                table = np.loadtxt(self.records, usecols=list(wanted), converters=coders or None, **how)
                return self.finite(table, wanted)
            except ValueError:  # a value is missing, most likely, and not the only one
                source.plain = False
        return super().read(wanted)


class CsvSource(Source):
    """A csv, in UTF-8. plain: no value was missing so far."""

    said = ("header with a column", "its first line is")

    def __init__(self, path: FilePath, delimiter: str):
        super().__init__(path)
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise UsageError(f"the delimiter must be one character, neither a quote nor an end of line: {delimiter!r}")
        self.delimiter, self.plain = delimiter, True
        self._blanks = " \t\r\n\f\v" if not delimiter.isspace() else "\r\n"
        self._peeked = list(itertools.islice(self._records(), 2))
        self.names, self.header = [str(number) for number in range(len(self.first))], False

    @cached_property
    def first(self) -> list[str]:
        """The fields of the first line."""
        return self._peek(0)

    @cached_property
    def second(self) -> list[str]:
        """Those of the line after it."""
        return self._peek(1)

    def _peek(self, which: int) -> list[str]:
        if which >= len(self._peeked):
            return []
        number, record = self._peeked[which]
        return [text.strip() for text in self.fields(record, f"line {number}")]

    def take_header(self) -> None:
        """The first line holds names; a column without one is called by its number."""
        self.header = True
        self.names = [name or str(number) for number, name in enumerate(self.first)]

    def fields(self, record: str, where: str) -> list[str]:
        """The fields of a row."""
        try:
            return next(csv.reader([record], delimiter=self.delimiter), [])
        except csv.Error as error:
            raise UsageError(f"{self.path}: {where}: {error}") from None

    def blocks(self, most: int = LINES) -> Iterator[tuple[int, Callable[[], Cells]]]:
        """Blocks of lines."""
        row = -1 if self.header else 0
        for numbers, records, quoted in self._slabs():
            if row < 0 and records:
                row, numbers, records = 0, numbers[1:], records[1:]
            for start in range(0, len(records), most):
                part = slice(start, start + most)
                yield row, partial(CsvCells, self, row, numbers[part], records[part], quoted)
                row += len(records[part])

    def _records(self) -> Iterator[tuple[int, str]]:
        for numbers, records, _ in self._slabs(1):
            yield from zip(numbers, records, strict=True)

    def _slabs(self, characters: int | None = None) -> Iterator[tuple[Sequence[int], list[str], bool]]:
        """Rows of some text: numbers of their lines from 1, the texts, and whether there is a quote in them."""
        with blamed_on(f"{self.path} cannot be read"):
            try:
                with open(self.path, encoding="utf-8-sig", newline="") as file:
                    number = 1
                    while lines := file.readlines(characters or CHARACTERS):
                        quoted = any('"' in line for line in lines)
                        numbers: Sequence[int] = range(number, number + len(lines))
                        if quoted:
                            numbers, lines, number = self._joined(lines, file, number)
                        else:
                            number += len(lines)
                        if not all(map(self._some, lines)):
                            kept = [(each, line) for each, line in zip(numbers, lines, strict=True) if self._some(line)]
                            numbers, lines = [each for each, _ in kept], [line for _, line in kept]
                        yield numbers, lines, quoted
            except UnicodeDecodeError:
                raise UsageError(f"{self.path} is not a text file in UTF-8") from None

    def _some(self, line: str) -> str:
        return line.strip(self._blanks)

    def _joined(self, lines: list[str], file: Iterator[str], number: int) -> tuple[list[int], list[str], int]:
        """Rows of lines: where a quote is open at the end of one, the next belongs to it."""
        feed, numbers, records = iter(lines), [], []
        for line in feed:
            record = self._closed(line, itertools.chain(feed, file), number) if '"' in line else [line]
            numbers.append(number)
            records.append("".join(record))
            number += len(record)
        return numbers, records, number

    def _closed(self, line: str, more: Iterator[str], number: int) -> list[str]:
        """The lines of a row; UsageError where a quote is not closed."""
        record = [line]

        def feed() -> Iterator[str]:  # csv asks for one more line as long as a quote is open
            yield line
            for each in more:
                record.append(each)
                yield each
            raise csv.Error("the file ends")

        try:
            next(csv.reader(feed(), delimiter=self.delimiter), None)
        except csv.Error as error:
            raise UsageError(f"{self.path}: line {number}: a quote is open there and not closed: {error}") from None
        return record


def growing(codes: dict[str, int]) -> Coder:
    """A coder that numbers texts as they come."""
    return lambda text: math.nan if (text := text.strip()) in ABSENT else codes.setdefault(text, len(codes))


def naming(codes: dict[str, int]) -> Coder:
    """The same for names, of which none is missing."""
    return lambda text: codes.setdefault(text.strip(), len(codes))


def knowing(codes: dict[str, int]) -> Coder:
    """A coder for known texts; another one is -1."""
    return lambda text: math.nan if (text := text.strip()) in ABSENT else codes.get(text, -1)


def is_index(text: str) -> bool:
    """Whether a text that names a column is its number."""
    return text.removeprefix("-").isdecimal() and text.isascii()


def is_number(text: str) -> bool:
    """Whether a text is a number, as people write them: 1_0 is none."""
    if "_" in text or not text.isascii():
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


def like(text: str) -> str | None:
    """What a text looks like that needs a word, if anything."""
    return next((what for what, written in LOOKS.items() if written.fullmatch(text)), None)


def open_table(path: FilePath, delimiter: str | None = None) -> Source:
    """A table of whatever kind, by what the file holds. delimiter: of a csv (None: a tab for .tsv, else a comma).

    UsageError for a file that cannot be read, and for one that needs pyarrow where it is missing.
    """
    with blamed_on(f"{path} cannot be read"), open(path, "rb") as file:
        start = file.read(8)
    if start.startswith((b"PAR1", b"PARE", b"ARROW1", b"FEA1", b"\xff\xff\xff\xff")):
        from hpcdl.data.formats.table_arrow import ArrowSource

        return ArrowSource(path, start)
    if delimiter is None:
        delimiter = "\t" if str(path).lower().endswith((".tsv", ".tab")) else ","
    return CsvSource(path, delimiter)
