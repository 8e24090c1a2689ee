"""Tables, read by DuckDB: csv and tsv (also compressed), JSON, Parquet, Arrow; several files of a pattern or a folder.

DuckDB copies the source, in its order, into a table of its own: beyond MEMORY bytes this goes to a temporary file. The
kinds of columns are found over all rows; rows come in blocks, so that ranks can share a table. A column is read as

    numbers    float64, NaN for a missing value: empty, NA, N/A, NaN, nan, NAN, null, NULL, n/a, None or ?
    codes      the coder's number for each text, NaN for a missing one

A csv cell is a number if Python's float takes it, a column of csv a column of numbers if most of its cells are. The
line of a row, which only messages need, is found by Python's csv module. (Raasveldt and Muehleisen, "DuckDB: an
embeddable analytical database", 2019)"""

import contextlib
import csv
import glob
import gzip
import itertools
import math
import os
import re
import shlex
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hpcdl.data.formats.recognition import ARROW, TABLES
from hpcdl.data.hdf5 import FilePath, short, shown
from hpcdl.errors import UsageError, blamed_on, line, printable

if TYPE_CHECKING:
    import duckdb  # its import takes a while, and programs import this module that may read no table

Coder: TypeAlias = Callable[[str], float]  # text -> code, NaN for a missing text
ColumnCoders: TypeAlias = dict[int, Coder | None]  # by column number; None for a column of numbers
BLOCK_ROWS = 8192  # rows of a block, at most
MEMORY = "512MB"  # of DuckDB, per rank
PEEKED = 20  # lines that show the delimiter and the header
DELIMITERS = ",;\t|"
BLANKS = " \t\n\r\f\v\u00a0\u3000"
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


