"""From csv tables: numbers, one row per example, one column with the labels (numbers or texts)."""

import csv
import itertools
import math
import tempfile

import numpy as np

from hpcdl.data.format import Info, check_x
from hpcdl.data.prepare import Output, class_numbers, pixels, split
from hpcdl.errors import UsageError

LINES = 8192  # read at a time


def prepare_csv(
    path,
    output: Output,
    *,
    label: str = "-1",
    header: bool | None = None,
    delimiter: str = ",",
    regression: bool = False,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Info:
    """From a table of numbers, one row per example.

    label: the label's column, by number from 0 (-1: the last) or by its name in the header. header: whether the first
    line holds names (None: it does if one of its features is not a number). regression: labels are values to predict.
    """
    with tempfile.TemporaryFile(dir=output.path.parent) as spool:
        table = _Table(path, label, header, delimiter, spool)
        (y,), names, classes = class_numbers(path, [table.labels()], regression)
        x = np.memmap(spool, np.float64, "r", shape=(len(y), table.width - 1))
        kind, scale = pixels(table.low, table.high, table.whole, x.dtype)
        return output.write(split(x, y, classes, kind, test_fraction, seed), kind, scale, names, classes)


class _Table:
    """One pass over a csv file: the features go to a temporary file as float64, labels and ranges are kept."""

    def __init__(self, path, label, header, delimiter, spool):
        if len(delimiter) != 1:
            raise UsageError(f"the delimiter must be one character, not {delimiter!r}")
        self.path, self.delimiter = path, delimiter
        self.texts, self.codes = {}, []  # each label's text gets a code
        self.low, self.high, self.whole = math.inf, -math.inf, True
        try:
            with open(path, encoding="utf-8-sig", newline="") as file:
                first = self._fields(next(file, ""))
                self.width = len(first)
                self.column = self._find_column(label, first, header)
                if header is None:
                    features = first[: self.column] + first[self.column + 1 :]
                    header = not _is_index(label) or not all(map(_is_number, features))
                file.seek(0)
                lines = enumerate(file, 1)
                for _ in range(header):
                    next(lines)
                while slab := list(itertools.islice(lines, LINES)):
                    if slab := [(number, line) for number, line in slab if line.strip()]:
                        self._add(slab, spool)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not a text file in UTF-8") from None
        if not self.codes:
            raise UsageError(f"{path} has no rows")
        spool.flush()

    def _fields(self, line):
        return next(csv.reader([line], delimiter=self.delimiter), [])

    def _find_column(self, label, first, header):
        if self.width < 2:
            raise UsageError(f"{self.path} has {self.width} columns (delimiter {self.delimiter!r}); it needs 2 or more")
        if _is_index(label):
            if not -self.width <= int(label) < self.width:
                raise UsageError(f"{self.path} has {self.width} columns; there is no label column {label}")
            return int(label) % self.width
        names = [name.strip() for name in first]
        if header is False or label not in names:
            raise UsageError(
                f"{self.path} has no header with a column {label!r}; its first line is: {', '.join(names)}"
            )
        return names.index(label)

    def _add(self, slab, spool):
        numbers, lines = zip(*slab, strict=True)
        code = {self.column: lambda text: self.texts.setdefault(text.strip(), len(self.texts))}
        how = {"delimiter": self.delimiter, "comments": None, "quotechar": '"', "encoding": None, "ndmin": 2}
        try:
            table = np.loadtxt(lines, converters=code, **how)
        except ValueError as error:
            raise self._bad_line(slab, error) from None
        if table.shape[1] != self.width:
            raise self._bad_line(slab, "the number of columns changes")
        x = np.delete(table, self.column, axis=1)
        check_x(x, str(self.path), numbers)
        self.low, self.high = min(self.low, x.min()), max(self.high, x.max())
        self.whole = self.whole and bool((x == np.rint(x)).all())
        self.codes.append(table[:, self.column].astype(np.int64))
        spool.write(x.tobytes())

    def _bad_line(self, slab, error):
        for number, line in slab:
            fields = self._fields(line)
            if len(fields) != self.width:
                return UsageError(f"{self.path}: line {number} has {len(fields)} columns, the first line {self.width}")
            for column, text in enumerate(fields):
                if column != self.column and not _is_number(text):
                    return UsageError(f"{self.path}: line {number}, column {column}: {text!r} is not a number")
        return UsageError(f"{self.path}: {error}")

    def labels(self):
        """The labels of all rows: integers if all of them are, else floats if all are numbers, else texts."""
        if "" in self.texts:
            raise UsageError(f"{self.path}: a row has an empty label (column {self.column})")
        for kind in (int, float, str):
            try:
                return np.array([kind(text) for text in self.texts])[np.concatenate(self.codes)]
            except ValueError:
                continue


def _is_index(label):
    return label.removeprefix("-").isdecimal()


def _is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True
