"""hpcdl/search/combining.py against numbers that were computed by hand, and against the naive way."""

import itertools
import math

import numpy as np
import pytest

from hpcdl.search import combining

P = np.array([[[0.6, 0.4], [0.2, 0.8]], [[0.1, 0.9], [0.5, 0.5]], [[0.7, 0.3], [0.4, 0.6]]])  # members, rows, classes


def test_votes_of_two_alike_the_first():
    assert combining.votes(P).sum(axis=0).tolist() == [[2, 1], [1, 2]]


def test_disagreement_is_the_share_of_pairs_that_differ():
    p = np.random.default_rng(0).random((5, 20, 4))
    answers = p.argmax(axis=2)
    naive = np.mean([(a != b).mean() for a, b in itertools.combinations(answers, 2)])
    assert combining.disagreement(combining.votes(p).sum(axis=0)) / 20 == pytest.approx(naive)
    assert combining.disagreement(combining.votes(P).sum(axis=0)) == pytest.approx(4 / 3)  # two of three pairs, twice
    assert combining.disagreement(combining.votes(P[:1]).sum(axis=0)) == 0


def test_the_deviation_over_members():
    assert combining.deviation(P.sum(axis=0), np.square(P).sum(axis=0), 3) == pytest.approx(P.std(axis=0))


def test_a_probability_of_nothing_has_a_logarithm():
    assert combining.logs(np.array([0.0, 1.0])) == pytest.approx([math.log(1e-9), 0])


def test_stacking_finds_the_least_loss():
    """Around what it finds, the loss with its ridge is larger in all directions; twice the same bits."""
    rng = np.random.default_rng(1)
    y = rng.integers(0, 3, 60)
    good = combining.softmax(np.eye(3)[y] * 2 + rng.standard_normal((60, 3)))
    bad = combining.softmax(rng.standard_normal((60, 3)))
    logs = combining.logs(np.array([good, bad]))
    w, b = combining.stack(logs, y)

    def loss(w, b):
        p = combining.softmax(np.tensordot(w, logs, 1) + b)[np.arange(60), y]
        return -np.log(p).sum() + 1e-3 * 60 / 2 * (np.square(w - 0.5).sum() + np.square(b).sum())

    best = loss(w, b)
    for _ in range(50):
        assert loss(w + 1e-3 * rng.standard_normal(2), b + 1e-3 * rng.standard_normal(3)) > best
    assert w[0] > 0.5 and abs(w[1]) < 0.3 and b.sum() == pytest.approx(0)
    again = combining.stack(logs, y)
    assert again[0].tobytes() == w.tobytes() and again[1].tobytes() == b.tobytes()


def test_samme_by_hand():
    """Four rows, one wrong: e = 1/4, of two classes a = log 3 and half of the weight on that row (AdaBoost)."""
    wrong = np.array([True, False, False, False])
    error, alpha, weights = combining.samme(np.full(4, 0.25), wrong, 2)
    assert error == 0.25 and alpha == pytest.approx(math.log(3))
    assert weights == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    _, alpha, weights = combining.samme(np.full(4, 0.25), wrong, 3)
    assert alpha == pytest.approx(math.log(3) + math.log(2)) and weights[0] == pytest.approx(6 / 9)


def test_samme_at_chance_and_without_an_error():
    assert combining.samme(np.full(3, 1 / 3), np.array([True, True, False]), 3)[1] == pytest.approx(0)
    error, alpha, weights = combining.samme(np.full(4, 0.25), np.zeros(4, bool), 2)
    assert error == 0 and alpha == pytest.approx(math.log(7)) and weights == pytest.approx([0.25] * 4)
