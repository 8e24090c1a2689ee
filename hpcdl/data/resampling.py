"""Resampling for ensembles: the rows (bootstrap) and the features (random subspace) that a member is trained on.

    rows        n drawn with replacement from the n training examples, with equal weights (the bootstrap of bagging) or
                those of boosting; about 1/e of the examples are left out
                cross-validation: all examples but those of one of K folds, which are drawn at random; each fold has
                equal parts of the classes, as far as their examples can be divided by K
    features    a random fraction of them; the others are 0 in all rows

The draws depend on (seed, member) alone. Drawn rows are numbers into the rows in memory: nothing is copied. Features
left out get the deviation LEFT_OUT in the statistics that standardize rows, so that checkpoints keep them and
predictions leave them out, too. (Breiman, "Bagging predictors", 1996; Ho, "The random subspace method", 1998)"""

import math
from typing import NamedTuple

import numpy as np

from hpcdl.data.dataset import Data
from hpcdl.data.standard import LEFT_OUT, Standard
from hpcdl.errors import UsageError
from hpcdl.random import Random


class Draw(NamedTuple):
    """The rows and the features that a member of an ensemble is trained on."""

    seed: int
    member: int
    rows: bool = False  # True to draw rows
    weights: np.ndarray | None = None  # of the rows; None: equal
    features: float = 1.0  # the fraction that the member sees
    folds: int = 0  # K: the rows without those of fold `member`; 0: no folds

    def examples(self, count: int, classes: np.ndarray | None = None) -> np.ndarray:
        """Return sorted numbers of examples: drawn `count` times from `count`, or outside a fold, or all `count`.
        classes: of the examples, one each, by which folds are stratified."""
        if self.folds:
            order = Random(self.seed)("folds").permutation(count)
            if classes is not None and classes.ndim == 1:  # a text has a class for each token
                order = order[np.argsort(classes[order], kind="stable")]
            return np.sort(order[np.arange(count) % self.folds != self.member])
        if not self.rows:
            return np.arange(count)
        random = Random(self.seed)("bootstrap", self.member)
        if self.weights is None:
            return np.sort(random.integers(0, count, count))
        return np.sort(random.choice(count, count, p=self.weights))

    def left_out(self, width: int) -> np.ndarray:
        """Return the sorted numbers of the features, of `width`, that the member does not see; it sees at least one."""
        seen = max(1, round(self.features * width))
        return np.sort(Random(self.seed)("subspace", self.member).permutation(width)[seen:])

    def resample(self, data: Data) -> Data:
        """Return the data as the member sees them; UsageError for rows not in memory, or features that cannot be 0."""
        if self.rows or self.folds:
            labels = data.train.labels if self.folds and data.classes else None
            data = data.with_rows(self.examples(data.examples, labels))
        if self.features == 1:
            return data
        if data._reader is None:
            raise UsageError("a subspace of the features cannot be taken of the rows of data servers; run without them")
        if data.sparse or data.vocabulary is not None:
            what = "sparse rows, which are not standardized" if data.sparse else "tokens of a text"
            raise UsageError(f"a subspace of the features needs dense rows of numbers, not {what}")
        width = math.prod(data.features)
        statistics = {"mean": np.zeros(width), "deviation": np.ones(width)}
        statistics |= {name: each.copy() for name, each in data.statistics.items()}
        features = self.left_out(width)
        statistics["mean"][features], statistics["deviation"][features] = 0.0, LEFT_OUT
        return data.with_standard(Standard(statistics, data.dtype))
