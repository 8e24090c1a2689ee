"""Synthetic sparse rows with the statistics of documents, for measurements without a collection of texts.

    a row        n_i words, n_i from Poisson(n); the word of rank k = 1 ... F is drawn with p_k ~ 1 / (k + 2)^power
    values       tf-idf: (1 + log c) log(1 / f_k) for a word drawn c times that a fraction f_k of the rows has; the row
                 is scaled to 2-norm 1, as in RCV1 (Lewis, Yang, Rose, Li, JMLR 5, 2004)
    columns      the ranks shuffled, so that frequent words are not neighbours
    labels       from hidden weights w: a third of the words have sqrt(f_k) times a normal number (rare words tell
                 less), the others 0. s = (x w - middle) / deviation + noise e, e normal. 2 classes: s > 0; K classes:
                 the largest of K such sums; 0 classes (regression): s itself

f_k = 1 - (1 - p_k)^n, with n such that a row has `nonzeros` different words on average. `rcv1` has the published shape:
strategies are usually compared on the collection's test part, so that part trains, and the training part tests. Each
block of rows has its own random stream: a spec gives the same rows, however many of them are drawn."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hpcdl.csr import COLUMN, CSR, MOST_FEATURES, START
from hpcdl.data.arrays import from_arrays
from hpcdl.data.dataset import Data
from hpcdl.data.format import Info
from hpcdl.data.formats.prepare import Groups, Output
from hpcdl.data.hdf5 import check_memory
from hpcdl.data.opening import open_data
from hpcdl.errors import UsageError, parse_spec
from hpcdl.formatting import counted
from hpcdl.random import Random

SPECS: dict[str, dict[str, Any]] = {
    "rcv1": dict(rows=781265, test=23149, features=47236, nonzeros=74.0, classes=2, power=1.0, noise=0.25, seed=0),
    "small": dict(rows=2000, test=500, features=400, nonzeros=12.0, classes=2, power=1.0, noise=0.25, seed=0),
}
BLOCK = 4096  # rows drawn at a time
WITH_WEIGHT = 1 / 3  # of the words
VALUE = np.dtype(np.float32)


def prepare_synthetic(spec: str, output: Output) -> Info:
    """Make a data file of a spec, a name in SPECS with settings, as small:rows=500,classes=3,seed=1. UsageError."""
    drawn = Synthetic.of(spec)
    groups: Groups = {group: ((rows, drawn.features), parts, y, {}) for group, rows, parts, y in drawn.groups()}
    task = counted(drawn.classes, "class") if drawn.classes else "values to predict"
    words = f"{drawn.nonzeros:g} of {drawn.features} words a row"
    output.summary.append(f"drawn as {spec.partition(':')[0]}: {words}, {task}, seed {drawn.seed}")
    return output.write(groups, VALUE, 1.0, None, drawn.classes, base=1, sparse=True)


def draw_data(spec: str, **options: Any) -> Data:
    """Return the rows of a spec, drawn into memory by the seed in it. Raises UsageError. options: of `from_arrays`."""
    drawn = Synthetic.of(spec)
    row_bytes = 2 * drawn.nonzeros * (VALUE.itemsize + COLUMN.itemsize)  # once in blocks, once joined
    check_memory(int((drawn.rows + drawn.test) * row_bytes), f"{spec}, drawn in memory,")
    arrays = [array for _, _, parts, labels in drawn.groups() for array in (CSR.joined(list(parts)), labels())]
    return from_arrays(*arrays, **{"name": spec, "classes": drawn.classes, **options})


def draw_or_open_data(name: str, **options: Any) -> Data:
    """Return `draw_data` of a synthetic spec, else `open_data` of the name."""
    return (draw_data if name.partition(":")[0] in SPECS else open_data)(name, **options)


class Synthetic:
    """The generator of synthetic rows; settings as in SPECS. UsageError for settings out of range."""

    def __init__(
        self, rows: int, test: int, features: int, nonzeros: float, classes: int, power: float, noise: float, seed: int
    ):
        self.rows, self.test, self.features, self.nonzeros = rows, test, features, nonzeros
        self.classes, self.noise, self.seed, self.random = classes, noise, seed, Random(seed)
        fits = {
            "rows should be 1 or more": rows >= 1,
            "test should be 0 or more": test >= 0,
            f"features should be 2 to {MOST_FEATURES - 1}": 2 <= features < MOST_FEATURES,
            "nonzeros should be from 1 to half of the features": 1 <= nonzeros <= features / 2,
            "classes should be 0 (values to predict), 2 or more": classes == 0 or classes >= 2,
            "power should be from 0 to 3": 0 <= power <= 3,
            "noise should be 0 or more": 0 <= noise < np.inf,
        }
        for what, holds in fits.items():
            if not holds:
                raise UsageError(f"synthetic rows: {what}")
        check_memory(8 * features * (3 + max(1, classes * (classes > 2))), f"synthetic rows of {features} features")
        p = (np.arange(features) + 3.0) ** -power
        self.p = p / p.sum()
        self.edges = np.cumsum(self.p)
        self.words = self._words_per_row()
        self.column = self.random("synthetic columns").permutation(features).astype(COLUMN)
        self.idf = np.empty(features)  # by column
        self.idf[self.column] = -np.log(self._document_frequency(self.words))
        self.weights = self._weights()
        x, _ = self._rows("pilot", 0, min(BLOCK, 1024))
        sums = self._sums(x)
        self.middle, self.deviation = np.median(sums, axis=0), sums.std(axis=0) + (sums.std(axis=0) == 0)

    @classmethod
    def of(cls, spec: str) -> "Synthetic":
        """Return the generator of a spec."""
        return cls(**parse_spec("shape of synthetic rows", spec, SPECS)[1])

    def groups(self) -> Iterator[tuple[str, int, Iterator[CSR], Callable[[], np.ndarray]]]:
        """Yield each group's name, row count, blocks, and a function that returns its labels after the last block."""
        for group, rows in (("train", self.rows), ("test", self.test)):
            if rows:
                labels: list[np.ndarray] = []
                yield group, rows, self.blocks(group, rows, labels), partial(np.concatenate, labels)

    def blocks(self, group: str, rows: int, labels: list[np.ndarray]) -> Iterator[CSR]:
        """Yield the rows of a group block by block; append their labels to the list."""
        for block, start in enumerate(range(0, rows, BLOCK)):
            x, random = self._rows(group, block, BLOCK)
            count = min(BLOCK, rows - start)
            labels.append(self._labels(x, random)[:count])
            yield x[:count]

    def _document_frequency(self, words: float) -> np.ndarray:
        """Return the expected fraction of rows that hold each word (features,), with `words` draws per row."""
        return -np.expm1(words * np.log1p(-self.p))

    def _words_per_row(self) -> float:
        """Return n, the mean number of draws per row that gives `nonzeros` different words, by bisection."""
        low, high = 0.0, self.nonzeros
        while self._document_frequency(high).sum() < self.nonzeros:
            low, high = high, 2 * high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._document_frequency(middle).sum() < self.nonzeros else (low, middle)
        return high

    def _weights(self) -> np.ndarray:
        """Draw the hidden weights (features, 1 or classes)."""
        random, outputs = self.random("synthetic weights"), self.classes if self.classes > 2 else 1
        weights = random.standard_normal((self.features, outputs))
        weights[random.random(self.features) >= WITH_WEIGHT] = 0
        return weights * np.sqrt(np.exp(-self.idf))[:, None]

    def _rows(self, group: str, block: int, count: int) -> tuple[CSR, np.random.Generator]:
        """Return the rows of a block, and the generator that then draws their labels."""
        random = self.random("synthetic rows", group, block)
        lengths = np.maximum(1, random.poisson(self.words, count))
        rank = np.minimum(np.searchsorted(self.edges, random.random(lengths.sum()), side="right"), self.features - 1)
        # One key per (row, column): equal keys are one word that was drawn several times.
        keys = np.repeat(np.arange(count, dtype=np.int64) * self.features, lengths) + self.column[rank]
        keys, times = np.unique(keys, return_counts=True)
        row, column = np.divmod(keys, self.features)
        values = (1 + np.log(times)) * self.idf[column]
        starts = np.searchsorted(row, np.arange(count + 1)).astype(START)
        norms = np.sqrt(np.add.reduceat(values * values, starts[:-1]))
        values = (values / norms[row]).astype(VALUE)
        return CSR(values, column.astype(COLUMN), starts, (count, self.features)), random

    def _sums(self, x: CSR) -> np.ndarray:
        """Return x w (rows, 1 or classes)."""
        products = x.data[:, None].astype(np.float64) * self.weights[x.indices]
        return np.add.reduceat(products, x.indptr[:-1], axis=0)

    def _labels(self, x: CSR, random: np.random.Generator) -> np.ndarray:
        sums = (self._sums(x) - self.middle) / self.deviation
        sums += self.noise * random.standard_normal(sums.shape)
        if self.classes > 2:
            return sums.argmax(axis=1)
        return sums[:, 0] if not self.classes else (sums[:, 0] > 0).astype(np.int64)
