"""A block-wise parser of the text format of libsvm and svmlight: one sparse row per line.

    LABEL INDEX:VALUE INDEX:VALUE ... # comment

A text may be gzipped under any name. A block is some whole lines; compiled loops (kernels/libsvm.py) parse its rows,
which are valid until the next block is parsed. Error messages name the line.

The format does not state its base, the index (0 or 1) of the first feature: a text with an index 0 anywhere counts
from 0, any other one from 1 (C.-C. Chang, C.-J. Lin, "LIBSVM: a library for support vector machines", 2011, whose texts
count from 1).
"""

import gzip
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hpcdl.csr import COLUMN, CSR, MOST_FEATURES, START
from hpcdl.data.hdf5 import FilePath, shown
from hpcdl.errors import UsageError, blamed_on
from hpcdl.kernels import libsvm

BLOCK = 1 << 20  # bytes of text parsed at a time; more for a longer line
MOST_LINE = 1 << 28  # bytes of a line; a longer one is no row
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which some editors put at the start of a file
NO_INDEX = 1 << 40  # the smallest index of a text without elements


class TextBlock(NamedTuple):
    """A block of whole lines. line: the number of lines before it."""

    path: FilePath
    line: int
    content: np.ndarray


def blocks(path: FilePath) -> Iterator[TextBlock]:
    """Yield the text of a file block by block; UsageError for a file that cannot be read."""
    with blamed_on(f"{path} cannot be read"):
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        opener: Any = gzip.open if zipped else open
        with opener(path, "rb") as file:
            rest, line = file.read(len(BYTE_ORDER_MARK)).removeprefix(BYTE_ORDER_MARK), 0
            while more := file.read(max(BLOCK, len(rest))):
                data = rest + more
                cut = data.rfind(b"\n") + 1
                rest = data[cut:]
                if cut:
                    yield TextBlock(path, line, np.frombuffer(data, np.uint8, cut))
                    line += data.count(b"\n", 0, cut)
                if len(rest) > MOST_LINE:
                    raise UsageError(
                        f"{path}, line {line + 1}: it has more than {MOST_LINE} bytes; is this libsvm's text?"
                    )
            if rest:
                yield TextBlock(path, line, np.frombuffer(rest, np.uint8))


