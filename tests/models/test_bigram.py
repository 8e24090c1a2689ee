"""The bigram model against counts made by hand, and against counts of the text from which the rows were cut."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.models import bigram
from hpcdl.models.bigram import Bigram


class Rows:
    """A split of two arrays, x and y."""

    def __init__(self, x, y):
        self.x, self.y, self.examples = np.array(x, np.float32), np.array(y), len(y)

    def rows(self, start, stop):
        assert 0 <= start < stop <= self.examples
        return self.x[start:stop], self.y[start:stop]


def test_counted_by_hand():
    train = Rows([[0, 1, 0], [1, 1, 2]], [1, 0])  # 0 1 0 1 | 1 1 2 0: the pair 1 1 between the rows is no pair
    np.testing.assert_array_equal(bigram.counts(train, 3), [[0, 2, 0], [1, 1, 1], [1, 0, 0]])
    model = Bigram.fit(train, 3)
    want = [[1 / 5, 3 / 5, 1 / 5], [2 / 6, 2 / 6, 2 / 6], [2 / 4, 1 / 4, 1 / 4]]
    np.testing.assert_allclose(np.exp(model.log_probability), want, rtol=1e-15)
    test = Rows([[0, 1, 2]], [2])  # 0 1, 1 2, 2 2
    assert model.loss(test) == pytest.approx(-(math.log(3 / 5) + math.log(2 / 6) + math.log(1 / 4)) / 3, rel=1e-15)


@pytest.mark.parametrize("together", [1, 7, 1 << 20])
def test_rows_of_a_text(monkeypatch, together):
    """Rows one after the other hold every pair of the text; a few at a time give the same numbers."""
    monkeypatch.setattr(bigram, "TOKENS", together)
    random = np.random.default_rng(0)
    tokens, test = random.integers(0, 5, 61), random.integers(0, 7, 31)
    train, tested = (Rows(part[:-1].reshape(-1, 6), part[6::6]) for part in (tokens, test))
    pairs, before = Counter(pairwise(tokens)), Counter(tokens[:-1])
    model = Bigram.fit(train, 7)
    losses = [-math.log((pairs[a, b] + 1) / (before[a] + 7)) for a, b in pairwise(test)]
    assert model.loss(tested) == pytest.approx(np.mean(losses), rel=1e-13)
    np.testing.assert_allclose(np.exp(model.log_probability).sum(axis=1), 1, rtol=1e-14)
    np.testing.assert_allclose(model.log_probability[6], -math.log(7))  # never seen: all are equally likely


@pytest.mark.parametrize(("x", "y"), [([[0, 3]], [0]), ([[0, 1]], [3]), ([[-1, 1]], [0]), ([[0.5, 1]], [0])])
def test_what_is_no_text(x, y):
    with pytest.raises(UsageError, match="whole numbers from 0 to 2"):
        Bigram.fit(Rows(x, y), 3)
