"""The survey of a table: one pass that finds the type of each column and missing values, and encodes every row.

A column has the type of its first value: number or text. Texts get codes in the order of appearance. A value of the
other type is refused, for a typing error must not turn a column into a hundred features; so are dates, and more texts
than allowed. The rows go to a file as numbers and codes; the survey keeps each row's number, the codes of its label and
group, and its id.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable

import numpy as np

from hpcdl.data.formats.prepare import check_text
from hpcdl.data.formats.table_rows import block_rows
from hpcdl.data.formats.table_source import (
    ABSENT,
    Cells,
    Coder,
    ColumnCoders,
    CsvCells,
    Source,
    growing_coder,
    is_number,
    name_coder,
    special_format,
)
from hpcdl.data.hdf5 import short, shown
from hpcdl.errors import UsageError

NUMBER_PATTERNS = {
    int: re.compile(r"[-+]?(0|[1-9][0-9]*)"),
    float: re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(nan|NaN|inf|Inf)"),
}
MOST_ID = 1000  # bytes of an id; the array gives each the length of the longest


@dataclasses.dataclass
class SurveyPlan:
    """The columns to read. features, labels, group, id: columns by number; group and id may be None.

    texts: coders of the feature columns whose texts are known before; as_texts: columns of texts, even if they look
    like numbers; one_hot: most texts of a column; drop: leave rows with missing values out.
    """

    features: list[int]
    labels: list[int]
    group: int | None = None
    id: int | None = None
    texts: dict[int, Coder] | None = None
    as_texts: tuple[int, ...] = ()
    one_hot: int = 64
    drop: bool = False

    @property
    def others(self) -> list[int]:
        """Label and group columns."""
        return [*self.labels, *([] if self.group is None else [self.group])]


class Survey:
    """The results of the pass.

    numbers: columns of numbers; codes: by column of texts, the code of each text; missing: by column, the count and the
    place of the first; low, high, whole: the range of all numbers, True if all are integers; dropped: rows left out.
    """

    def __init__(self, source: Source, plan: SurveyPlan, spool: Callable[[np.ndarray], None]):
        """Raise UsageError for an invalid table. spool: takes rows (rows, features) of numbers and codes."""
        self.source, self.plan, self.spool = source, plan, spool
        self.low, self.high, self.whole, self.dropped = math.inf, -math.inf, True, 0
        self.missing: dict[int, tuple[int, str]] = {}
        self.codes: dict[int, dict[str, int]] = {column: {} for column in plan.others}
        self.numbers: set[int] = set()
        self.undecided = set(plan.features)
        if plan.texts is None:
            for column in plan.features:
                self._by_type(column)
        else:
            self.undecided, self.numbers = set(), set(plan.features) - set(plan.texts)
        self._rows: list[np.ndarray] = []
        self._others: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        for first, parse in source.blocks(block_rows(len(plan.features))):
            self._add(first, parse())
        if not self._rows:
            raise UsageError(f"{source.path} has no rows")
        self.rows = np.concatenate(self._rows)
        self.ids = None if plan.id is None else np.concatenate(self._ids)
        self._numbered = np.concatenate(self._others)

    def _by_type(self, column: int) -> None:
        kind = self.source.kind(column)
        if kind == "time":
            raise UsageError(
                f"{self.source.path}: {self.source.column_label(column)} holds dates or times; {self._date(column)}"
            )
        if kind == "text" or column in self.plan.as_texts:
            self._is_text(column)
        elif kind == "number":
            self._is_number(column)

    def _is_text(self, column: int) -> None:
        self.codes[column] = {}
        self.undecided.discard(column)

    def _is_number(self, column: int) -> None:
        self.numbers.add(column)
        self.undecided.discard(column)

    def _decide(self, cells: CsvCells) -> None:
        """Decide the type of each undecided column by its first value."""
        for row in range(cells.count):
            if not self.undecided:
                return
            fields = cells.fields(row)
            for column in list(self.undecided):
                if (text := fields[column].strip()) not in ABSENT:
                    (self._is_number if is_number(text) else self._is_text)(column)

    def _add(self, first: int, cells: Cells) -> None:
        plan = self.plan
        if self.undecided and isinstance(cells, CsvCells):
            self._decide(cells)
        known = plan.texts or {}
        before = {column: len(texts) for column, texts in self.codes.items()}
        names: dict[str, int] = {}
        coders: ColumnCoders = {
            column: known.get(column) or (growing_coder(self.codes[column]) if column in self.codes else None)
            for column in [*plan.features, *plan.others]
        }
        if plan.id is not None:
            coders[plan.id] = name_coder(names)
        table = cells.read(coders)
        for column in plan.features:
            if column in self.codes:
                self._check_texts(cells, column, before[column])
        width = len(plan.features) + len(plan.others)
        raw, lost = table[:, : len(plan.features)], np.isnan(table[:, :width])
        for at in np.flatnonzero(lost.any(axis=0)).tolist():
            column = list(coders)[at]
            count, where = self.missing.get(column, (0, cells.where(int(np.argmax(lost[:, at])))))
            self.missing[column] = count + int(lost[:, at].sum()), where
        kept = ~lost.any(axis=1) if plan.drop else np.ones(len(table), bool)
        self.dropped += int((~kept).sum())
        self._measure(raw[kept])
        self.spool(np.ascontiguousarray(raw[kept]))
        self._rows.append(first + np.flatnonzero(kept))
        self._others.append(table[kept, len(plan.features) : width])
        if plan.id is not None:
            texts = np.array([self._id(text, cells) for text in names])
            self._ids.append(texts[table[kept, -1].astype(np.int64)])

    def _measure(self, raw: np.ndarray) -> None:
        numbers = [at for at, column in enumerate(self.plan.features) if column not in self.codes]
        if self.plan.texts:
            numbers = [at for at in numbers if self.plan.features[at] not in self.plan.texts]
        x = raw[:, numbers] if len(numbers) < raw.shape[1] else raw
        if x.size and np.isnan(x).any():
            x = x[~np.isnan(x)]
        if x.size:
            self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))
            self.whole = self.whole and bool((x == np.rint(x)).all())

    def _id(self, text: str, cells: Cells) -> bytes:
        check_text(text, "an id")
        if len(content := text.encode()) > MOST_ID:
            raise UsageError(f"{self.source.path}: an id has {len(content)} bytes, of {MOST_ID}: {shown(text)}")
        return content

    def _check_texts(self, cells: Cells, column: int, before: int) -> None:
        """Raise UsageError if texts that are new in this block cannot become features."""
        new = list(itertools.islice(self.codes[column], before, None))
        name, path = short(self.source.names[column]), self.source.path
        if column not in self.plan.as_texts:
            for text in new:
                if looks := special_format(text):
                    where = self.source.cell(cells.where(cells.texts(column).index(text)), column)
                    todo = self._date(column) if "date" in looks else f"write it as in 1234.5, or --text {name}"
                    raise UsageError(f"{where}: {shown(text)} looks like {looks}; {todo}")
                if self.source.kind(column) is None and is_number(text):
                    where = self.source.cell(cells.where(cells.texts(column).index(text)), column)
                    others = shown(next(iter(self.codes[column])))
                    raise UsageError(
                        f"{where}: {shown(text)} is a number, while others are texts, as {others}; correct them, take "
                        f"all as texts by --text {name}, or leave the column out by --drop {name}"
                    )
        if len(self.codes[column]) > self.plan.one_hot:
            raise UsageError(
                f"{path}: {self.source.column_label(column)} has more than {self.plan.one_hot} different texts, as "
                f"{shown(next(iter(self.codes[column])))}: a feature each; leave it out by --drop {name}, or allow "
                f"more by --one-hot {max(2 * self.plan.one_hot, 1)}"
            )

    def _date(self, column: int) -> str:
        name = short(self.source.names[column])
        return f"derive numbers from them, as the year, or leave the column out by --drop {name}"

    def values(self, column: int) -> np.ndarray:
        """Return a label or group column of all rows: integers if all are, else floats, else texts.

        007, 1_0 and 0x1 are texts, and differ from 7, 10 and 1.
        """
        texts, codes = self.codes[column], self.label_codes(column)
        for kind, written in NUMBER_PATTERNS.items():
            if all(map(written.fullmatch, texts)):
                return np.array([kind(text) for text in texts])[codes]
        return np.array(list(texts))[codes]

    def label_codes(self, column: int) -> np.ndarray:
        """Return the codes of a label or group column of all rows."""
        return self._numbered[:, self.plan.others.index(column)].astype(np.int64)
