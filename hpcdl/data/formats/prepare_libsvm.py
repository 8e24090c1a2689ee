"""The text of libsvm and svmlight: one sparse row per line, as a data file or as rows to predict.

    LABEL INDEX:VALUE INDEX:VALUE ... # comment

    values   integers 0..255 become bytes, others are float64; the scale is 1: these are counts, not pixels
    labels   integers are classes, others are targets; the file keeps the names of classes other than 0, 1, ... (as -1)
    base     the first index: 0 if train or test has an index 0, else 1 (Chang, Lin, LIBSVM, 2011); or by --zero-based
    width    by the largest index of train and test, or by --features

A text, maybe gzipped, is read once, in blocks of whole lines that compiled loops (kernels/libsvm.py) parse. For a data
file the rows go into temporary files, from which those of train and test are selected in random order. Memory holds a
block of text, a slab of rows, and 16 bytes for each row (label and start)."""

import contextlib
import gzip
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hpcdl.csr import COLUMN, CSR, MOST_FEATURES, START
from hpcdl.data.batch import PredictionRows, RowBlock
from hpcdl.data.format import Info
from hpcdl.data.formats.prepare import Groups, Output, class_numbers, split_by_group
from hpcdl.data.formats.sparse_file import slab_elements
from hpcdl.data.hdf5 import FilePath, shown
from hpcdl.errors import UsageError, blamed_on, unknown
from hpcdl.formatting import counted
from hpcdl.kernels import libsvm

BLOCK = 1 << 20  # bytes of text parsed at a time; more for a longer line
MOST_LINE = 1 << 28  # bytes of a line; a longer one is no row
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which some editors put at the start of a file
NO_INDEX = 1 << 40  # the smallest index of a text without elements
BASES = {"auto": None, "yes": 0, "no": 1}  # of --zero-based
VALUE = np.dtype(np.float64)


def prepare_libsvm(
    path: FilePath,
    output: Output,
    *,
    test: FilePath | None = None,
    regression: bool = False,
    test_fraction: float | None = None,
    seed: int = 0,
    features: int | None = None,
    zero_based: str = "auto",
) -> Info:
    """Make a data file. test: text of the test part; None: a fraction (0.2) is split off. zero_based: one of BASES."""
    if zero_based not in BASES:
        raise unknown("value of --zero-based", zero_based, BASES)
    if features is not None and not 1 <= features < MOST_FEATURES:
        raise UsageError(f"--features is a number from 1 to {MOST_FEATURES - 1}, not {features}")
    if test is not None and test_fraction is not None:
        raise UsageError("--test already gives the test part as a file: leave --test-fraction out, or --test")
    parser = LibsvmParser(BASES[zero_based], features)
    with contextlib.ExitStack() as stack, output.blamed():
        files = [stack.enter_context(tempfile.TemporaryFile(dir=output.path.parent)) for _ in range(2)]
        spool = Spool(output, *files)
        sources = [path] if test is None else [path, test]
        ys = []
        for source in sources:
            labels_read = [np.empty(0)]
            for line, content in texts(source):
                rows, labels = parser.rows(source, line, content)
                spool.add(rows)
                labels_read.append(labels.copy())
            ys.append(np.concatenate(labels_read))
            if not len(ys[-1]):
                raise UsageError(f"{source} has no rows: a row is a line LABEL INDEX:VALUE INDEX:VALUE ...")
        base, width = parser.base_and_features()
        if not spool.elements:
            raise UsageError(f"{path}: all rows hold zeros only; give rows with an element other than 0")
        whole = all((y == np.rint(y)).all() and (abs(y) < 2**53).all() for y in ys)
        numbers, names, classes = class_numbers(path, [y.astype(np.int64) if whole else y for y in ys], regression)
        y = np.concatenate(numbers)
        if test is None:
            chosen = split_by_group(y, classes, test_fraction, seed)
        else:
            chosen = {"train": np.arange(len(ys[0])), "test": np.arange(len(ys[0]), len(y))}
        kind = np.dtype(np.uint8) if spool.bytes else VALUE
        groups: Groups = {
            group: ((len(rows), width), spool.select(rows, base, width, kind), y[rows], {})
            for group, rows in chosen.items()
        }
        qids = int(parser.state[libsvm.QID])
        output.summary += [f"{spool.elements / len(y):.3g} of {width} are not zero on average", f"indices from {base}"]
        output.summary += [f"{counted(qids, 'qid')} left out"] * bool(qids)
        output.summary += [f"classes {', '.join(names[:20])}{' ...' * (len(names) > 20)}"] if names else []
        return output.write(groups, kind, 1.0, names, classes, base=base, sparse=True)


