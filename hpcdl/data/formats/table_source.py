"""Table sources, read block by block: csv and tsv here, Parquet and Arrow in table_arrow.py.

A source has named columns (by its header, else by number) and cuts its rows into blocks. Several ranks can share one
file: each parses its own blocks, and of other ranks' blocks it reads only the lines. A column is read as

    numbers    float64, NaN for a missing value: empty, NA, N/A, NaN, nan, NAN, null, NULL, n/a, None or ?
    codes      the coder's number for each text, NaN for a missing one

numpy.loadtxt reads csv blocks without quotes or missing numbers. The csv module reads others, at 2/3 of the speed."""

import csv
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np

from hpcdl.data.hdf5 import FilePath, short, shown
from hpcdl.errors import UsageError, blamed_on

Coder: TypeAlias = Callable[[str], float]  # text -> code, NaN for a missing text
ColumnCoders: TypeAlias = dict[int, Coder | None]  # by column number; None for a column of numbers
BLOCK_ROWS = 8192  # rows of a block, at most
BLOCK_CHARACTERS = 2 << 20  # of a block of csv, about; as Python fields they take ten times as many bytes
ABSENT = frozenset(("", "NA", "N/A", "n/a", "NaN", "nan", "NAN", "null", "NULL", "None", "?"))
DAY = r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))"
TIME = r"\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?( ?[AaPp][Mm])?"
SPECIAL_FORMATS = {  # of texts that are neither numbers nor category names
    "a date or a time": re.compile(rf"{DAY}([T ]+{TIME}( ?(Z|UTC|[-+]\d\d:?\d\d))?)?|{TIME}", re.ASCII),
    "a number with thousands separators": re.compile(
        r"[-+]?\d{1,3}((,\d{3})+(\.\d*)?|(\.\d{3}){2,}(,\d*)?|(['’_  ]\d{3})+([.,]\d*)?|(\.\d{3})+,\d*)", re.ASCII
    ),
    "a number with a decimal comma": re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?", re.ASCII),
}


class Cells:
    """The parsed rows of a block. first: the number of its first row."""

    first: int
    count: int

    def __init__(self, source: "Source"):
        self.source = source

    def where(self, row: int) -> str:
        """Return what messages call row `row` of the block, as "line 7"."""
        raise NotImplementedError

    def texts(self, column: int) -> list[str]:
        """Return the texts of a column, without surrounding blanks."""
        raise NotImplementedError

    def read(self, coders: ColumnCoders) -> np.ndarray:
        """Return the columns of `coders` in order, (rows, columns); UsageError for a text that should be a number."""
        table = np.empty((self.count, len(coders)))
        for at, (column, coder) in enumerate(coders.items()):
            table[:, at] = self.numbers(column) if coder is None else list(map(coder, self.texts(column)))
        return self.check_finite(table, coders)

    def numbers(self, column: int) -> np.ndarray:
        """Return a column of numbers, NaN for missing ones; texts are parsed."""
        texts = self.texts(column)
        together = "".join(texts)
        if together.isascii() and "_" not in together:  # Python also accepts 1_0 and other scripts' digits
            try:
                return np.array(list(map(float, texts)))
            except ValueError:
                pass
        numbers, source = np.full(len(texts), math.nan), self.source
        for row, text in enumerate(texts):
            if text not in ABSENT:
                if not is_number(text):
                    more = f"; it looks like {looks}" if (looks := special_format(text)) else ""
                    where, hint = source.cell(self.where(row), column), source.hint
                    hint = hint.replace("{}", short(source.names[column]))
                    raise UsageError(f"{where}: {shown(text)} is not a number{more}; {hint}")
                numbers[row] = float(text)
        return numbers

    def check_finite(self, table: np.ndarray, coders: ColumnCoders) -> np.ndarray:
        """Return the table; UsageError for an infinite number."""
        if (infinite := np.isinf(table)).any():
            row, at = map(int, np.argwhere(infinite)[0])
            where = self.source.cell(self.where(row), list(coders)[at])
            raise UsageError(f"{where}: {table[row, at]:g} is infinite; correct it, or leave the row out")
        return table


