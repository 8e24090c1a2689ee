"""libsvm's text, also known as svmlight's: sparse rows, one a line, that are read block by block.

    LABEL INDEX:VALUE INDEX:VALUE ... # comment

A text may be gzipped, whatever it is called. A block is some whole lines; its rows are found by compiled loops
(kernels/libsvm.py) and are there until the next block is parsed. Whatever is wrong with a line is told with its number.

Whether the first feature has the index 0 or 1, its base, no line says: a text with an index 0 anywhere is taken to
count from 0, any other one from 1 (C.-C. Chang, C.-J. Lin, "LIBSVM: a library for support vector machines", 2011, whose
texts count from 1).
"""

import gzip
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hpcdl.csr import COLUMN, CSR, MOST_FEATURES, START
from hpcdl.data.format import FilePath, shown
from hpcdl.errors import UsageError, blamed_on
from hpcdl.kernels import libsvm

BLOCK = 1 << 20  # bytes of text that are parsed at a time, or a line that is longer
MOST_LINE = 1 << 28  # bytes of a line; a longer one is no row
MARK = b"\xef\xbb\xbf"  # that some editors begin a file with
NOTHING = 1 << 40  # the smallest index where there is none


class Text(NamedTuple):
    """Some whole lines of a text. line: how many there are before them."""

    path: FilePath
    line: int
    content: np.ndarray


def blocks(path: FilePath) -> Iterator[Text]:
    """The text of a file, block by block; UsageError for a file that cannot be read."""
    with blamed_on(f"{path} cannot be read"):
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        opener: Any = gzip.open if zipped else open
        with opener(path, "rb") as file:
            rest, line = file.read(len(MARK)).removeprefix(MARK), 0
            while read := file.read(max(BLOCK, len(rest))):
                found = rest + read
                cut = found.rfind(b"\n") + 1
                rest = found[cut:]
                if cut:
                    yield Text(path, line, np.frombuffer(found, np.uint8, cut))
                    line += found.count(b"\n", 0, cut)
                if len(rest) > MOST_LINE:
                    raise UsageError(
                        f"{path}, line {line + 1}: it has more than {MOST_LINE} bytes; is this libsvm's text?"
                    )
            if rest:
                yield Text(path, line, np.frombuffer(rest, np.uint8))


class LibsvmParser:
    """Turns blocks into rows. base: 0 or 1, or None where it is not known yet; features: their number, or None; said:
    by whom that was said, in messages.

    What it has seen of all blocks: low and high, the smallest and largest index; qids, what stood after qid:, which is
    left out.
    """

    def __init__(self, base: int | None = None, features: int | None = None, said: str = "--features says"):
        self.base, self.features, self.said = base, features, said
        most = MOST_FEATURES - 1 if features is None else features
        self.limit = most - 1 if base == 0 and features is not None else most
        self.state = np.zeros(libsvm.WORDS, np.int64)
        self.state[libsvm.LOW], self.state[libsvm.HIGH] = NOTHING, -1
        self.highest: FilePath = ""  # in which file the largest index was
        self.room(0)

    def room(self, size: int) -> None:
        """Make room for what so many bytes can hold: a label and a line's end take two of them, an element three."""
        self.size, self.labels, self.starts = size, np.empty(size // 2 + 1), np.zeros(size // 2 + 2, START)
        self.columns, self.values = np.empty(size // 3 + 1, COLUMN), np.empty(size // 3 + 1)
        self.hard = np.empty((size // 4 + 1, 3), np.int64)

    def rows(self, text: Text) -> tuple[CSR, np.ndarray]:
        """The rows of a block, as float64 and with indices for columns, and their labels; until the next call.

        UsageError for a line that is no row.
        """
        content, state = text.content, self.state
        if len(content) > self.size:
            self.room(max(len(content), BLOCK))
        state[[libsvm.AT, libsvm.LINE, libsvm.ROWS, libsvm.ELEMENTS, libsvm.HARD]] = 0
        state[libsvm.BEFORE], before = text.line, state[libsvm.HIGH]
        into = self.labels, self.starts, self.columns, self.values, self.hard, state
        said = libsvm.parse(content, len(content), self.limit, self.base or 0, *into)
        if said != libsvm.FINE:
            raise self._refused(text, said)
        if state[libsvm.HIGH] > before:
            self.highest = text.path
        for at, end, element in self.hard[: state[libsvm.HARD]]:
            value = float(content[at:end].tobytes())
            if not math.isfinite(value):
                state[libsvm.AT] = at
                line = 1 + int(np.count_nonzero(content[:at] == libsvm.NEWLINE))
                raise self._wrong(text, line, f"{shown(content[at:end].tobytes().decode())} is too large a number")
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
        """The largest index of all blocks; -1: there is none."""
        return int(self.state[libsvm.HIGH])

    @property
    def qids(self) -> int:
        """How many qid: there were."""
        return int(self.state[libsvm.QID])

    def form(self) -> tuple[int, int]:
        """(base, features) of what was seen; UsageError where nothing was, or the features that were said are fewer."""
        base = self.base if self.base is not None else int(self.low > 0)
        if self.features is not None and self.high - base >= self.features:
            where = f"{self.highest}, line {self.state[libsvm.WHERE]}"
            last = base + self.features - 1
            raise UsageError(f"{where}: the index {self.high} is beyond {last}, the last one that {self.said}")
        return base, self.high + 1 - base if self.features is None else self.features

    def _refused(self, text: Text, said: int) -> UsageError:
        """What is wrong with the token that the loops have stopped at."""
        start = int(self.state[libsvm.AT])
        token = text.content[start : start + 200].tobytes().split(b"\n")[0].split()[:1] or [b""]
        found = shown(token[0].decode("utf-8", "replace"))
        value = token[0].rpartition(b":")[2].strip(b"+-").lower()
        number = "is not finite" if value in (b"nan", b"inf", b"infinity") else "is no number"
        last = self.said if self.features is not None else "there can be"
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
        }[said]
        return self._wrong(text, int(self.state[libsvm.LINE]), what)

    @staticmethod
    def _wrong(text: Text, line: int, what: str) -> UsageError:
        return UsageError(f"{text.path}, line {text.line + line}: {what}")
