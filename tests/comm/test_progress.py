"""What a process waits in; waiting in naps: when it naps and for how long, and what the watchdog is told."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from own_time import set_own_time

from hpcdl.comm import Communicator, progress
from hpcdl.comm.progress import AWAKE, LONGEST, Activity, activity, nap_until

TICK = 2e-6  # seconds that each look at the clock takes


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when it is looked at and while one sleeps; `naps`: (time before, length) of each sleep."""
    made = SimpleNamespace(now=100.0, naps=[], yields=0)

    def look():
        made.now += TICK
        return round(1e9 * made.now)

    def sleep(seconds):
        made.naps.append((made.now, seconds))
        made.now += seconds

    def sched_yield():
        made.yields += 1

    monkeypatch.setattr(progress, "clock", look)
    set_own_time(monkeypatch, progress, sleep=sleep)
    monkeypatch.setattr(progress.os, "sched_yield", sched_yield)
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
def test_what_the_watchdog_is_told(patient, clock):
    """Waiting since the beginning, or since something was done; and whether that may take any time."""
    seen = []

    def condition():
        seen.append(activity.waiting())
        clock.now += 1.0
        return len(seen) == 60

    nap_until(condition, "a name", meanwhile=lambda: len(seen) in (30, 31), patient=patient)
    assert {each.operation for each in seen} == {"a name"} and activity.waiting() is None
    longest = [each.seconds for each in seen]
    assert 25 < max(longest) < 31 and min(longest[30:34]) < 3.5
    assert {each.patient for each in seen} == {patient} and not activity.patient


def test_what_all_know_to_be_going_on():
    """Also for a while after it; not while it waits for others itself."""
    activity = Activity()
    assert not activity.busy(3600)
    with activity.exempt():
        assert activity.busy(0)
        with activity.exempt():
            pass
        assert activity.busy(0)
        with activity.inside("wait"):
            assert not activity.busy(3600)
    assert activity.busy(3600) and not activity.busy(0)


def test_an_error_leaves_nothing_behind(clock):
    def condition():
        raise ValueError("no")

    with pytest.raises(ValueError):
        nap_until(condition, "x")
    assert activity.operation is None


def test_a_call_within_another_leaves_the_outer_one_watched():
    activity = Activity()
    with activity.inside("outer"):
        started = activity.since
        with activity.inside("inner"):
            assert activity.waiting()[0] == "inner"
        assert activity.waiting()[0] == "outer" and activity.since == started
    assert activity.waiting() is None


@pytest.mark.parametrize("way", ["short", "plain"])
def test_an_operation_within_a_nap_leaves_the_nap_watched(way, world):
    """So that --timeout ends a wait during which a rank talks to others."""
    comm, seen = Communicator(world), []

    def meanwhile():
        if way == "short":
            comm.barrier()
        else:
            comm.ibarrier().wait()
        seen.append((activity.operation, activity.since))
        return False

    comm.wait_until(lambda: len(seen) == 3, meanwhile=meanwhile)
    assert seen == [("wait", seen[0][1])] * 3 and activity.operation is None


@pytest.fixture
def spent(monkeypatch):
    """Two lists: what a wait does, in order; nanoseconds that each offer of the core is to take."""
    done, takes, now = [], [], [0]
    monkeypatch.setattr(progress, "clock", lambda: now[0])
    monkeypatch.setattr(activity, "naps", 0)
    monkeypatch.setattr(activity, "polls", progress.POLLS)
    monkeypatch.setattr(activity, "short_slices", False)

    def offer(what):
        done.append(what)
        now[0] += takes.pop(0) if takes else 100

    monkeypatch.setattr(progress.os, "sched_yield", lambda: offer("yield"))
    set_own_time(monkeypatch, progress, sleep=lambda seconds: offer("nap"))
    return done, takes


@pytest.mark.parametrize(("more", "done"), [(-1, 0), (0, 1), (progress.POLLS - 1, 1), (progress.POLLS, 2)])
def test_the_core_is_offered_after_some_polls(more, done, spent):
    activity.block(after(progress.POLLS + more))
    assert spent[0] == ["yield"] * done


def test_where_another_process_has_run_the_core_is_offered_after_each_poll(spent):
    """And after twice as many, 2, 4, ..., once the offers find nobody."""
    done, takes = spent
    takes += [progress.SHARED + 1] * 3
    activity.block(after(progress.POLLS + 2))
    assert len(done) == 3
    activity.block(after(1 + 2 + 4 + 8))
    assert len(done) == 3 + 4


def test_where_others_have_taken_it_waits_are_in_naps_for_a_while(spent, monkeypatch):
    """But not where the kernel gives short slices."""
    done, takes = spent
    monkeypatch.setattr(progress, "NAPS", 4)
    long = [progress.SHARED + 1] * 5
    takes += [progress.PREEMPTED + 1, *long]
    activity.block(after(progress.POLLS + 2))
    activity.block(after(3))  # the next wait goes on with naps
    assert done == ["yield", "nap", "nap", "nap", "nap", "yield"]
    monkeypatch.setattr(activity, "short_slices", True)
    takes[:] = [progress.PREEMPTED + 1, *long]
    activity.block(after(6))
    assert done[6:] == ["yield"] * 6


def test_a_long_wait_for_other_nodes_is_in_naps(spent, monkeypatch):
    """From then on each offer is a nap; the next wait begins with yields again."""
    done, takes = spent
    monkeypatch.setattr(activity, "short_slices", True)
    monkeypatch.setattr(activity, "between_nodes", True)
    takes += [progress.PATIENT + 1]
    activity.block(after(2 * progress.POLLS))
    assert done[0] == "yield" and len(done) > 2 and set(done[1:]) == {"nap"}
    done.clear()
    activity.block(after(progress.POLLS))
    assert done and set(done) == {"yield"}
    monkeypatch.setattr(activity, "between_nodes", False)
    takes[:] = [progress.PATIENT]
    activity.block(after(progress.POLLS + 2))
    assert set(done) == {"yield"}