def quoted(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


MISSING = f"({', '.join(map(repr, sorted(ABSENT)))})"  # in SQL
TEXT = f"case when trim(VALUE::varchar, {quoted(BLANKS)}) not in {MISSING} then VALUE::varchar end"  # NULL: missing
TIMES = (  # formats of times, as of strptime
    *("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"),
    *("%Y/%m/%d", "%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S", "%d.%m.%Y", "%d.%m.%Y %H:%M", "%d/%m/%Y", "%m/%d/%Y"),
    *("%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M", "%b %d %Y", "%b %d, %Y", "%B %d, %Y", "%d %b %Y", "%d-%b-%Y", "%d-%b-%y"),
)
ANGLE = "2 * pi() * extract('doy' from TIME) / 365.25"
PART_SQL = {  # of TIME, a timestamp, and FIRST, in seconds
    "year": "extract('year' from TIME)",
    "month": "extract('month' from TIME)",
    "weekday": "extract('isodow' from TIME)",
    "sine": f"sin({ANGLE})",
    "cosine": f"cos({ANGLE})",
    "hour": "(extract('hour' from TIME) + extract('minute' from TIME) / 60)",
    "days": "(epoch(TIME) - FIRST) / 86400",
}
FEW = 10  # different texts, about, that are not counted exactly
TOGETHER = 200  # aggregates of a query: the time to plan it grows with their square
MIXED = "MIXED"  # the type of a column of JSON with numbers and texts
KINDS = {  # of DuckDB's types
    "number": r"BOOLEAN|U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT|DOUBLE|DECIMAL\(.*\)|BIGNUM|\"NULL\"|NULL",
    "text": r"VARCHAR|ENUM\(.*\)|UUID",
    "time": r"DATE|TIME(STAMP)?(_S|_MS|_NS)?( WITH TIME ZONE)?|INTERVAL",
}


def paths_of(path: str) -> list[str]:
    """Return the files of a table, sorted: those of a pattern, or all tables in a folder, which must be of one kind."""
    if not os.path.isdir(path):
        return (sorted(glob.glob(path)) if not os.path.exists(path) else []) or [path]
    found: dict[str, list[str]] = {}
    with blamed_on(f"{path} cannot be read"):
        for name in sorted(os.listdir(path)):
            ending = os.path.splitext(name.lower().removesuffix(".gz").removesuffix(".zst"))[1]
            if ending in (*TABLES, ".parquet") and name[0] not in "._":  # Spark's notes begin with these
                found.setdefault(ending, []).append(os.path.join(path, name))
    if len(found) != 1:
        what = " and ".join(sorted(found)) if found else "no .parquet, .csv, .tsv or .json"
        raise UsageError(f"the folder {path} has {what} files; give files of one kind, as '{path.rstrip('/')}/*.csv'")
    return next(iter(found.values()))


def files_of(paths: list[str]) -> str:
    """Return a list of files in SQL, whose signs * ? [ are no patterns."""
    return f"[{', '.join(quoted(glob.escape(path)) for path in paths)}]"


class Cells:
    """The rows of a block. first: the number of its first row."""

    def __init__(self, source: "Source", first: int, count: int):
        self.source, self.first, self.count = source, first, count

    def where(self, row: int) -> str:
        """Return what messages call row `row` of the block, as "line 7"."""
        return self.source.where(self.first + row)

    def texts(self, column: int) -> list[str]:
        """Return the texts of a column, without surrounding blanks; "" for those that are missing."""
        (found,) = self._fetch([self.source.text(column)])
        return [text.strip() for text in found.tolist()]

    def read(self, coders: ColumnCoders, reasons: dict[int, str] | None = None) -> np.ndarray:
        """Return the columns of `coders` in order, (rows, columns). A text that should be a number and an infinite
        number are a UsageError; with `reasons` they become NaN, and the row is added there."""
        source, table = self.source, np.empty((self.count, len(coders)))
        read = [source.number(each) if coder is None else source.text(each) for each, coder in coders.items()]
        for at, ((column, coder), values) in enumerate(zip(coders.items(), self._fetch(read), strict=True)):
            table[:, at] = values if coder is None else list(map(coder, values.tolist()))
            if coder is None and source.kind_of(column) in ("text", None) and np.isnan(table[:, at]).any():
                self._refuse_texts(column, table[:, at], reasons)
        for row, at in np.argwhere(np.isinf(table)).tolist():
            problem = f"{table[row, at]:g} is infinite"
            self._refuse(row, list(coders)[at], problem, "correct it, or leave the row out", reasons)
            table[row, at] = np.nan
        return table

    def _fetch(self, values: list[str]) -> list[np.ndarray]:
        wanted = ", ".join(f"{value} as v{at}" for at, value in enumerate(values))
        rows = f"rowid between {self.first} and {self.first + self.count - 1}"
        found = self.source.ask(f"select {wanted} from rows where {rows} order by rowid").fetchnumpy()
        return [found[f"v{at}"] for at in range(len(values))]

    def _refuse(self, row: int, column: int, problem: str, todo: str, reasons: dict[int, str] | None) -> None:
        source = self.source
        if reasons is None:
            raise UsageError(f"{source.cell(self.where(row), column)}: {problem}; {todo}")
        reasons.setdefault(row, f"{source.column_label(column)}: {problem}")

    def _refuse_texts(self, column: int, numbers: np.ndarray, reasons: dict[int, str] | None) -> None:
        """Refuse rows in which one of the missing numbers is a text."""
        source, texts = self.source, self.texts(column)
        for row in np.flatnonzero(np.isnan(numbers)).tolist():
            text = texts[row]
            if text not in ABSENT and not is_number(text):
                more = f"; it looks like {looks}" if (looks := special_format(text)) else ""
                todo = source.hint.replace("{}", name_in_shell(source.names[column]))
                self._refuse(row, column, f"{shown(text)} is not a number{more}", todo, reasons)


class Source:
    """A table. names: of the columns; header: True if the source holds the names. delimiter: None: detect, for a csv.
    decimal: the character before the decimals, of a csv. first, second: fields of the first lines of a csv."""

    names: list[str]  # and those of derived columns
    header = True
    delimiter = ","
    header_words = ("column", "its columns are")
    hint = "correct it"  # advice in messages about a text among numbers; {} is the column

    def __init__(self, path: FilePath, delimiter: str | None = None, decimal: str | None = None, threads: int = 1):
        import duckdb

        self.path, self.decimal, self._engine_error = str(path), decimal, duckdb.Error
        config: Any = {"threads": threads, "memory_limit": MEMORY, "temp_directory": tempfile.gettempdir()}
        self.db = duckdb.connect(config=config)
        self.paths = paths_of(self.path)
        with blamed_on(f"{path} cannot be read"), open(self.paths[0], "rb") as file:
            start = file.read(8)
        stem = self.paths[0].lower().removesuffix(".gz").removesuffix(".zst")
        self.csv = self._copied = False
        if start.startswith(ARROW) and not start.startswith(b"PAR"):
            self._open_arrow(start)
        elif start.startswith(b"PAR"):
            self._relation = f"read_parquet({files_of(self.paths)})"
            self._refuse_other_types()
        elif stem.endswith((".json", ".jsonl", ".ndjson")):
            self._relation = f"read_json({files_of(self.paths)}, convert_strings_to_integers=false, sample_size=-1)"
        else:
            self.csv, self.header, self.header_words = True, False, ("header with a column", "its first line is")
            self._peek(delimiter, stem)
        if not self.csv:
            described = self.query(f"describe select * from {self._relation}").fetchall()
            self.names, self.types = [each[0] for each in described], [each[1] for each in described]
            self.first = [*self.names]
            self._mix()
        self.width, self.derived = len(self.names), list[str]()  # derived: their SQL

    def _refuse_other_types(self) -> None:
        """Raise UsageError if the Parquet files have different columns: DuckDB would cast to the types of the first."""
        first: dict[str, str] = {}
        for path in self.paths if len(self.paths) > 1 else []:
            described = self.query(f"describe select * from read_parquet({files_of([path])})").fetchall()
            types = {each[0]: each[1] for each in described}
            for name in first | types if first else []:
                mine, theirs = (short(each.get(name, "missing")) for each in (types, first))
                if mine != theirs:
                    problem = f"the column {shown(name)} is {mine} in {path}, but {theirs} in {self.paths[0]}"
                    raise UsageError(f"{self.path}: {problem}; all files must have the same columns")
            first = first or types

    def _mix(self) -> None:
        """Take columns that JSON gives as numbers and texts mixed for texts, and type them MIXED."""
        for at, name in enumerate(self.names):
            if self.types[at] == "JSON":
                column = f'"{name.replace(chr(34), 2 * chr(34))}"'
                nested = f"select bool_or(json_type({column}) in ('ARRAY', 'OBJECT')) from {self._relation}"
                if self.query(nested).fetchall() == [(False,)]:
                    texts = f"json_extract_string({column}, '$') as {column}"
                    self.types[at], self._relation = MIXED, f"(select * replace ({texts}) from {self._relation})"

    def _open_arrow(self, start: bytes) -> None:
        try:
            from pyarrow import ipc, memory_map
        except ImportError:
            raise UsageError(f"{self.path}: Arrow needs the package pyarrow: pip install 'hpcdl[arrow]'") from None
        if start.startswith(b"FEA1"):
            raise UsageError(f"{self.path} is Feather of version 1; write it as version 2")
        opener = ipc.open_file if start.startswith(b"ARROW1") else ipc.open_stream
        try:
            with blamed_on(f"{self.path} cannot be read"):
                table = opener(memory_map(self.path)).read_all()
                table.validate(full=True)  # damaged bytes could make a reader read any memory
        except UsageError as error:
            raise UsageError(printable(error, allowed="")) from error  # Thrift's control characters
        self.db.register("arrow", table)
        self._relation = "arrow"

    def _peek(self, delimiter: str | None, stem: str) -> None:
        """Find the delimiter, and the fields of the first two lines."""
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
            raise UsageError(f"the delimiter must be one character, neither a quote nor an end of line: {delimiter!r}")
        lines = list(itertools.islice(filter(str.strip, self._lines(self.paths[0])), PEEKED))

        def records(each: str) -> list[list[str]]:
            with contextlib.suppress(csv.Error):
                return [[text.strip() for text in fields] for fields in csv.reader(lines, delimiter=each)]
            return []

        def consistent(each: str) -> bool:
            widths = {len(fields) for fields in records(each)[: PEEKED - 1]}
            return len(widths) == 1 and widths != {1}

        if delimiter is None:
            usual = "\t" if stem.endswith((".tsv", ".tab")) else ","
            delimiter = next(filter(consistent, dict.fromkeys(usual + DELIMITERS)), usual)
        self.delimiter = delimiter
        if lines and not records(delimiter):
            list(self._records(self.paths[0]))  # says what is wrong
        found_records = records(delimiter) or [[]]
        self.first, self.second = found_records[0], (found_records[1:2] or [[]])[0]
        self.names, self.types = [str(number) for number in range(len(self.first))], []

    def query(self, text: str, db: "duckdb.DuckDBPyConnection | None" = None) -> "duckdb.DuckDBPyConnection":
        """Return the result of a query in SQL; UsageError for what the engine cannot read."""
        try:
            return (db or self.db).execute(text)
        except self._engine_error as error:
            raise UsageError(f"{self.path} cannot be read: {line(str(error).splitlines()[0])}") from None

    @cached_property
    def rows(self) -> int:
        """The number of rows."""
        found = self.ask("select count(*) from rows").fetchone()
        return found[0] if found else 0

    def ask(self, text: str) -> "duckdb.DuckDBPyConnection":
        """Return the result of a query of the table `rows`, whose columns are c0, c1, ..."""
        self._load()
        return self.query(text)

    def _load(self) -> None:
        """Copy the source into the table `rows`, once; find the character before the decimals."""
        if not self._copied:
            self._copied = True
            columns = [f"c{column}" for column in range(self.width)] or ["c0"]
            if self.csv:
                self._refuse_other_headers()
                self._copy_csv(columns)
                self._find_decimal()
            else:
                self.query(f"create table rows as select * from {self._relation} as source({', '.join(columns)})")

    def _refuse_other_headers(self) -> None:
        """Raise UsageError if the files of a csv begin with different lines of names."""
        for path in self.paths[1:] if self.header else []:
            _, names = next(self._records(path), (0, []))
            if [name.strip() for name in names] != self.first:
                begins = f"begins with {shown(names)}, but {self.paths[0]} with {shown(self.first)}"
                raise UsageError(f"{path} {begins}; all files must have the same columns")

    def _copy_csv(self, columns: list[str]) -> None:
        try:
            self._copy(self.paths, columns)
        except self._engine_error:
            with tempfile.TemporaryDirectory() as folder:
                copies = [self._cleaned(path, f"{folder}/{at}.csv") for at, path in enumerate(self.paths)]
                try:
                    self._copy(copies, columns)
                except self._engine_error as error:
                    raise UsageError(f"{self.path} cannot be read: {line(str(error).splitlines()[0])}") from None

    def _copy(self, paths: list[str], columns: list[str]) -> None:
        types = ", ".join(f"{column}: 'VARCHAR'" for column in columns)
        filled = ", ".join(f"coalesce({column}, '') as {column}" for column in columns)
        files = files_of(paths)
        how = f"auto_detect=false, header={str(self.header).lower()}, delim={quoted(self.delimiter)}"
        read = f"read_csv({files}, {how}, quote='\"', escape='\"', columns={{{types}}})"
        only = f" where {columns[0]} is not null" * (len(columns) == 1)  # blank lines
        self.db.execute(f"create or replace table rows as select {filled} from {read}{only}")

    def _lines(self, path: str) -> Iterator[str]:
        """Yield the lines of a csv, decompressed; UsageError if it is no text in UTF-8."""
        with blamed_on(f"{path} cannot be read"):
            try:
                if path.lower().endswith(".zst"):
                    how = "auto_detect=false, header=false, delim='\x01', quote='', escape=''"
                    read = f"read_csv({files_of([path])}, {how}, columns={{'line': 'VARCHAR'}})"
                    found = self.query(f"select coalesce(line, '') || chr(10) from {read}", self.db.cursor())
                    while rows := found.fetchmany(BLOCK_ROWS):
                        yield from (each for (each,) in rows)
                    return
                opened: Any = gzip.open if path.lower().endswith(".gz") else open
                with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
                    yield from file
            except UnicodeDecodeError:
                raise UsageError(f"{path} is not a text file in UTF-8") from None
            except (EOFError, zlib.error):
                raise UsageError(f"{path} is cut off or damaged: it is no whole gzip file") from None

    def _records(self, path: str) -> Iterator[tuple[int, list[str]]]:
        """Yield (its first line from 1, fields) of each row of a csv; UsageError for a damaged one."""
        reader, begun = csv.reader(self._lines(path), delimiter=self.delimiter, strict=True), 1
        try:
            for fields in reader:
                if any(text.strip(BLANKS) for text in fields) or len(fields) > 1:
                    yield begun, fields
                begun = reader.line_num + 1
        except csv.Error as error:
            problem = "a quote is opened, but not closed: " * ("end of data" in str(error))
            raise UsageError(f"{path}: line {begun}: {problem}{error}") from None

    def _cleaned(self, path: str, copy: str) -> str:
        """Copy a csv that the engine refuses, with one kind of line ends; UsageError for a row of another width."""
        with open(copy, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter=self.delimiter, lineterminator="\n")
            for number, fields in self._records(path):
                if len(fields) != self.width:
                    problem = f"has {len(fields)} columns, but the first line has {self.width}"
                    raise UsageError(f"{path}: line {number} {problem}")
                writer.writerow(fields)
        return copy

    def _find_decimal(self) -> None:
        """Find the character before the decimals: a comma if it makes numbers of a column, and a point of none."""
        if self.decimal is None and self.delimiter != ",":
            columns, found = range(self.width), {}
            for name, digits in {"whole": r"\d+", ",": r"\d*,\d+", ".": r"\d*[.]\d+"}.items():
                written = quoted(rf"[-+]?{digits}([eE][-+]?\d+)?")
                number = f"case when regexp_full_match(trim(VALUE), {written}) then 1 end"
                found[name] = self._counts(dict.fromkeys(columns, number))
            present = self._counts(dict.fromkeys(columns, TEXT))

            def some(mark: str) -> bool:
                marked, whole = found[mark], found["whole"]
                return any(marked[each] and marked[each] + whole[each] == present[each] for each in columns)

            self.decimal = "," if some(",") and not some(".") else "."

    def _counts(self, values: dict[int, str]) -> dict[int, int]:
        """Return, for each column, how many rows have a value that is not NULL. values: by column, in SQL of VALUE."""
        return self._aggregates({column: f"count({value})" for column, value in values.items()})

    def _aggregates(self, values: dict[int, str]) -> dict[int, Any]:
        """Return an aggregate of each column. values: by column, in SQL of VALUE."""
        found, columns = dict[int, Any](), list(values)
        for at in range(0, len(columns), TOGETHER):
            some = columns[at : at + TOGETHER]
            wanted = ", ".join(values[each].replace("VALUE", f"c{each}") for each in some)
            found |= dict(zip(some, self.ask(f"select {wanted} from rows").fetchone() or (), strict=True))
        return found

    def where(self, row: int) -> str:
        """Return what messages call a row, as "line 7"."""
        if self.csv:
            left = row
            for path in self.paths:
                with contextlib.suppress(UsageError, OSError):
                    for number, _ in itertools.islice(self._records(path), int(self.header), None):
                        if left == 0:
                            return f"line {number}" + f" of {path}" * (len(self.paths) > 1)
                        left -= 1
        return f"row {row}"

    def kind_of(self, column: int) -> str | None:
        """Return the declared kind of a column: "number", "text" or "time"; None for a csv, and for numbers and texts
        mixed; UsageError for others."""
        if column >= self.width:
            return "number"
        if self.csv or self.types[column] == MIXED:
            return None
        for kind, written in KINDS.items():
            if re.fullmatch(written, self.types[column]):
                return kind
        what = f"{self.column_label(column)} holds {shown(self.types[column])}"
        raise UsageError(f"{self.path}: {what}, neither numbers nor texts; leave it out by --drop")

    def kind(self, column: int) -> str | None:
        """Return the kind of a column, declared or found: "number", "text", "time"; None if it has no value."""
        declared = self.kind_of(column)
        return self._found[column] if declared is None else declared

    @cached_property
    def _found(self) -> list[str | None]:
        """The kinds of columns that declare none: that of most values."""
        self._load()  # `_cast` needs the character before the decimals
        numbers = self._counts({column: self._cast(column) for column in range(self.width)})
        mixed = [column for column, number in numbers.items() if number < self.rows]
        present = numbers | self._counts(dict.fromkeys(mixed, TEXT))
        kinds = {True: "number", False: "text"}
        return [kinds[2 * numbers[each] > some] if some else None for each, some in present.items()]

    def _cast(self, column: int) -> str:
        """Return the SQL of a text as a number; NULL for a text or a missing value."""
        text = f"replace(replace(c{column}::varchar, '_', 'x'), '+-', 'x')"  # DuckDB takes 1_0 and +-1 for numbers
        if self.decimal == ",":
            text = f"replace(replace({text}, '.', 'x'), ',', '.')"
        return f"nullif(try_cast({text} as double), 'nan'::double)"

    def text(self, column: int) -> str:
        """Return the SQL of a column as texts."""
        return f"coalesce(c{column}::varchar, '')"

    def number(self, column: int) -> str:
        """Return the SQL of a column as float64, NaN for a missing value or a text; UsageError for dates."""
        if column >= self.width:
            return f"coalesce({self.derived[column - self.width]}::double, 'nan'::double)"
        kind = self.kind_of(column)
        if kind == "time":
            raise UsageError(f"{self.path}: {self.column_label(column)} holds dates or times; derive numbers from them")
        if kind != "number":
            return f"coalesce({self._cast(column)}, 'nan'::double)"
        value = f"c{column}::int" if self.types[column] == "BOOLEAN" else f"c{column}"
        return f"coalesce({value}::double, 'nan'::double)"

    def distinct(self, columns: list[int]) -> dict[int, int]:
        """Return how many different texts each of these columns has, missing ones aside."""
        about = self._aggregates(dict.fromkeys(columns, f"approx_count_distinct({TEXT})"))
        for column in [each for each, count in about.items() if count > FEW]:
            about |= self._counts({column: f"distinct {TEXT}"})  # one by one, as each takes some MB
        return about

    def time_formats(self, column: int, formats: Sequence[str] = TIMES) -> list[str]:
        """Return the formats in which all values of a column are times; [""] if it holds times, [] if it does not."""
        if self.kind_of(column) == "time":
            return [""] if re.match("DATE|TIMESTAMP", self.types[column]) else []
        example = self._examples[column]
        if example is None or not re.search(r"\d[-/. :,]|[-/. :,]\d", example):
            return []
        counts = [f"count({self._time(column, written)})" for written in formats]
        counts.append(f"count({TEXT.replace('VALUE', f'c{column}')})")
        *several, every = self.ask(f"select {', '.join(counts)} from rows").fetchone() or (0,)
        return [written for written, count in zip(formats, several, strict=True) if count == every]

    @cached_property
    def _examples(self) -> dict[int, str | None]:
        """The first text of each column of texts, in their order; None if it has none."""
        texts = [column for column in range(self.width) if self.kind_of(column) in ("text", None)]
        return self._aggregates(dict.fromkeys(texts, f"min({TEXT})"))

    def _time(self, column: int, written: str) -> str:
        if self.kind_of(column) == "time":
            return f"c{column}::timestamp"
        text = f"trim(c{column}::varchar)"
        return f"try_strptime({text}, {quoted(written)})" if written else f"try_cast({text} as timestamp)"

    def times(self, column: int, written: str) -> tuple[float, bool]:
        """Return (the first time of a column in seconds since 1970, True if times of the day differ)."""
        time = self._time(column, written)
        found = self.ask(f"select epoch(min({time})), count(distinct {time}::time) from rows").fetchone() or (0, 0)
        return float(found[0] or 0), found[1] > 1

    def derive(self, column: int, written: str, part: str, first: float) -> int:
        """Return the number of a new column: a part of the times in a column. written: their format."""
        value = PART_SQL[part].replace("TIME", self._time(column, written)).replace("FIRST", repr(first))
        self.derived.append(value)
        self.names.append(f"{self.names[column]}.{part}")
        return self.width + len(self.derived) - 1

    def blocks(self, most: int = BLOCK_ROWS) -> Iterator[tuple[int, Callable[[], Cells]]]:
        """Yield (first row, parser) of each block of at most `most` rows."""
        for first in range(0, self.rows, most):
            yield first, partial(Cells, self, first, min(most, self.rows - first))

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

    def take_header(self) -> None:
        """Take the first line of a csv as names; a column without a name is named by its number."""
        if self.csv:
            self.header = True
            self.names = [name or str(number) for number, name in enumerate(self.first)]

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


def growing_coder(codes: dict[str, int]) -> Coder:
    """Return a coder that numbers texts in the order of appearance, and adds new ones to `codes`."""
    return lambda text: math.nan if (text := text.strip()) in ABSENT else codes.setdefault(text, len(codes))


def name_coder(codes: dict[str, int]) -> Coder:
    """Return a coder that numbers names in the order of appearance; "NA" and the like are names, too."""
    return lambda text: codes.setdefault(text.strip(), len(codes))


def name_in_shell(name: str) -> str:
    """Return the name of a column as it is typed on a command line: quoted if it has blanks or signs."""
    return shlex.quote(short(name, 200))


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
