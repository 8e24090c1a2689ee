"""Clients: who is asked and who answers depends on seed, round and client alone; the ranks' work is divided well."""

import itertools

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.random import Random
from hpcdl.federated.clients import fate, longest_first, sample, toss

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="pure functions")


def test_a_sample_has_its_size_and_asks_everyone_alike():
    having, asked = [0, 2, 3, 5, 7, 8, 9], np.zeros(10)
    for turn in range(3000):
        chosen = sample(Random(4), turn, having, 3)
        assert chosen == sorted(set(chosen)) and len(chosen) == 3
        asked[chosen] += 1
    assert asked[[1, 4, 6]].sum() == 0
    assert np.abs(asked[having] / 3000 - 3 / 7).max() < 5 * np.sqrt(3 / 7 * 4 / 7 / 3000)
    assert sample(Random(4), 0, having, 7) == sample(Random(4), 1, having, 99) == having


def test_each_client_tosses_a_coin_of_its_own():
    """Of 7 clients with probability 0.3: a binomial number of them, any pair as often as independence says."""
    having, turns = [0, 2, 3, 5, 7, 8, 9], 4000
    asked = np.zeros((turns, 10))
    for turn in range(turns):
        asked[turn, toss(Random(4), turn, having, 0.3)] = 1
    asked = asked[:, having]
    assert np.abs(asked.mean(axis=0) - 0.3).max() < 5 * np.sqrt(0.3 * 0.7 / turns)
    assert abs(asked.sum(axis=1).var() - 7 * 0.3 * 0.7) < 0.2
    assert np.abs(np.corrcoef(asked.T) - np.eye(7)).max() < 5 / np.sqrt(turns)
    assert 0 < (asked.sum(axis=1) == 0).mean() < 0.2
    assert toss(Random(4), 1, having, 0.3) == toss(Random(4), 1, having, 0.3) != toss(Random(4), 2, having, 0.3)
    assert toss(Random(4), 0, having, 1.0) == having


def test_the_same_seed_gives_the_same_rounds():
    rounds = [[sample(Random(seed), turn, range(50), 5) for turn in range(9)] for seed in (1, 1, 2)]
    assert rounds[0] == rounds[1] != rounds[2]
    assert len(set(map(tuple, rounds[0]))) == 9


def test_fates_come_as_often_as_asked_and_each_by_itself():
    fates = np.array([[fate(Random(1), turn, client, 0.25, 0.5) for client in range(50)] for turn in range(60)])
    for what, wanted in (("dropped", 0.25), ("late", 0.375), ("answers", 0.375)):
        assert abs((fates == what).mean() - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / fates.size)
        assert not any((fates == what).all(axis).any() for axis in (0, 1))  # neither a client's for ever nor a round's
    assert all(fate(Random(1), turn, 3, 0.0, 0.0) == "answers" for turn in range(99))
    more = np.array([[fate(Random(1), turn, client, 0.5, 0.5) for client in range(50)] for turn in range(60)])
    assert (more[fates == "dropped"] == "dropped").all()  # a larger probability takes more, and the same ones


def busiest(work, dealt):
    return max(sum(work[client] for client in mine) for mine in dealt)


def best(work, ranks):
    """The least possible work of the busiest rank, by trying all divisions."""
    return min(
        busiest(work, [[client for client, at in zip(work, where, strict=True) if at == rank] for rank in range(ranks)])
        for where in itertools.product(range(ranks), repeat=len(work))
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_longest_first_keeps_its_bound(ranks):
    random = np.random.default_rng(ranks)
    for _ in range(25):
        work = dict(enumerate(random.integers(1, 30, random.integers(1, 8)).tolist()))
        dealt = longest_first(work, ranks)
        assert sorted(itertools.chain(*dealt)) == sorted(work) and len(dealt) == ranks
        assert busiest(work, dealt) <= (4 / 3 - 1 / (3 * ranks)) * best(work, ranks) + 1e-9


def test_longest_first_at_its_worst():
    """Graham's own example: 2 N - 1, 2 N - 1, ..., N + 1, N + 1, N, N, N."""
    for ranks in (2, 3, 4):
        lengths = [n for n in range(2 * ranks - 1, ranks, -1) for _ in range(2)] + [ranks] * 3
        work = dict(enumerate(lengths))
        assert busiest(work, longest_first(work, ranks)) == 4 * ranks - 1
        assert sum(lengths) == ranks * 3 * ranks  # so 3 N is the best there is


def test_longest_first_is_the_same_in_any_order_of_the_clients():
    work = {client: 5 + client % 3 for client in range(20)}
    shuffled = {client: work[client] for client in np.random.default_rng(0).permutation(20).tolist()}
    assert longest_first(work, 3) == longest_first(shuffled, 3)
    assert longest_first({}, 3) == [[], [], []]
    assert longest_first({7: 1, 2: 1, 5: 1}, 4) == [[2], [5], [7], []]