def libsvm_rows(path: str, base: int, width: int, source: str) -> PredictionRows:
    """Return the rows to predict of a text; labels are ignored. base, width, source: of training (`LibsvmParser`)."""

    def load(line: int, content: np.ndarray, first: int) -> RowBlock:
        rows, _ = LibsvmParser(base, width, source).rows(path, line, content)
        x = CSR(rows.data, rows.indices - COLUMN.type(base), rows.indptr, (len(rows), width))
        return RowBlock(x, np.arange(first, first + len(rows)))

    def blocks() -> Iterator[Callable[[], RowBlock]]:
        first = 0
        for line, content in texts(path):
            yield partial(load, line, content, first)
            first += libsvm.count(content, len(content))[1]

    return PredictionRows(path, blocks, features=(width,))


class Spool:
    """Rows in two temporary files, values and indices. elements: number of values. bytes: True if all are 0 ... 255."""

    def __init__(self, output: Output, values: Any, indices: Any):
        self.output, self.files = output, (values, indices)
        self.elements, self.bytes = 0, True
        self.lengths: list[np.ndarray] = []

    def add(self, rows: CSR) -> None:
        """Append the next rows."""
        with self.output.blamed():
            for file, part in zip(self.files, (rows.data, rows.indices), strict=True):
                file.write(part.data)
        self.lengths.append(np.diff(rows.indptr).astype(np.int32))
        self.elements += rows.nnz
        if self.bytes and rows.nnz:
            data = rows.data
            self.bytes = bool(data.min() >= 0 and data.max() <= 255 and (data == np.rint(data)).all())

    def select(self, rows: np.ndarray, base: int, width: int, kind: np.dtype) -> Iterator[CSR]:
        """Yield the rows with these numbers slab by slab, with columns from 0."""
        with self.output.blamed():
            for file in self.files:
                file.flush()
            values, indices = np.memmap(self.files[0], VALUE, "r"), np.memmap(self.files[1], COLUMN, "r")
        starts = np.zeros(sum(map(len, self.lengths)) + 1, START)
        np.cumsum(np.concatenate(self.lengths), out=starts[1:])
        whole = CSR(values, indices, starts, (len(starts) - 1, width))
        ends = np.cumsum(starts[rows + 1] - starts[rows])
        at, most = 0, slab_elements(VALUE)
        while at < len(rows):
            before = ends[at - 1] if at else 0
            end = max(at + 1, int(np.searchsorted(ends, before + most, side="right")))
            part = whole.take(rows[at:end])
            part.elements.data = part.data.astype(kind, copy=False)
            part.elements.indices -= COLUMN.type(base)
            yield part
            at = end


