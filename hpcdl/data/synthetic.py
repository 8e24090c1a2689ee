"""Sparse rows that are drawn, of the shape of documents: for measurements where no collection of texts is at hand.

    a row        n_i words are drawn, n_i from Poisson(n); the words of rank k = 1 ... F with p_k ~ 1 / (k + 2)^power
    values       (1 + log c) log(1 / f_k) for a word that was drawn c times and that a part f_k of the rows has, and the
                 row scaled to 2-norm 1: term frequency and inverse document frequency, as RCV1 has them (Lewis, Yang,
                 Rose, Li, "RCV1: a new benchmark collection for text categorization research", JMLR 5, 2004)
    columns      the ranks shuffled, so that frequent words are not neighbours
    labels       of hidden weights w, for a third of the words sqrt(f_k) times a normal number, for rare words tell
                 less, else 0: s = (x w - middle) / deviation + noise e, e normal. 2 classes: s > 0; K classes: the
                 largest of K such sums; none (regression): s itself

f_k = 1 - (1 - p_k)^n, and n is such that a row has `nonzeros` different words on the mean. `rcv1` has the published
shape of the collection's test part, on which strategies are usually compared, with its training part for a test.

Rows are drawn block by block, each by numbers of its own: the same for the same spec, however much of it is drawn.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from hpcdl.csr import COLUMN, CSR, MOST_FEATURES, START
from hpcdl.data.arrays import from_arrays
from hpcdl.data.dataset import Data
from hpcdl.data.format import Info, check_memory
from hpcdl.data.formats.prepare import Groups, Output
from hpcdl.data.opening import open_data
from hpcdl.errors import UsageError, parse_spec
from hpcdl.formatting import counted
from hpcdl.random import Random

SPECS: dict[str, dict[str, Any]] = {
    "rcv1": dict(rows=781265, test=23149, features=47236, nonzeros=74.0, classes=2, power=1.0, noise=0.25, seed=0),
    "small": dict(rows=2000, test=500, features=400, nonzeros=12.0, classes=2, power=1.0, noise=0.25, seed=0),
}
BLOCK = 4096  # rows that are drawn at a time
WITH_WEIGHT = 1 / 3  # of the words
VALUE = np.dtype(np.float32)


def prepare_synthetic(spec: str, output: Output) -> Info:
    """From a spec: a name in SPECS, and what is to be different, as in small:rows=500,classes=3,seed=1."""
    name, settings = parse_spec("shape of synthetic rows", spec, SPECS)
    made = Synthetic(**settings)
    found: Groups = {}
    for group, rows in (("train", made.rows), ("test", made.test)):
        if rows:
            labels: list[np.ndarray] = []
            found[group] = (rows, made.features), made.drawn(group, rows, labels), partial(np.concatenate, labels), {}
    task = counted(made.classes, "class") if made.classes else "values to predict"
    output.said.append(f"drawn as {name}: {made.nonzeros:g} of {made.features} words a row, {task}, seed {made.seed}")
    return output.write(found, VALUE, 1.0, None, made.classes, base=1, sparse=True)


def drawn_data(spec: str, **how: Any) -> Data:
    """The same rows in memory, with the test part that the spec has; how: the options of `from_arrays`.

    The seed of a spec is that of its rows, `seed` that of their order. UsageError as for a file.
    """
    _, settings = parse_spec("shape of synthetic rows", spec, SPECS)
    made = Synthetic(**settings)
    each = 2 * made.nonzeros * (VALUE.itemsize + COLUMN.itemsize)  # once in blocks, once joined
    check_memory(int((made.rows + made.test) * each), f"{spec}, drawn in memory,")
    arrays: list[Any] = []
    how = {"name": spec, "classes": made.classes, **how}
    for group, rows in (("train", made.rows), ("test", made.test)):
        labels: list[np.ndarray] = []
        parts = list(made.drawn(group, rows, labels))
        arrays += [CSR.joined(parts), np.concatenate(labels)] if rows else [None, None]
    return from_arrays(*arrays, **how)


def drawn_or_opened(name: str, **how: Any) -> Data:
    """What `drawn_data` draws by a spec, and `open_data` opens by all other names."""
    return (drawn_data if name.partition(":")[0] in SPECS else open_data)(name, **how)


class Synthetic:
    """What such rows are drawn by; see SPECS for the settings. UsageError for settings that make no sense."""

    def __init__(
        self,
        rows: int,
        test: int,
        features: int,
        nonzeros: float,
        classes: int,
        power: float,
        noise: float,
        seed: int,
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
        self.words = self._words()
        self.column = self.random("synthetic columns").permutation(features).astype(COLUMN)
        self.idf = np.empty(features)  # by column
        self.idf[self.column] = -np.log(self._parts(self.words))
        self.weights = self._weights()
        x, _ = self._rows("pilot", 0, min(BLOCK, 1024))
        sums = self._sums(x)
        self.middle, self.deviation = np.median(sums, axis=0), sums.std(axis=0) + (sums.std(axis=0) == 0)

    def drawn(self, group: str, rows: int, labels: list[np.ndarray]) -> Iterator[CSR]:
        """The rows of a group, block by block; their labels are added to the list."""
        for block, start in enumerate(range(0, rows, BLOCK)):
            x, random = self._rows(group, block, BLOCK)
            count = min(BLOCK, rows - start)
            labels.append(self._labels(x, random)[:count])
            yield x[:count]

    def _parts(self, words: float) -> np.ndarray:
        """Of how many rows each word is expected in, of each row so many words were drawn."""
        return -np.expm1(words * np.log1p(-self.p))

    def _words(self) -> float:
        """How many words to draw for a row, so that it has as many different ones as it should; by bisection."""
        low, high = 0.0, self.nonzeros
        while self._parts(high).sum() < self.nonzeros:
            low, high = high, 2 * high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._parts(middle).sum() < self.nonzeros else (low, middle)
        return high

    def _weights(self) -> np.ndarray:
        """Hidden weights by column (features, 1 or classes)."""
        random, outputs = self.random("synthetic weights"), self.classes if self.classes > 2 else 1
        weights = random.standard_normal((self.features, outputs))
        weights[random.random(self.features) >= WITH_WEIGHT] = 0
        return weights * np.sqrt(np.exp(-self.idf))[:, None]

    def _rows(self, group: str, block: int, count: int) -> tuple[CSR, np.random.Generator]:
        """Rows of a block, and the generator that goes on to draw their labels."""
        random = self.random("synthetic rows", group, block)
        lengths = np.maximum(1, random.poisson(self.words, count))
        rank = np.minimum(np.searchsorted(self.edges, random.random(lengths.sum()), side="right"), self.features - 1)
        # Row and column as one number: sorted, equal ones are one word that was drawn several times.
        keys = np.repeat(np.arange(count, dtype=np.int64) * self.features, lengths) + self.column[rank]
        keys, times = np.unique(keys, return_counts=True)
        row, column = np.divmod(keys, self.features)
        values = (1 + np.log(times)) * self.idf[column]
        starts = np.searchsorted(row, np.arange(count + 1)).astype(START)
        norms = np.sqrt(np.add.reduceat(values * values, starts[:-1]))
        values = (values / norms[row]).astype(VALUE)
        return CSR(values, column.astype(COLUMN), starts, (count, self.features)), random

    def _sums(self, x: CSR) -> np.ndarray:
        """x w (rows, 1 or classes)."""
        products = x.data[:, None].astype(np.float64) * self.weights[x.indices]
        return np.add.reduceat(products, x.indptr[:-1], axis=0)

    def _labels(self, x: CSR, random: np.random.Generator) -> np.ndarray:
        sums = (self._sums(x) - self.middle) / self.deviation
        sums += self.noise * random.standard_normal(sums.shape)
        if self.classes > 2:
            return sums.argmax(axis=1)
        return sums[:, 0] if not self.classes else (sums[:, 0] > 0).astype(np.int64)
