"""Preparation of libsvm's text (libsvm.py): sparse rows with one label each.

    values   integers 0..255 become bytes, others are float64; the scale is 1: these are counts, not pixels
    labels   integers are classes, others are targets; the names of -1 and 1, say, stay in the file
    base     0 if an index is 0 anywhere, in train or test, else 1; or by --zero-based
    width    by the largest index of train and test, or by --features

The text is read once. Its rows go into temporary files, from which the rows of train and of test are selected in random
order. Memory holds a block of text, a slab of rows, and the label and start of each row: 16 bytes.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcdl.csr import COLUMN, CSR, MOST_FEATURES, START
from hpcdl.data.format import Info
from hpcdl.data.formats.libsvm import LibsvmParser, blocks
from hpcdl.data.formats.prepare import Groups, Output, class_numbers, split_by_group
from hpcdl.data.formats.sparse_file import slab_elements
from hpcdl.data.hdf5 import FilePath
from hpcdl.errors import UsageError, unknown
from hpcdl.formatting import counted

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
    """Make a data file of libsvm's text. test: the text of the test part; without it a fraction (0.2) is split off.

    zero_based: one of BASES. features: their number.
    """
    if zero_based not in BASES:
        raise unknown("value of --zero-based", zero_based, BASES)
    if features is not None and not 1 <= features < MOST_FEATURES:
        raise UsageError(f"--features is a number from 1 to {MOST_FEATURES - 1}, not {features}")
    if test is not None and test_fraction is not None:
        raise UsageError("the test part is a file of its own: leave --test-fraction out, or --test")
    parser = LibsvmParser(BASES[zero_based], features)
    with contextlib.ExitStack() as stack, output.blamed():
        files = [stack.enter_context(tempfile.TemporaryFile(dir=output.path.parent)) for _ in range(2)]
        spool = Spool(output, *files)
        sources = [path] if test is None else [path, test]
        ys = []
        for source in sources:
            labels_read = [np.empty(0)]
            for text in blocks(source):
                rows, labels = parser.rows(text)
                spool.add(rows)
                labels_read.append(labels.copy())
            ys.append(np.concatenate(labels_read))
            if not len(ys[-1]):
                raise UsageError(f"{source} has no rows: a row is a line LABEL INDEX:VALUE INDEX:VALUE ...")
        base, width = parser.base_and_features()
        if not spool.elements:
            raise UsageError(f"{path}: in no row is anything but zeros")
        whole = all((y == np.rint(y)).all() and (abs(y) < 2**53).all() for y in ys)
        numbers, names, classes = class_numbers(path, [y.astype(np.int64) if whole else y for y in ys], regression)
        if test is None:
            chosen = split_by_group(numbers[0], classes, 0.2 if test_fraction is None else test_fraction, seed)
            labels_of = {group: numbers[0][rows] for group, rows in chosen.items()}
        else:
            cut = len(ys[0])
            chosen = {"train": np.arange(cut), "test": np.arange(cut, cut + len(ys[1]))}
            labels_of = dict(zip(chosen, numbers, strict=True))
        kind = np.dtype(np.uint8) if spool.bytes else VALUE
        groups: Groups = {
            group: ((len(rows), width), spool.select(rows, base, width, kind), labels_of[group], {})
            for group, rows in chosen.items()
        }
        total = sum(map(len, ys))
        output.summary += [f"{spool.elements / total:.3g} of {width} are not zero on the mean", f"indices from {base}"]
        output.summary += [f"{counted(parser.qids, 'qid')} left out"] * bool(parser.qids)
        output.summary += [f"classes {', '.join(names[:20])}{' ...' * (len(names) > 20)}"] if names else []
        return output.write(groups, kind, 1.0, names, classes, base=base, sparse=True)


class Spool:
    """Rows in two temporary files, values and indices, from which they are selected in any order.

    elements: their number; bytes: True if all are integers of 0 to 255.
    """

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