def texts(path: FilePath) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number of lines before, bytes) for each block of a text; UsageError for a file that cannot be read."""
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
                    yield line, np.frombuffer(data, np.uint8, cut)
                    line += data.count(b"\n", 0, cut)
                if len(rest) > MOST_LINE:
                    problem = f"the line has more than {MOST_LINE} bytes; is this libsvm's text?"
                    raise UsageError(f"{path}, line {line + 1}: {problem}")
            if rest:
                yield line, np.frombuffer(rest, np.uint8)


class LibsvmParser:
    """Parses blocks into rows. base: 0, 1 or None (unknown). features: number of features; None: unknown. source: what
    says this number. state: of all blocks, smallest (LOW) and largest (HIGH) index, number of ignored qids (QID)."""

    def __init__(self, base: int | None = None, features: int | None = None, source: str = "--features says"):
        self.base, self.features, self.source = base, features, source
        most = MOST_FEATURES - 1 if features is None else features
        self.limit = most - 1 if base == 0 and features is not None else most
        self.state = np.zeros(libsvm.WORDS, np.int64)
        self.state[libsvm.LOW], self.state[libsvm.HIGH] = NO_INDEX, -1
        self.highest: FilePath = ""  # path of the file with the largest index
        self.allocate(0)

    def allocate(self, size: int) -> None:
        """Allocate arrays for the rows of `size` bytes: a label and a line's end take 2 bytes or more, an element 3."""
        self.size, self.labels, self.starts = size, np.empty(size // 2 + 1), np.zeros(size // 2 + 2, START)
        self.columns, self.values = np.empty(size // 3 + 1, COLUMN), np.empty(size // 3 + 1)
        self.slow_numbers = np.empty((size // 4 + 1, 3), np.int64)

    def rows(self, path: FilePath, lines: int, content: np.ndarray) -> tuple[CSR, np.ndarray]:
        """Return rows (float64, raw indices) and labels of a block, valid until the next call. lines: before it."""
        state = self.state
        if len(content) > self.size:
            self.allocate(max(len(content), BLOCK))
        state[[libsvm.AT, libsvm.LINE, libsvm.ROWS, libsvm.ELEMENTS, libsvm.HARD]] = 0
        state[libsvm.BEFORE], before = lines, state[libsvm.HIGH]
        into = self.labels, self.starts, self.columns, self.values, self.slow_numbers, state
        status = libsvm.parse(content, len(content), self.limit, self.base or 0, *into)
        if status != libsvm.FINE:
            raise UsageError(f"{path}, line {lines + int(state[libsvm.LINE])}: {self._token_error(content, status)}")
        if state[libsvm.HIGH] > before:
            self.highest = path
        for at, end, element in self.slow_numbers[: state[libsvm.HARD]]:
            value = float(content[at:end].tobytes())
            if not math.isfinite(value):
                line = lines + 1 + int(np.count_nonzero(content[:at] == libsvm.NEWLINE))
                number = shown(content[at:end].tobytes().decode())
                raise UsageError(f"{path}, line {line}: {number} is too large a number")
            into[3 if element >= 0 else 0][element if element >= 0 else -1 - element] = value
        rows, elements = int(state[libsvm.ROWS]), int(state[libsvm.ELEMENTS])
        starts = self.starts[: rows + 1]
        return CSR(self.values[:elements], self.columns[:elements], starts, (rows, self.limit + 1)), self.labels[:rows]

    def base_and_features(self) -> tuple[int, int]:
        """Return (base, features) of all blocks; UsageError for an index beyond the given number of features."""
        base, high = int(self.state[libsvm.LOW] > 0) if self.base is None else self.base, int(self.state[libsvm.HIGH])
        if self.features is not None and high - base >= self.features:
            where, last = f"{self.highest}, line {self.state[libsvm.WHERE]}", base + self.features - 1
            raise UsageError(f"{where}: the index {high} is beyond {last}, the last one that {self.source}")
        return base, high + 1 - base if self.features is None else self.features

    def _token_error(self, content: np.ndarray, status: int) -> str:
        """Return the problem with the token at which the compiled loops have stopped with `status`, as a text."""
        start = int(self.state[libsvm.AT])
        token = content[start : start + 200].tobytes().split(b"\n")[0].split()[:1] or [b""]
        found = shown(token[0].decode("utf-8", "replace"))
        value = token[0].rpartition(b":")[2].strip(b"+-").lower()
        number = "is not finite" if value in (b"nan", b"inf", b"infinity") else "is no number"
        last = self.source if self.features is not None else "there can be"
        return {
            libsvm.NO_LABEL: f"the row begins with {found}, not with a label; a row is LABEL INDEX:VALUE ...",
            libsvm.BAD_LABEL: f"the label {found} {number}; a row is LABEL INDEX:VALUE INDEX:VALUE ...",
            libsvm.SEVERAL: f"the row has several labels ({found}); a row must have one",
            libsvm.BAD_PAIR: f"{found} is no INDEX:VALUE",
            libsvm.BAD_INDEX: f"the index in {found} is no whole number",
            libsvm.NEGATIVE: f"the index in {found} is negative; indices count from 0 or 1",
            libsvm.BEYOND: f"the index in {found} is beyond {self.limit}, the last one that {last}",
            libsvm.REPEATED: f"the index in {found} is there twice; a row must have each index once",
            libsvm.UNSORTED: f"the index in {found} comes after a larger one; sort the indices of a row",
            libsvm.ZERO: f"the index in {found} is 0, but indices must count from 1",
            libsvm.BAD_VALUE: f"the value in {found} {number}",
        }[status]
