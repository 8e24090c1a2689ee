"""Clients: who is asked and who answers depends on seed, round and client alone; the ranks share the work."""

import itertools

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.federated.clients import deal, fate, poisson_sample, sample
from hpcdl.random import Random

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
        asked[turn, poisson_sample(Random(4), turn, having, 0.3)] = 1
    asked = asked[:, having]
    assert np.abs(asked.mean(axis=0) - 0.3).max() < 5 * np.sqrt(0.3 * 0.7 / turns)
    assert abs(asked.sum(axis=1).var() - 7 * 0.3 * 0.7) < 0.2
    assert np.abs(np.corrcoef(asked.T) - np.eye(7)).max() < 5 / np.sqrt(turns)
    assert 0 < (asked.sum(axis=1) == 0).mean() < 0.2
    assert (
        poisson_sample(Random(4), 1, having, 0.3)
        == poisson_sample(Random(4), 1, having, 0.3)
        != poisson_sample(Random(4), 2, having, 0.3)
    )
    assert poisson_sample(Random(4), 0, having, 1.0) == having


def test_fates_come_as_often_as_asked_and_each_by_itself():
    fates = np.array([[fate(Random(1), turn, client, 0.25, 0.5) for client in range(50)] for turn in range(60)])
    for what, wanted in (("dropped", 0.25), ("late", 0.375), ("answers", 0.375)):
        assert abs((fates == what).mean() - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / fates.size)
        assert not any((fates == what).all(axis).any() for axis in (0, 1))  # neither a client's for ever nor a round's
    assert all(fate(Random(1), turn, 3, 0.0, 0.0) == "answers" for turn in range(99))
    more = np.array([[fate(Random(1), turn, client, 0.5, 0.5) for client in range(50)] for turn in range(60)])
    assert (more[fates == "dropped"] == "dropped").all()  # a larger probability takes more, and the same ones


def test_the_work_is_dealt_the_longest_first_in_any_order_of_the_clients():
    work = {client: 5 + client % 3 for client in range(20)}
    shuffled = {client: work[client] for client in np.random.default_rng(0).permutation(20).tolist()}
    dealt = deal(work, 3)
    assert dealt == deal(shuffled, 3) and sorted(itertools.chain(*dealt)) == list(range(20))
    for mine in dealt:
        assert mine == sorted(mine, key=lambda client: (-work[client], client))
    assert deal({}, 3) == [[], [], []]
    assert deal({7: 1, 2: 1, 5: 1}, 4) == [[2], [5], [7], []]
    assert deal({0: 3, 1: 9, 2: 5, 3: 5}, 2) == [[1, 0], [2, 3]]