class Source:
    """A table in a file. names: of the columns; header: True if the file holds the names."""

    names: list[str]
    header: bool
    delimiter = ","
    header_words = ("column", "its columns are")
    hint = "correct it"  # advice in messages about a text among numbers; {} is the column

    def __init__(self, path: FilePath):
        self.path = str(path)

    @property
    def width(self) -> int:
        return len(self.names)

    def kind(self, column: int) -> str | None:
        """Return the declared type of a column: "number", "text", "time", or None (csv)."""
        return None

    def blocks(self, most: int = BLOCK_ROWS) -> Iterator[tuple[int, Callable[[], Cells]]]:
        """Yield (first row, parser) of each block of at most `most` rows."""
        raise NotImplementedError

    def column_label(self, column: int) -> str:
        return f"column {shown(self.names[column]) if self.header else column}"

    def cell(self, where: str, column: int) -> str:
        return f"{self.path}: {where}, {self.column_label(column)}"

    def find(self, text: str, what: str) -> list[int]:
        """Return the columns named `text`, else by number (negative: from the end). UsageError: none, or ambiguous."""
        named = [column for column, name in enumerate(self.names) if name == text] if self.header else []
        if is_index(text):
            number = int(text) % self.width
            if named and -self.width <= int(text) < self.width and number not in named:
                by_name, by_number = named[0] - self.width, number - self.width
                raise UsageError(
                    f"{self.path}: {what} {text} is the name of a column and the number of "
                    f"{self.column_label(number)}; count from the end: "
                    f"{by_name} for the one of this name, {by_number} for the other"
                )
            if named:
                return named
            if not -self.width <= int(text) < self.width:
                raise UsageError(f"{self.path} has {self.width} columns; there is no {what} column {short(text)}")
            return [number]
        if not named:
            what, columns_text = self.header_words
            columns_text += f": {short(', '.join(self.first), 400)}"
            raise UsageError(f"{self.path} has no {what} {shown(text)}; {columns_text}")
        return named

    @cached_property
    def first(self) -> list[str]:
        """Fields of the first line."""
        return self.names

    def take_header(self) -> None:
        """Take the first line as names, if the format does not declare them."""

    def recipe_column(self, name: str, number: int | None, by_name: bool, required: bool = True) -> int:
        """Return the column of a recipe, by name or (not `by_name`) by number; -1 if missing and not `required`."""
        if by_name:
            columns = [column for column, each in enumerate(self.names) if each == name]
            if len(columns) > 1:
                todo = "give them different names"
                raise UsageError(f"{self.path} has {len(columns)} columns named {shown(name)}; {todo}")
            one = f" (--delimiter is {self.delimiter!r})" if self.width == 1 else ""
            problem = f"no column {shown(name)}, which the training data had; its columns are"
            problem += f": {short(', '.join(self.names), 400)}{one}"
        else:
            place = number if number is not None else int(name) if is_index(name) else -1
            columns = [place] if 0 <= place < self.width else []
            problem = f"{self.width} columns and no column {short(name if number is None else str(number))}"
            problem += ": without a header a column is found by its number, columns of labels counted"
        if required and not columns:
            raise UsageError(f"{self.path} has {problem}")
        return columns[0] if columns else -1


class CsvCells(Cells):
    """A block of rows of a csv. A row is one text; quoted fields in it may hold ends of lines."""

    source: "CsvSource"

    def __init__(self, source: "CsvSource", first: int, numbers: Sequence[int], records: list[str], quoted: bool):
        super().__init__(source)
        self.first, self.count = first, len(records)
        self.lines, self.records, self.quoted = numbers, records, quoted

    def where(self, row: int) -> str:
        return f"line {self.lines[row]}"

    @cached_property
    def columns(self) -> list[tuple[str, ...]]:
        return list(zip(*map(self.fields, range(self.count)), strict=True))

    def fields(self, row: int) -> list[str]:
        """Return the fields of a row; UsageError if their number differs from the first line's."""
        fields, width = self.source.fields(self.records[row], self.where(row)), self.source.width
        if len(fields) != width:
            problem = f"has {len(fields)} columns, but the first line has {width}"
            raise UsageError(f"{self.source.path}: {self.where(row)} {problem}")
        return fields

    def texts(self, column: int) -> list[str]:
        return [text.strip() for text in self.columns[column]]

    def read(self, coders: ColumnCoders) -> np.ndarray:
        source, delimiter = self.source, self.source.delimiter
        counts = map(str.count, self.records, itertools.repeat(delimiter))
        if source.plain and not self.quoted and all(count == source.width - 1 for count in counts):
            converters: Any = {column: coder for column, coder in coders.items() if coder is not None}
            options: dict[str, Any] = {"delimiter": delimiter, "comments": None, "encoding": None, "ndmin": 2}
            try:
                table = np.loadtxt(self.records, usecols=list(coders), converters=converters or None, **options)
                return self.check_finite(table, coders)
            except ValueError:  # probably a missing value; more will follow
                source.plain = False
        return super().read(coders)


