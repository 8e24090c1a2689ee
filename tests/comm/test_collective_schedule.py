"""How a wait is spent: looking, then offering the core to others, and in naps where they have taken it."""

import os

import pytest

from hpcdl.comm import collective_schedule


@pytest.fixture
def spent(monkeypatch):
    """Two lists: what a wait does, in order; nanoseconds that each offer of the core is to take."""
    done, takes, now = [], [], [0]
    monkeypatch.setattr(collective_schedule, "clock", lambda: now[0])
    monkeypatch.setattr(collective_schedule.contention, "naps", 0)

    def offer(what):
        done.append(what)
        now[0] += takes.pop(0) if takes else 100

    monkeypatch.setattr(os, "sched_yield", lambda: offer("yield"))
    monkeypatch.setattr(collective_schedule.time, "sleep", lambda seconds: offer("nap"))
    return done, takes


def after(looks):
    """A condition that holds at that look."""
    left = iter(range(looks))
    return lambda: next(left, None) is None


def test_what_comes_soon_is_looked_for_without_offering_the_core(spent):
    collective_schedule.block(after(collective_schedule.POLLS - 1))
    assert spent[0] == []


def test_then_the_core_is_offered_between_two_looks(spent):
    collective_schedule.block(after(collective_schedule.POLLS + 3))
    assert spent[0] == ["yield"] * 3


def test_where_others_have_taken_it_waits_are_in_naps_for_a_while(spent, monkeypatch):
    done, takes = spent
    monkeypatch.setattr(collective_schedule, "NAPS", 4)
    takes += [100, collective_schedule.PREEMPTED + 1, 100, 100]
    collective_schedule.block(after(collective_schedule.POLLS + 4))
    collective_schedule.block(after(collective_schedule.POLLS + 4))  # the next wait begins with naps
    assert done == ["yield", "yield", "nap", "nap", "nap", "nap", "yield", "yield"]
