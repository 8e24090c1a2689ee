"""When a run ends and why: pure decisions, without ranks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.errors import UsageError
from hpcdl.runs.stopping import Budget, Stopping


def stopping(steps=10, **settings):
    made = Stopping(**settings)
    made.steps = steps
    return made


def test_all_steps_are_done():
    run = stopping(steps=3)
    assert [run.over(step) for step in (0, 2, 3, 4)] == [False, False, True, True]
    run.end()
    assert run.reason == "finished"


@pytest.mark.parametrize("told, reason", [((True, True), "signal"), ((False, True), "time limit"), ((0, 0), None)])
def test_a_limit_or_a_signal(told, reason):
    run = stopping()
    run.told(4, *told)
    assert run.reason == reason and run.over(4) == (reason is not None)
    at_its_end = stopping(steps=4)
    at_its_end.told(4, *told)  # nothing is left that could be stopped
    at_its_end.end()
    assert at_its_end.reason == "finished"


@pytest.mark.parametrize(
    "pause, steps, reason",
    [(0, 40, "finished"), (2, 8, "paused"), (2.6, 10, "paused"), (0.01, 1, "paused"), (9.99, 40, "finished")],
)
def test_a_leg_ends_before_the_whole_run_does(pause, steps, reason):
    """After so many epochs of 4 steps; what is as good as the end is the end."""
    run = stopping()
    run.plan(40, 4, pause)
    assert run.steps == steps and run.over(steps) and not run.over(steps - 1)
    run.end()
    assert run.reason == reason


def test_what_ends_a_leg_before_it_pauses_counts():
    run = stopping(budget=Budget(examples=100))
    run.plan(40, 4, 2)
    run.told(4, signalled=True, late=False)
    run.end()
    assert run.reason == "signal"


def test_steps_under_way_are_ended_first():
    run = stopping()
    run.told(4, signalled=True, late=False)
    run.extend(4, 6)
    assert run.reason is None and run.steps == 6 and not run.over(5)
    run.told(5, signalled=False, late=True)  # what it ends for is settled
    run.extend(6, 6)
    assert run.over(6)
    run.end()
    assert run.reason == "signal"


def test_a_horizon_beyond_the_last_step_ends_there():
    run = stopping(steps=5)
    run.told(4, signalled=True, late=False)
    run.extend(4, 7)
    assert run.steps == 5 and run.over(5) and not run.over(4)


def test_a_run_that_goes_on_is_not_extended():
    run = stopping()
    run.extend(4, 6)
    assert run.steps == 10 and run.pending is None


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.integers(0, 5))
def test_patience_ends_after_so_many_evaluations_without_a_better_loss(losses, patience):
    run, best, since = stopping(patience=patience), math.inf, 0
    for loss in losses:
        run.judge(loss, None)
        since = 0 if loss < best else since + 1
        best = min(best, loss)
        assert (run.best, run.evaluations_since_best, run.improved) == (best, since, since == 0)
        assert run.reason == ("patience" if patience and since >= patience else None)
        if run.reason:
            break


def test_a_goal_is_reached():
    run = stopping()
    run.judge(1.0, 0.99)
    assert run.reason is None  # without one
    run.goal = 0.9
    run.judge(1.0, None)
    run.judge(1.0, 0.89)
    assert run.reason is None
    run.judge(1.0, 0.9)
    assert run.reason == "accuracy"


def test_what_ended_it_first_stays():
    run = stopping(patience=1)
    run.goal = 0.5
    run.told(1, signalled=True, late=False)
    run.judge(1.0, 0.9)
    run.judge(1.0, 0.9)
    run.end()
    assert run.reason == "signal"


@pytest.mark.parametrize(
    "budget, used, reason",
    [
        ("seconds=5", (5.0, 0, 0), "budget"),
        ("seconds=5", (4.9, 1e9, 1e9), None),
        ("bytes=1e6,examples=100", (0, 0, 100), "budget"),
        ("bytes=1e6", (0, math.nan, 1e9), None),  # not known: no limit
        ("", (1e9, 1e9, 1e9), None),
    ],
)
def test_a_budget_that_is_used_up(budget, used, reason):
    run = stopping(budget=Budget.read(budget))
    run.used(3, *used)
    assert run.reason == reason
    at_its_end = stopping(steps=3, budget=Budget.read(budget))
    at_its_end.used(3, *used)
    assert at_its_end.reason is None  # it has finished
    told = stopping(budget=Budget.read(budget))
    told.told(3, True, False)
    told.used(3, *used)
    assert told.reason == "signal"


def test_steps_that_were_cut_to_a_budget_of_examples_end_by_it():
    for budget, examples, reason in (
        ("examples=100", 128, "budget"),
        ("examples=100", 64, "finished"),
        ("", 64, "finished"),
    ):
        run = stopping(steps=3, budget=Budget.read(budget))
        run.end(examples)
        assert run.reason == reason


def test_steps_of_a_budget_of_examples():
    assert Budget.read("examples=1e3").steps(100, 64) == 16
    assert Budget.read("examples=1e3").steps(10, 64) == 10
    assert Budget.read("seconds=1").steps(10, 64) == 10


@pytest.mark.parametrize("text", ["minutes=1", "seconds", "seconds=0", "bytes=-1", "examples=many", "bytes=inf"])
def test_bad_budgets(text):
    with pytest.raises(UsageError, match="--budget"):
        Budget.read(text)


def test_a_gap_that_is_small_enough():
    run = stopping()
    run.judge(1.0, None, 0.5)  # no tolerance was asked for
    run.tolerance = 0.01
    for gap in (None, 0.02):
        run.judge(1.0, None, gap)
        assert run.reason is None
    run.reach(None, 0.01)
    assert run.reason == "tolerance" and run.over(1)