class CsvSource(Source):
    """A csv in UTF-8. plain: True while numpy.loadtxt has read every block."""

    header_words = ("header with a column", "its first line is")

    def __init__(self, path: FilePath, delimiter: str):
        super().__init__(path)
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise UsageError(f"the delimiter must be one character, neither a quote nor an end of line: {delimiter!r}")
        self.delimiter, self.plain = delimiter, True
        self._blanks = " \t\r\n\f\v" if not delimiter.isspace() else "\r\n"
        lines = (line for numbers, records, _ in self._slabs(1) for line in zip(numbers, records, strict=True))
        self._peeked = list(itertools.islice(lines, 2))
        self.first = self._peek(0)
        self.names, self.header = [str(number) for number in range(len(self.first))], False

    @cached_property
    def second(self) -> list[str]:
        return self._peek(1)

    def _peek(self, which: int) -> list[str]:
        peeked = self._peeked[which : which + 1]
        return [text.strip() for number, record in peeked for text in self.fields(record, f"line {number}")]

    def take_header(self) -> None:
        """Take the first line as names; a column without a name is named by its number."""
        self.header = True
        self.names = [name or str(number) for number, name in enumerate(self.first)]

    def fields(self, record: str, where: str) -> list[str]:
        try:
            return next(csv.reader([record], delimiter=self.delimiter), [])
        except csv.Error as error:
            raise UsageError(f"{self.path}: {where}: {error}") from None

    def blocks(self, most: int = BLOCK_ROWS) -> Iterator[tuple[int, Callable[[], Cells]]]:
        row = -1 if self.header else 0
        for numbers, records, quoted in self._slabs():
            if row < 0 and records:
                row, numbers, records = 0, numbers[1:], records[1:]
            for start in range(0, len(records), most):
                part = slice(start, start + most)
                yield row, partial(CsvCells, self, row, numbers[part], records[part], quoted)
                row += len(records[part])

    def _slabs(self, characters: int | None = None) -> Iterator[tuple[Sequence[int], list[str], bool]]:
        """Yield slabs of rows: (lines from 1 at which rows begin, texts of the rows, True if one has a quote)."""
        with blamed_on(f"{self.path} cannot be read"):
            try:
                with open(self.path, encoding="utf-8-sig", newline="") as file:
                    number = 1
                    while lines := file.readlines(characters or BLOCK_CHARACTERS):
                        quoted = any('"' in line for line in lines)
                        numbers: Sequence[int] = range(number, number + len(lines))
                        if quoted:
                            numbers, lines, number = self._join_quoted(lines, file, number)
                        else:
                            number += len(lines)
                        there = [bool(line.strip(self._blanks)) for line in lines]
                        if not all(there):
                            numbers = list(itertools.compress(numbers, there))
                            lines = list(itertools.compress(lines, there))
                        yield numbers, lines, quoted
            except UnicodeDecodeError:
                raise UsageError(f"{self.path} is not a text file in UTF-8") from None

    def _join_quoted(self, lines: list[str], file: Iterator[str], number: int) -> tuple[list[int], list[str], int]:
        """Join lines of open quotes into rows; return (line where each row begins, rows, number of the next line)."""
        feed, numbers, records = iter(lines), [], []
        for line in feed:
            record = self._quoted_record(line, itertools.chain(feed, file), number) if '"' in line else [line]
            numbers.append(number)
            records.append("".join(record))
            number += len(record)
        return numbers, records, number

    def _quoted_record(self, line: str, more: Iterator[str], number: int) -> list[str]:
        """Return the lines of the row that begins with `line`; UsageError for a quote that is not closed."""
        record = [line]

        def feed() -> Iterator[str]:  # the csv module requests a further line while a quote is open
            yield line
            for each in more:
                record.append(each)
                yield each
            raise csv.Error("the file ends")

        try:
            next(csv.reader(feed(), delimiter=self.delimiter), None)
        except csv.Error as error:
            raise UsageError(f"{self.path}: line {number}: a quote is opened, but not closed: {error}") from None
        return record


def growing_coder(codes: dict[str, int]) -> Coder:
    """Return a coder that numbers texts in the order of appearance, and adds new ones to `codes`."""
    return lambda text: math.nan if (text := text.strip()) in ABSENT else codes.setdefault(text, len(codes))


def name_coder(codes: dict[str, int]) -> Coder:
    """Return a coder that numbers names in the order of appearance; "NA" and the like are names, too."""
    return lambda text: codes.setdefault(text.strip(), len(codes))


def fixed_coder(values: Iterable[str]) -> Coder:
    """Return a coder that numbers these texts from 0, and gives -1 for any other text."""
    codes = {value: code for code, value in enumerate(values)}
    return lambda text: math.nan if (text := text.strip()) in ABSENT else codes.get(text, -1)


def is_index(text: str) -> bool:
    """True if a text may be the number of a column, as 3 or -1."""
    return text.removeprefix("-").isdecimal() and text.isascii()


def is_number(text: str) -> bool:
    """True if a text is a number as people write it, so not for 1_0."""
    if "_" in text or not text.isascii():
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


def special_format(text: str) -> str | None:
    """Return which special format a text has, as "a date or a time"; None: a plain text or number."""
    return next((what for what, written in SPECIAL_FORMATS.items() if written.fullmatch(text)), None)
