"""The bigram model: the next token predicted from the current one by counts; the baseline of language models.

    P(b | a) = (n_ab + 1) / (n_a + V)          loss = - 1/N sum over the N pairs (a, b) of log P(b | a)

n_ab: how often token b follows token a in the training rows, n_a = sum over b of n_ab, V tokens. A row x (length,) with
its y has `length` pairs: x[t] and x[t + 1], and x's last token and y. The 1 (Laplace's rule of succession, "Essai
philosophique sur les probabilites", 1814) gives unseen pairs a small probability. Memory 24 V^2 bytes, one pass over
the rows, no training. (Shannon, "A mathematical theory of communication", 1948)"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcdl.errors import UsageError

TOKENS = 1 << 20  # tokens that are counted at once


class Bigram:
    """P(b | a) from counts n_ab (V, V); `log_probability` (V, V): its natural logarithm, row a, column b."""

    def __init__(self, counts: np.ndarray):
        size = len(counts)
        self.log_probability = np.log((counts + 1.0) / (counts.sum(axis=1, keepdims=True) + size))

    @classmethod
    def fit(cls, split: Any, size: int) -> "Bigram":
        """Return the model of a split's pairs; size: V. Raises UsageError for tokens outside 0 ... V - 1.
        split: has `examples`, the number of rows, and rows(start, stop) -> tokens x (rows, length) and y (rows,)."""
        return cls(counts(split, size))

    def loss(self, split: Any) -> float:
        """Return the mean negative log-likelihood (natural logarithm) per pair of a split."""
        found = counts(split, len(self.log_probability))
        return float(-(found * self.log_probability).sum() / found.sum())


def counts(split: Any, size: int) -> np.ndarray:
    """Return n_ab of a split, int64 (V, V); size: V."""
    found = np.zeros(size * size, np.int64)
    for a, b in _pairs(split, size):
        found += np.bincount(a * size + b, minlength=size * size)
    return found.reshape(size, size)


def _pairs(split: Any, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rows = max(1, TOKENS // split.rows(0, 1)[0].size)
    for start in range(0, split.examples, rows):
        x, y = split.rows(start, min(start + rows, split.examples))
        whole = np.column_stack([x, y])
        tokens = whole.astype(np.int64)
        if (tokens != whole).any() or tokens.min() < 0 or tokens.max() >= size:
            raise UsageError(f"the bigram model takes rows of text: tokens, whole numbers from 0 to {size - 1}")
        yield tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
