"""What ranks agree on between steps: the sums of losses, any signal, rank 0's clock, and when to meet again."""

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.comm.counting import Counters
from hpcdl.comm.trace import Traffic
from hpcdl.runs import agreement
from hpcdl.runs.agreement import Agreement, NotFinite, Step


@pytest.fixture
def meeting(world):
    comm = Communicator(world, "tree")
    yield Agreement(comm, step=4)
    comm.free()


def done(rank, count):
    return [Step(10.0 * rank + step, 6, float(step)) for step in range(count)]


def meet(meeting, signals=0, time_limit=0, sent=(0, 0), threads=0, steps=None):
    """Meet after one step, or these."""
    meeting.steps_done = steps or done(0, 1)
    return meeting.meet(signals, time_limit, sent, threads)


def test_losses_are_summed_and_the_rest_is_each_ranks_own(meeting, world):
    steps, signalled, late, *_ = meet(meeting, steps=done(world.rank, 3))
    ranks = world.size
    assert [step.loss for step in steps] == [10 * ranks * (ranks - 1) / 2 + ranks * step for step in range(3)]
    assert [(step.total, step.seconds) for step in steps] == [(6, 0.0), (6, 1.0), (6, 2.0)]
    assert (signalled, late, meeting.step, meeting.steps_done) == (False, False, 7, [])


def test_what_all_ranks_have_sent_is_told_beside(meeting, world):
    traffic = Traffic(push=Counters(calls=1, bytes=100 + world.rank, messages=2))
    ranks = world.size
    assert meet(meeting, sent=traffic.sent_so_far).sent == (100 * ranks + ranks * (ranks - 1) / 2, 2 * ranks)
    if world.rank == world.size - 1:
        traffic["all_reduce"].messages = None  # a library's own hides them
    assert np.isnan(meet(meeting, sent=traffic.sent_so_far).sent[1])


def test_a_signal_on_any_rank_and_the_clock_of_rank_0(meeting, world):
    assert meet(meeting, signals=2 * (world.rank == world.size - 1)).signalled
    meeting.begun -= 100.0 * (world.rank == 0)
    assert meet(meeting, time_limit=50.0).late
    meeting.begun += 100.0 if world.rank == 0 else -100.0  # the clocks of others do not count
    assert not meet(meeting, time_limit=50.0).late


@pytest.mark.parametrize("taken, interval", [(0.5, 1), (0.1, 1), (0.03, 3), (1e-9, agreement.MOST)])
def test_when_to_meet_again_follows_how_long_a_step_takes_on_rank_0(meeting, world, monkeypatch, taken, interval):
    now = [0.0]
    monkeypatch.setattr(agreement.drill, "seconds", lambda: now[0])
    meeting.start()
    now[0] = 2 * taken if world.rank == 0 else 1e3
    meet(meeting, steps=done(0, 2))
    assert meeting.interval == interval
    assert [meeting.due(meeting.step + steps) for steps in (interval - 1, interval)] == [False, True]


@pytest.mark.parametrize("took, pause", [(0.001, 0.1), (0.02, 0.4), (1.0, 2.0)])
def test_meetings_that_take_long_are_seldom(meeting, world, monkeypatch, took, pause):
    """As on a network of high latency: a twentieth of the time at most, but every two seconds."""
    now = [0.0]
    monkeypatch.setattr(agreement.drill, "seconds", lambda: now[0])
    add = meeting.comm.all_reduce

    def all_reduce(message):
        now[0] += took
        add(message)

    monkeypatch.setattr(meeting.comm, "all_reduce", all_reduce)
    meeting.start()
    for _ in range(2):  # how long the first takes is known to the second
        now[0] += 0.01
        meet(meeting)
    assert meeting.interval == pytest.approx(pause / 0.01, abs=1)


def test_fewer_meetings_where_they_cost_too_much(meeting):
    meeting.fewest = 8
    meeting.met -= 100
    meet(meeting)
    assert meeting.interval == 8


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_the_first_loss_that_is_no_number_is_named_with_its_rank(meeting, world, wrong):
    last = world.size - 1
    steps = [Step(wrong if (world.rank, step) in ((last, 2), (0, 3)) else 1.0, 6, 0.0) for step in range(5)]
    with pytest.raises(NotFinite) as found:
        meet(meeting, steps=steps)
    assert found.value.args == (4 + 3, last)


def test_fewer_threads_where_one_is_short_of_cores_and_more_where_all_have_some(meeting, world):
    last = world.rank == world.size - 1
    for votes, found in ((-1 if last else 1, -1), (1, 1), (0, 0), (1 if last else 0, int(world.size == 1))):
        assert meet(meeting, threads=votes).threads == found
