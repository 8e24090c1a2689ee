"""Who plays ping-pong with whom, and what comes out of it."""

import pytest
from own_time import set_own_time

from hpcdl.machine import network
from hpcdl.machine.network import LinkSpeed, bandwidth_share, measure_all_reduce, measure_links, pairs, repetitions


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 8, 101])
def test_every_pair_plays_once_or_of_many_neighbours_and_nobody_twice_in_a_round(n):
    players = [3 * i for i in range(n)]
    rounds = pairs(players)
    every = [(a, b) for a in players for b in players if a < b]
    neighbours = [(players[i], players[(i + 1) % n]) for i in range(n)]
    assert sorted(game for each in rounds for game in each) == (every if n <= 6 else neighbours)
    assert n <= 6 or len(rounds) == 2 + n % 2
    for each in rounds:
        playing = [player for game in each for player in game]
        assert len(playing) == len(set(playing))


def test_links_are_known_to_all(world, monkeypatch):
    monkeypatch.setattr(network, "SECONDS", 0.001)
    for players in (list(range(world.size)), [world.size - 1, 0][: world.size], [0]):
        links = measure_links(world, players)
        assert world.allgather(links) == [links] * world.size
        assert [(link.a, link.b) for link in links] == sorted(game for each in pairs(players) for game in each)
        assert all(link.latency > 0 and link.bandwidth > 0 for link in links)


@pytest.mark.mpi(min_size=2)
def test_a_link_is_half_of_the_round_trip_at_its_best(world, monkeypatch):
    """On a clock that says that each round trip takes 2 s more than the one before."""
    tick = [0, 0]

    def clock():
        tick[0] += 1
        tick[1] += (tick[0] % 2 == 0) * tick[0]
        return tick[1]

    set_own_time(monkeypatch, network, perf_counter=clock)
    monkeypatch.setattr(network, "nap_until", lambda condition, name: [None for _ in iter(condition, True)])
    (link,) = measure_links(world, [0, 1])
    # Two rallies that do not count, the second of 4 s; for so long a one, two that count, of 6 and 8 s. Then again, of
    # the long message: 10 and 12 s, then 14 and 16 s.
    assert link == LinkSpeed(0, 1, 6 / 2, network.LONG / (14 / 2))


def test_an_all_reduce(world, monkeypatch):
    monkeypatch.setattr(network, "SECONDS", 0.001)
    for name in ("ring", "mpi"):
        assert len(set(world.allgather(measure_all_reduce(world, name)))) == 1


def test_how_often():
    least, most = network.ROUNDS
    assert repetitions(1e9) == least and repetitions(0) == most
    assert least < repetitions(network.SECONDS / 20) == 20 < most


def test_the_part_of_the_bandwidth():
    assert bandwidth_share(100.0, 4, 1.5, size=100) == pytest.approx(1.0)  # 150 bytes over each link
    assert bandwidth_share(100.0, 2, 2.0, size=100) == pytest.approx(0.5)
