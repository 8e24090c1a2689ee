"""Downsampling of a long series to at most some hundred bins, each with mean, smallest and largest value.

rows     1 2 3 4 5 6 7 8 9 ...        at most 4 bins here, of as many rows each:
bins     1 | 2 | 3 | 4                of 1 row
         1 2 | 3 4 | 5                full: neighbours are merged, and bins have 2 rows from here on
         1 2 3 4 | 5 6 7 8 | 9        full again: of 4 rows, and so on"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdl.files import finite

MOST = 400  # bins, an even number, about the width of a picture in points
BUFFER = 2000  # rows that are binned together


class Thinned:
    """The columns `names` of all added rows, in at most `most` bins; missing and infinite values are left out.
    mean, low, high: by name, one value per bin, NaN for a bin without values."""

    def __init__(self, names: Sequence[str], most: int = MOST):
        self.names, self.most = tuple(names), most
        self.rows, self.width = 0, 1  # binned so far; rows of a bin
        self._buffer: list[tuple] = []
        self._pick = operator.itemgetter(*self.names)  # five times as fast as one by one
        shape = most, len(self.names)
        self._sums, self._counts = np.zeros(shape), np.zeros(shape)
        self._low, self._high = np.full(shape, np.nan), np.full(shape, np.nan)

    def add(self, row: dict[str, Any]) -> None:
        try:
            self._buffer.append(self._pick(row))
        except KeyError:  # the row lacks some names
            self._buffer.append(tuple([row.get(name) for name in self.names]))
        if len(self._buffer) >= BUFFER:
            self._bin()

    def __len__(self) -> int:
        self._bin()
        return -(-self.rows // self.width)

    @property
    def mean(self) -> dict[str, np.ndarray]:
        count = len(self)
        with np.errstate(invalid="ignore"):
            return self._by_name(self._sums[:count] / self._counts[:count])

    @property
    def low(self) -> dict[str, np.ndarray]:
        return self._by_name(self._low[: len(self)])

    @property
    def high(self) -> dict[str, np.ndarray]:
        return self._by_name(self._high[: len(self)])

    def _by_name(self, table: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(self.names, table.T, strict=True))

    def _bin(self) -> None:
        if not self._buffer:
            return
        values = numbers(self._buffer)
        self._buffer = []
        while -(-(self.rows + len(values)) // self.width) > self.most:
            self._merge()
        bins = (self.rows + np.arange(len(values))) // self.width
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        into, there = bins[starts], np.isfinite(values)
        self._sums[into] += np.add.reduceat(np.where(there, values, 0.0), starts)
        self._counts[into] += np.add.reduceat(there, starts, dtype=float)
        self._low[into] = np.fmin(self._low[into], np.fmin.reduceat(values, starts))
        self._high[into] = np.fmax(self._high[into], np.fmax.reduceat(values, starts))
        self.rows += len(values)

    def _merge(self) -> None:
        half = self.most // 2
        for table, both, empty in (
            (self._sums, np.add, 0.0),
            (self._counts, np.add, 0.0),
            (self._low, np.fmin, np.nan),
            (self._high, np.fmax, np.nan),
        ):
            table[:half] = both(table[0 : 2 * half : 2], table[1 : 2 * half : 2])
            table[half:] = empty
        self.width *= 2


def numbers(rows: list[tuple]) -> np.ndarray:
    """Return the rows as an array; NaN for values that are not finite numbers."""
    try:
        values = np.array(rows, float)  # None becomes NaN
    except (TypeError, ValueError, OverflowError):
        values = np.array([[number(each) for each in row] for row in rows])
    values[~np.isfinite(values)] = np.nan
    return values


def number(value: Any) -> float:
    """Return the value as a float; NaN if it is not a finite number."""
    found = finite(value)
    return math.nan if found is None else found
