"""Target encoding of a column with many texts: each text becomes the shrunk mean of the labels of its rows.

    e(v) = (sum_v + m mean) / (n_v + m)   sum_v, n_v: sum and number of the targets of the rows with text v
    m    = s2 / t2                        mean, t2: mean and variance of all targets; s2: variance around texts' means

A missing text and one that the training rows do not have become the mean. A target is a value to predict, or 1 in a row
of a class and 0 in others; of two classes the second has a feature, of more classes each. (Micci-Barreca, "A
preprocessing scheme for high-cardinality categorical attributes in classification and prediction problems", 2001)

A training row's encoding must not contain the row's own label, from which a model would read it: a training row
gets the encoding that the other FOLDS - 1 parts of them give (cross-fitting; Pargent et al., "Regularized target
encoding outperforms traditional methods in supervised machine learning with high cardinality features", 2022)."""

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.random import Random

FOLDS = 5


def targets_of(y: np.ndarray, classes: int) -> np.ndarray:
    """Return the targets (rows, k) of labels: classes (rows,), or values (rows,) or (rows, k)."""
    if classes:
        return (y[:, None] == np.arange(classes)[classes == 2 :]).astype(np.float64)
    return y.reshape(len(y), -1).astype(np.float64)


def text_means(codes: np.ndarray, targets: np.ndarray, count: int) -> np.ndarray:
    """Return e (count + 1, k), whose last row is for other texts. codes (rows,): of each row's text, `count`: missing.
    targets: (rows, k)."""
    mean, t2 = targets.mean(axis=0), targets.var(axis=0)
    n = np.bincount(codes, minlength=count + 1)[:, None]
    sums = np.zeros((count + 1, targets.shape[1]))
    np.add.at(sums, codes, targets)
    within = targets - (sums / np.maximum(n, 1))[codes]
    freedom = len(codes) - np.count_nonzero(n)
    s2 = np.square(within).sum(axis=0) / freedom if freedom else t2
    m = np.divide(s2, t2, out=np.zeros_like(t2), where=t2 > 0)
    n[count] = sums[count] = 0
    return np.divide(sums + m * mean, n + m, out=np.broadcast_to(mean, sums.shape).copy(), where=n + m > 0)


def cross_fitted(codes: np.ndarray, targets: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the encoding (rows, k) of training rows, each by the rows of the other folds. UsageError: one row."""
    if len(codes) < 2:
        raise UsageError("--categories target needs two training rows or more")
    fold = Random(seed)("target folds").permutation(len(codes)) % FOLDS
    result = np.empty_like(targets)
    for each in range(min(FOLDS, len(codes))):
        mine = fold == each
        result[mine] = text_means(codes[~mine], targets[~mine], count)[codes[mine]]
    return result
