"""The survey of a table: one pass that finds the type of each column and missing values, and encodes every row.

A column has the type of its first value: number or text. Texts get codes in the order of appearance. Values of the
other type are refused, for a typing error must not turn a column into a hundred features; so are dates, and too many
texts. Rows go to a file as numbers and codes; the survey keeps each row's number, label and group codes, and id."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable

import numpy as np

from hpcdl.data.formats import table_source
from hpcdl.data.formats.prepare import check_text
from hpcdl.data.formats.table_rows import block_rows
from hpcdl.data.formats.table_source import Cells, Coder, Source, growing_coder
from hpcdl.data.hdf5 import shown
from hpcdl.errors import UsageError

NUMBER_PATTERNS = {
    int: re.compile(r"[-+]?(0|[1-9][0-9]*)"),
    float: re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(nan|NaN|inf|Inf)"),
}
MOST_ID = 1000  # bytes of an id; the array gives each the length of the longest


@dataclasses.dataclass
class SurveyPlan:
    """The columns to read, by number."""

    features: list[int]
    labels: list[int]
    group: int | None = None
    id: int | None = None
    texts: dict[int, Coder] | None = None  # coders of the feature columns whose texts are known in advance
    hashed: dict[int, Coder] = dataclasses.field(default_factory=dict)  # coders of hashed columns, of a new table
    as_texts: tuple[int, ...] = ()  # columns of texts, even if they look like numbers
    drop: bool = False  # leave rows with missing values out

    @property
    def others(self) -> list[int]:
        return [*self.labels, *([] if self.group is None else [self.group])]


class Survey:
    """The results of the pass. low, high: range of all numbers. whole: all are integers. dropped, unlabelled: rows left
    out."""

    def __init__(self, source: Source, plan: SurveyPlan, spool: Callable[[np.ndarray], None]):
        """Raise UsageError for an invalid table. spool: is called with rows of numbers and codes (rows, features)."""
        self.source, self.plan, self.spool = source, plan, spool
        self.low, self.high, self.whole, self.dropped, self.unlabelled = math.inf, -math.inf, True, 0, 0
        self.missing: dict[int, tuple[int, int]] = {}  # by column: the count, and the row of the first
        self.codes: dict[int, dict[str, int]] = {column: {} for column in plan.others}  # of each text, by column
        self.numbers: set[int] = set()  # columns
        if plan.texts is None:
            for column in set(plan.features) - set(plan.hashed):
                kind = "text" if column in plan.as_texts else source.kind(column)
                if kind == "time":
                    where = f"{source.path}: {source.column_label(column)}"
                    raise UsageError(f"{where} holds dates or times; {self._date(column)}")
                if kind == "text":
                    self.codes[column] = {}
                elif kind == "number":
                    self.numbers.add(column)
        else:
            self.numbers = set(plan.features) - set(plan.texts)
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

    def _add(self, first: int, cells: Cells) -> None:
        plan = self.plan
        known = plan.hashed if plan.texts is None else plan.texts
        before = {column: len(texts) for column, texts in self.codes.items()}
        names: dict[str, int] = {}
        coders: table_source.ColumnCoders = {
            column: known.get(column) or (growing_coder(self.codes[column]) if column in self.codes else None)
            for column in [*plan.features, *plan.others]
        }
        if plan.id is not None:
            coders[plan.id] = table_source.name_coder(names)
        table = cells.read(coders)
        for column in plan.features:
            if column in self.codes:
                self._check_texts(cells, column, before[column])
        width = len(plan.features) + len(plan.others)
        raw, lost = table[:, : len(plan.features)], np.isnan(table[:, :width])
        unlabelled = lost[:, len(plan.features) : len(plan.features) + len(plan.labels)].any(axis=1)
        self.unlabelled += int(unlabelled.sum())
        lost[unlabelled] = False  # such rows are left out
        for at in np.flatnonzero(lost.any(axis=0)).tolist():
            column = list(coders)[at]
            count, row = self.missing.get(column, (0, first + int(np.argmax(lost[:, at]))))
            self.missing[column] = count + int(lost[:, at].sum()), row
        kept = ~(unlabelled | lost.any(axis=1)) if plan.drop else ~unlabelled
        self.dropped += int((~kept).sum() - unlabelled.sum())
        self.spool(np.ascontiguousarray(raw[kept]))
        x = raw[kept][:, [at for at, column in enumerate(plan.features) if column in self.numbers]]
        if (x := x[~np.isnan(x)]).size:
            self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))
            self.whole = self.whole and bool((x == np.rint(x)).all())
        self._rows.append(first + np.flatnonzero(kept))
        self._others.append(table[kept, len(plan.features) : width])
        if plan.id is not None:
            for text in names:
                check_text(text, "an id")
                if (size := len(text.encode())) > MOST_ID:
                    raise UsageError(f"{self.source.path}: the id {shown(text)} has {size} bytes, more than {MOST_ID}")
            self._ids.append(np.array([text.encode() for text in names])[table[kept, -1].astype(np.int64)])

    def _check_texts(self, cells: Cells, column: int, before: int) -> None:
        """Raise UsageError if new texts of this block cannot become features. before: number of texts before it."""
        new = list(itertools.islice(self.codes[column], before, None))
        name = table_source.name_in_shell(self.source.names[column])
        if column not in self.plan.as_texts:
            for text in new:
                looks, problem = table_source.special_format(text), ""
                if looks:
                    todo = self._date(column) if "date" in looks else f"write it as in 1234.5, or --text {name}"
                    problem = f"looks like {looks}; {todo}"
                if problem:
                    where = self.source.cell(cells.where(cells.texts(column).index(text)), column)
                    raise UsageError(f"{where}: {shown(text)} {problem}")

    def _date(self, column: int) -> str:
        name = table_source.name_in_shell(self.source.names[column])
        return f"derive numbers from them, as the year, or leave the column out by --drop {name}"

    def values(self, column: int) -> np.ndarray:
        """Return a label or group column as integers if all are such (not 007, 1_0, 0x1), else floats, else texts."""
        texts, codes = list(self.codes[column]), self.label_codes(column)
        numbers = [text.replace(",", ".") for text in texts] if self.source.decimal == "," else texts
        for kind, written in NUMBER_PATTERNS.items():
            if all(map(written.fullmatch, numbers)):
                return np.array([kind(number) for number in numbers])[codes]
        return np.array(texts)[codes]

    def label_codes(self, column: int) -> np.ndarray:
        return self._numbered[:, self.plan.others.index(column)].astype(np.int64)
