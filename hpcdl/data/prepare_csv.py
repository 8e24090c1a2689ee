"""From csv tables: numbers, one row per example, one column with the labels (numbers or texts), and perhaps one that
says whose each row is: the owners are numbered in their sorted order."""

import csv
import itertools
import math
import re
import tempfile
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from hpcdl.data.format import FilePath, Info, check_x, short, shown
from hpcdl.data.prepare import Output, class_numbers, pixels, split
from hpcdl.errors import UsageError, blamed_on

Keep: TypeAlias = Callable[[np.ndarray], None]
LINES = 8192  # read at a time
WRITTEN = {
    int: re.compile(r"[-+]?(0|[1-9][0-9]*)"),
    float: re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(nan|NaN|inf|Inf)"),
}


def prepare_csv(
    path: FilePath,
    output: Output,
    *,
    label: str = "-1",
    group: str | None = None,
    header: bool | None = None,
    delimiter: str = ",",
    regression: bool = False,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Info:
    """From a table of numbers, one row per example.

    label: the label's column, by number from 0 (-1: the last) or by its name in the header. group: likewise the column
    that says whose each row is, which is no feature; the file keeps it as train/group and test/group. header: whether
    the first line holds names (None: it does if one of its features is not a number). regression: labels are values to
    predict.
    """
    with output.blamed():
        spool_file = tempfile.TemporaryFile(dir=output.path.parent)  # noqa: SIM115 - closed below
    with spool_file as spool:

        def keep(x: np.ndarray) -> None:
            with output.blamed():  # a full disk is not the table's fault
                spool.write(x.tobytes())
                spool.flush()

        table = _Table(path, {"label": label} | ({} if group is None else {"group": group}), header, delimiter, keep)
        (y,), names, classes = class_numbers(path, [table.values(0)], regression)
        others = {} if group is None else {"group": np.unique(table.values(1), return_inverse=True)[1]}
        x = np.memmap(spool, np.float64, "r", shape=(len(y), table.width - len(table.columns)))
        kind, scale = pixels(table.low, table.high, table.whole, x.dtype)
        return output.write(split(x, y, classes, kind, test_fraction, seed, **others), kind, scale, names, classes)


class _Table:
    """One pass over a csv file: the features go to `keep` as float64, named columns and ranges are kept here."""

    def __init__(self, path: FilePath, named: dict[str, str], header: bool | None, delimiter: str, keep: Keep):
        if len(delimiter) != 1:
            raise UsageError(f"the delimiter must be one character, not {delimiter!r}")
        self.path, self.delimiter = path, delimiter
        self.named = list(named)
        self.texts: list[dict[str, int]] = [{} for _ in named]  # each text of a named column gets a code
        self.codes: list[np.ndarray] = []
        self.low, self.high, self.whole, self.keep = math.inf, -math.inf, True, keep
        with blamed_on(f"{path} cannot be read"):
            try:
                self._read(named, header)
            except UnicodeDecodeError:
                raise UsageError(f"{path} is not a text file in UTF-8") from None
        if not self.codes:
            raise UsageError(f"{path} has no rows")

    def _read(self, named: dict[str, str], header: bool | None) -> None:
        with open(self.path, encoding="utf-8-sig", newline="") as file:
            first = self._fields(next(file, ""))
            self.width = len(first)
            self.columns = [self._find_column(what, text, first, header) for what, text in named.items()]
            if len(set(self.columns)) < len(named) or len(named) == self.width:
                raise UsageError(f"{self.path}: the label, the group and the features are columns of their own")
            if header is None:
                features = [text for column, text in enumerate(first) if column not in self.columns]
                header = not all(map(_is_index, named.values())) or not all(map(_is_number, features))
            file.seek(0)
            lines = enumerate(file, 1)
            for _ in range(header):
                next(lines)
            while slab := list(itertools.islice(lines, LINES)):
                if slab := [(number, line) for number, line in slab if line.strip()]:
                    self._add(slab)

    def _fields(self, line: str) -> list[str]:
        return next(csv.reader([line], delimiter=self.delimiter), [])

    def _find_column(self, what: str, text: str, first: list[str], header: bool | None) -> int:
        if self.width < 2:
            raise UsageError(f"{self.path} has {self.width} columns (delimiter {self.delimiter!r}); it needs 2 or more")
        if _is_index(text):
            if not -self.width <= int(text) < self.width:
                raise UsageError(f"{self.path} has {self.width} columns; there is no {what} column {text}")
            return int(text) % self.width
        names = [name.strip() for name in first]
        if header is False or text not in names:
            known = short(", ".join(names), 400)
            raise UsageError(f"{self.path} has no header with a column {text!r}; its first line is: {known}")
        return names.index(text)

    def _add(self, slab: list[tuple[int, str]]) -> None:
        numbers, lines = zip(*slab, strict=True)
        code: Any = {
            column: lambda text, texts=texts: texts.setdefault(text.strip(), len(texts))
            for column, texts in zip(self.columns, self.texts, strict=True)
        }
        how: dict[str, Any] = {"delimiter": self.delimiter, "comments": None, "quotechar": '"', "encoding": None}
        try:
            table = np.loadtxt(lines, converters=code, ndmin=2, **how)
        except ValueError as error:
            raise self._bad_line(slab, error) from None
        if table.shape[1] != self.width:
            raise self._bad_line(slab, "the number of columns changes")
        x = np.delete(table, self.columns, axis=1)
        check_x(x, str(self.path), numbers)
        self.low, self.high = min(self.low, x.min()), max(self.high, x.max())
        self.whole = self.whole and bool((x == np.rint(x)).all())
        self.codes.append(table[:, self.columns].astype(np.int64))
        self.keep(x)

    def _bad_line(self, slab: list[tuple[int, str]], error: Exception | str) -> UsageError:
        for number, line in slab:
            fields = self._fields(line)
            if len(fields) != self.width:
                return UsageError(f"{self.path}: line {number} has {len(fields)} columns, the first line {self.width}")
            for column, text in enumerate(fields):
                if column not in self.columns and not _is_number(text):
                    return UsageError(f"{self.path}: line {number}, column {column}: {shown(text)} is not a number")
        return UsageError(f"{self.path}: {short(str(error), 200)}")

    def values(self, which: int) -> np.ndarray:
        """What all rows hold in the named column of this number: integers if all are, else floats, else texts.

        As people write numbers: 007, 1_0 and 0x1 are texts, and other ones than 7, 10 and 1.
        """
        texts, codes = self.texts[which], np.concatenate(self.codes)[:, which]
        if "" in texts:
            raise UsageError(f"{self.path}: a row has an empty {self.named[which]} (column {self.columns[which]})")
        for kind, written in WRITTEN.items():
            if all(map(written.fullmatch, texts)):
                return np.array([kind(text) for text in texts])[codes]
        return np.array(list(texts))[codes]


def _is_index(label: str) -> bool:
    return label.removeprefix("-").isdecimal()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