class LibsvmParser:
    """Parses blocks into rows. base: 0, 1 or None (unknown); features: their number or None; source: of that number.

    Over all blocks: low and high, the smallest and largest index; qids, the number of qid: entries, which are ignored.
    """

    def __init__(self, base: int | None = None, features: int | None = None, source: str = "--features says"):
        self.base, self.features, self.source = base, features, source
        most = MOST_FEATURES - 1 if features is None else features
        self.limit = most - 1 if base == 0 and features is not None else most
        self.state = np.zeros(libsvm.WORDS, np.int64)
        self.state[libsvm.LOW], self.state[libsvm.HIGH] = NO_INDEX, -1
        self.highest: FilePath = ""  # the file with the largest index
        self.allocate(0)

    def allocate(self, size: int) -> None:
        """Allocate arrays for the rows of `size` bytes: a label and a line's end take 2 bytes, an element 3."""
        self.size, self.labels, self.starts = size, np.empty(size // 2 + 1), np.zeros(size // 2 + 2, START)
        self.columns, self.values = np.empty(size // 3 + 1, COLUMN), np.empty(size // 3 + 1)
        self.slow_numbers = np.empty((size // 4 + 1, 3), np.int64)

    def rows(self, text: TextBlock) -> tuple[CSR, np.ndarray]:
        """Return the rows of a block, float64 with indices as columns, and their labels; valid until the next call.

        UsageError for a line that is no row.
        """
        content, state = text.content, self.state
        if len(content) > self.size:
            self.allocate(max(len(content), BLOCK))
        state[[libsvm.AT, libsvm.LINE, libsvm.ROWS, libsvm.ELEMENTS, libsvm.HARD]] = 0
        state[libsvm.BEFORE], before = text.line, state[libsvm.HIGH]
        into = self.labels, self.starts, self.columns, self.values, self.slow_numbers, state
        status = libsvm.parse(content, len(content), self.limit, self.base or 0, *into)
        if status != libsvm.FINE:
            raise self._token_error(text, status)
        if state[libsvm.HIGH] > before:
            self.highest = text.path
        for at, end, element in self.slow_numbers[: state[libsvm.HARD]]:
            value = float(content[at:end].tobytes())
            if not math.isfinite(value):
                state[libsvm.AT] = at
                line = 1 + int(np.count_nonzero(content[:at] == libsvm.NEWLINE))
                raise self._line_error(text, line, f"{shown(content[at:end].tobytes().decode())} is too large a number")
            into[3 if element >= 0 else 0][element if element >= 0 else -1 - element] = value
        rows, elements = int(state[libsvm.ROWS]), int(state[libsvm.ELEMENTS])
        starts = self.starts[: rows + 1]
        return CSR(self.values[:elements], self.columns[:elements], starts, (rows, self.limit + 1)), self.labels[:rows]

    @property
    def low(self) -> int:
        """The smallest index of all blocks."""
        return int(self.state[libsvm.LOW])

    @property
    def high(self) -> int:
        """The largest index of all blocks; -1 if there is none."""
        return int(self.state[libsvm.HIGH])

    @property
    def qids(self) -> int:
        """The number of qid: entries of all blocks."""
        return int(self.state[libsvm.QID])

    def base_and_features(self) -> tuple[int, int]:
        """Return (base, features) of all blocks; UsageError for an index beyond the given number of features."""
        base = self.base if self.base is not None else int(self.low > 0)
        if self.features is not None and self.high - base >= self.features:
            where = f"{self.highest}, line {self.state[libsvm.WHERE]}"
            last = base + self.features - 1
            raise UsageError(f"{where}: the index {self.high} is beyond {last}, the last one that {self.source}")
        return base, self.high + 1 - base if self.features is None else self.features

    def _token_error(self, text: TextBlock, status: int) -> UsageError:
        """Return the error of the token at which the compiled loops have stopped."""
        start = int(self.state[libsvm.AT])
        token = text.content[start : start + 200].tobytes().split(b"\n")[0].split()[:1] or [b""]
        found = shown(token[0].decode("utf-8", "replace"))
        value = token[0].rpartition(b":")[2].strip(b"+-").lower()
        number = "is not finite" if value in (b"nan", b"inf", b"infinity") else "is no number"
        last = self.source if self.features is not None else "there can be"
        what = {
            libsvm.NO_LABEL: f"it begins with {found}, and should with a label; a row is LABEL INDEX:VALUE ...",
            libsvm.BAD_LABEL: f"the label {found} {number}; a row is LABEL INDEX:VALUE INDEX:VALUE ...",
            libsvm.SEVERAL: f"it has several labels ({found}); a row has one here",
            libsvm.BAD_PAIR: f"{found} is no INDEX:VALUE",
            libsvm.BAD_INDEX: f"the index in {found} is no whole number",
            libsvm.NEGATIVE: f"the index in {found} is negative; indices count from 0 or 1",
            libsvm.BEYOND: f"the index in {found} is beyond {self.limit}, the last one that {last}",
            libsvm.REPEATED: f"the index in {found} is there twice; an element is given once",
            libsvm.UNSORTED: f"the index in {found} comes after a larger one; sort the indices of a row",
            libsvm.ZERO: f"the index in {found} is 0, but indices count from 1 here",
            libsvm.BAD_VALUE: f"the value in {found} {number}",
        }[status]
        return self._line_error(text, int(self.state[libsvm.LINE]), what)

    @staticmethod
    def _line_error(text: TextBlock, line: int, what: str) -> UsageError:
        return UsageError(f"{text.path}, line {text.line + line}: {what}")
