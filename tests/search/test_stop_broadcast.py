"""A signal to one rank, or the end of the time, is known to all: those that look."""

import time

import pytest

from hpcdl.runs import signals
from hpcdl.search.stop_broadcast import LATE, OTHERS, StopBroadcast


@pytest.fixture(autouse=True)
def no_signals(monkeypatch):
    monkeypatch.setattr(signals, "received", [])
    monkeypatch.setattr(signals, "watchers", [])


def until(condition):
    """Wait for a message, which takes no time to speak of."""
    late = time.monotonic() + 20
    while not condition() and time.monotonic() < late:
        time.sleep(1e-3)
    return condition()


@pytest.mark.parametrize("target", [0, 1])
def test_a_signal_to_one_rank_is_known_to_all(world, target):
    alarm = StopBroadcast(world)
    assert not alarm.poll() and signals.told() == 0
    world.Barrier()
    target %= world.size
    if world.rank == target:
        signals.received.append("SIGUSR1")
    assert until(signals.told)
    assert signals.received == (["SIGUSR1"] if world.rank == target else [OTHERS])
    alarm.close()
    assert signals.received == ["SIGUSR1"] * (world.rank == target) and signals.watchers == []


def test_two_signals_at_once_and_one_that_nobody_has_heard(world):
    for told in (range(world.size), [world.size - 1]):
        alarm = StopBroadcast(world)
        if world.rank in told:
            signals.received.append("SIGTERM")
            assert alarm.poll()
        alarm.close()  # whoever has not looked hears it here: nothing is left for who comes after
        signals.received.clear()
    after = StopBroadcast(world)
    assert not after.poll()
    after.close()


@pytest.mark.parametrize("first", [0, 1])
def test_the_time_is_over_for_all_and_not_a_signal(world, first):
    first %= world.size
    alarm = StopBroadcast(world, 1e-9 if world.rank == first else 3600)  # whose clock is ahead
    assert until(alarm.poll)
    assert alarm.reason == LATE
    alarm.close()
    assert alarm.reason == LATE and signals.received == []


@pytest.mark.parametrize("late", [True, False])
def test_who_has_not_looked_knows_it_in_the_end(world, late):
    alarm, last = StopBroadcast(world, 1e-9 if late and world.rank == world.size - 1 else 3600), world.size - 1
    if world.rank == last:
        signals.received += [] if late else ["SIGTERM"]
        assert alarm.poll()
    alarm.close()
    assert alarm.reason == (LATE if late else "" if world.rank == last else OTHERS)
