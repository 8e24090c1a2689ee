"""Waiting in naps: when it naps and for how long, what it counts, and that all in flight goes on meanwhile."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from hpcdl.comm import Communicator, requests
from hpcdl.comm.requests import AWAKE, LONGEST, nap_until
from hpcdl.comm.watchdog import activity

TICK = 2e-6  # seconds that each look at the clock takes


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when it is looked at and while one sleeps; `naps`: (time before, length) of each sleep."""
    made = SimpleNamespace(now=100.0, naps=[], yields=0)

    def look():
        made.now += TICK
        return made.now

    def sleep(seconds):
        made.naps.append((made.now, seconds))
        made.now += seconds

    def sched_yield():
        made.yields += 1

    monkeypatch.setattr(requests, "time", SimpleNamespace(perf_counter=look, monotonic=look, sleep=sleep))
    monkeypatch.setattr(requests.os, "sched_yield", sched_yield)
    return made


def after(times):
    """A condition that holds when it has been asked so often."""
    count = itertools.count(1)
    return lambda: next(count) > times


def test_no_wait_where_the_condition_holds(clock):
    waited = nap_until(lambda: True, "x", meanwhile=lambda: pytest.fail("there was nothing to wait for"))
    assert waited <= 2 * TICK and not clock.naps and not clock.yields


def test_naps_begin_late_grow_with_the_wait_and_have_a_longest(clock):
    start = clock.now
    waited = nap_until(after(1000), "x")
    assert clock.yields > 0.8 * AWAKE / (3 * TICK)
    times, naps = (np.array(each) for each in zip(*clock.naps, strict=True))
    assert times[0] - start >= AWAKE
    assert np.allclose(naps, np.minimum((times - start) / 8, LONGEST), atol=TICK)
    assert naps.max() == LONGEST and (np.diff(naps) >= 0).all()
    assert waited == pytest.approx(clock.now - start, abs=3 * TICK)
    assert waited / 8 > naps.sum() / 9  # it adds an eighth of the wait, at most


def test_what_is_done_meanwhile_is_no_waiting_and_wakes_it_up(clock):
    work = iter([False] * 300 + [True] + [False] * 10_000)

    def meanwhile():
        did = next(work)
        clock.now += 5.0 * did
        return did

    start, lengths = clock.now, clock.naps
    waited = nap_until(after(700), "x", meanwhile)
    assert waited == pytest.approx(clock.now - start - 5.0, abs=1e-4)
    (again,) = [i for i in range(1, len(lengths)) if lengths[i][1] < lengths[i - 1][1]]
    assert lengths[again - 1][0] < start + 5 < lengths[again][0]
    assert lengths[again][1] < 1.5 * lengths[0][1] < LONGEST


@pytest.mark.parametrize("patient", [False, True])
def test_what_the_watchdog_is_told(patient, clock, monkeypatch):
    """Waiting since the beginning, or since something was done; who is patient never waits for long."""
    monkeypatch.setattr("hpcdl.comm.watchdog.time", requests.time)
    seen = []

    def condition():
        seen.append(activity.waiting())
        clock.now += 1.0
        return len(seen) == 60

    nap_until(condition, "a name", meanwhile=lambda: len(seen) in (30, 31), patient=patient)
    assert {name for name, _ in seen} == {"a name"} and activity.waiting() is None
    longest = [seconds for _, seconds in seen]
    assert max(longest) < 3.5 if patient else 25 < max(longest) < 31
    assert min(longest[30:34]) < 3.5


def test_an_error_leaves_nothing_behind(clock):
    def condition():
        raise ValueError("no")

    with pytest.raises(ValueError):
        nap_until(condition, "x")
    assert activity.operation is None


def test_an_operation_that_is_waited_for_in_naps(world, monkeypatch):
    """Its result, its seconds (all blocked, counted once); and done is done."""
    comm, naps = Communicator(world, "ring"), []

    def counted(condition, name, *arguments, **options):
        nap_until(condition, name, *arguments, **options)
        naps.append(name)
        return 0.25

    monkeypatch.setattr(requests, "nap_until", counted)
    values, room = np.arange(3.0) + world.rank, np.empty(3)
    left = (world.rank - 1) % world.size
    sent = comm.ipush(values, (world.rank + 1) % world.size, tag=4)
    request = comm.iwait(room, left, tag=4)
    before = comm.traffic["wait"].seconds, comm.traffic["wait"].blocked_seconds
    arrival = request.wait(doze=True)
    assert (arrival.source, arrival.size) == (left, 3) and (room == np.arange(3) + left).all()
    counters = comm.traffic["wait"]
    assert naps == ["wait"] and counters.blocked_seconds - before[1] == 0.25
    assert counters.seconds - before[0] == pytest.approx(0.25)
    assert request.wait(doze=True) is arrival and naps == ["wait"]
    sent.wait()
    comm.free()


def test_a_wait_for_a_condition_is_counted_as_blocked(world, monkeypatch):
    comm, given = Communicator(world, "ring"), []

    def told(*arguments):
        given.append(arguments)
        return 0.5

    monkeypatch.setattr("hpcdl.comm.communicator.nap_until", told)
    comm.wait_until(any, all, patient=True)
    comm.wait_until(any)
    assert given == [(any, "wait", all, True), (any, "wait", None, False)]
    assert (comm.traffic["wait"].seconds, comm.traffic["wait"].blocked_seconds) == (1.0, 1.0)
    comm.free()


@pytest.mark.parametrize("doze", [True, False])
def test_all_in_flight_goes_on_whatever_is_waited_for(doze, world):
    """Rank 0 waits for a sum first, the others for a second one, which needs rank 0's part."""
    comm = Communicator(world, "ring")
    vectors = [np.full(1000, float(world.rank + which)) for which in range(3)]
    sums = [comm.iall_reduce(vector) for vector in vectors]
    order = sums if world.rank == 0 else sums[::-1]
    for each in order:
        each.wait(doze=doze)
    last = comm.iall_reduce(np.zeros(10))
    comm.wait_until(lambda: last.done)
    ranks = sum(range(world.size))
    for which, vector in enumerate(vectors):
        assert (vector == ranks + which * world.size).all()
    assert not [each for each in activity.in_flight if each.communicator is comm]
    comm.free()
