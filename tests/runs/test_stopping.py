"""When a run ends and why: pure decisions, without ranks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.errors import UsageError
from hpcdl.runs.progress import Progress
from hpcdl.runs.stopping import Budget, Goal, Stopping


def stopping(steps=10, **settings):
    made = Stopping(**settings)
    made.steps = steps
    return made


def after(step, stopped=None, **more):
    return Progress(step=step, stopped=stopped, **more)


def test_all_steps_are_done():
    run = stopping(steps=3)
    assert [run.over(after(step)) for step in (0, 2, 3, 4)] == [False, False, True, True]
    assert run.over(after(0, "signal")) and run.ended() == "finished"


@pytest.mark.parametrize("told, reason", [((True, True), "signal"), ((False, True), "time limit"), ((0, 0), None)])
def test_a_limit_or_a_signal(told, reason):
    assert stopping().told(after(4), *told) == reason
    assert stopping(steps=4).told(after(4), *told) is None  # nothing is left that could be stopped


@pytest.mark.parametrize(
    "pause, steps, reason",
    [(0, 40, "finished"), (2, 8, "paused"), (2.6, 10, "paused"), (0.01, 1, "paused"), (9.99, 40, "finished")],
)
def test_a_leg_ends_before_the_whole_run_does(pause, steps, reason):
    """After so many epochs of 4 steps; what is as good as the end is the end."""
    run = stopping()
    run.plan(40, 4, pause)
    assert run.steps == steps and run.over(after(steps)) and not run.over(after(steps - 1))
    assert run.ended() == reason


def test_steps_under_way_are_ended_first():
    run = stopping()
    going = run.extend(after(4, "signal"), 6)
    assert going == after(4) and run.steps == 6 and not run.over(after(5))
    assert run.told(after(5), False, True) is None  # what it ends for is settled
    assert run.used(after(5), 1e9, 1e9, 1e9) is None
    assert run.extend(after(6), 6) == after(6) and run.over(after(6)) and run.ended() == "signal"


def test_a_horizon_beyond_the_last_step_ends_there():
    run = stopping(steps=5)
    run.extend(after(4, "signal"), 7)
    assert run.steps == 5 and run.over(after(5)) and not run.over(after(4))


def test_a_run_that_goes_on_is_not_extended():
    run = stopping()
    assert run.extend(after(4), 6) == after(4)
    assert run.steps == 10 and run.pending is None


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.integers(0, 5))
def test_patience_ends_after_so_many_evaluations_without_a_better_loss(losses, patience):
    run, progress, best, since = stopping(patience=patience), Progress(), math.inf, 0
    for loss in losses:
        progress = progress.scored({"test_loss": loss}, loss)
        since = 0 if loss < best else since + 1
        best = min(best, loss)
        assert (progress.best, progress.waited, progress.scores) == (best, since, {"test_loss": loss})
        assert run.judged(progress) == ("patience" if patience and since >= patience else None)


def test_a_goal_is_reached():
    run = stopping()
    assert run.judged(after(1, scores={"test_accuracy": 0.99})) is None  # without one
    run.goals = [Goal("test_accuracy", 0.9, "accuracy")]
    found = [run.judged(after(1, scores=scores)) for scores in ({}, {"test_accuracy": 0.89}, {"test_accuracy": 0.9})]
    assert found == [None, None, "accuracy"]


def test_a_goal_is_read_and_reached_from_its_better_side():
    assert Goal.read("") is None
    for text, least, most in (("validation_f1=0.8", 0.79, 0.8), ("test_rmse_mass=3", 3.1, 2.9)):
        goal = Goal.read(text)
        name = text.partition("=")[0]
        assert [goal.reached(scores) for scores in ({}, {name: least}, {name: most})] == [False, False, True]
    for text in ("f1=0.8", "test_f2=0.8", "test_f1", "test_f1=high", "train_loss=0.1", "test_f1_yes=0.8"):
        with pytest.raises(UsageError, match=f"--goal {text}: "):
            Goal.read(text)


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
    assert stopping(budget=Budget.read(budget)).used(after(3), *used) == reason
    assert stopping(steps=3, budget=Budget.read(budget)).used(after(3), *used) is None  # it has finished


def test_steps_that_were_cut_to_a_budget_of_examples_end_by_it():
    for budget, examples, reason in (
        ("examples=100", 128, "budget"),
        ("examples=100", 64, "finished"),
        ("", 64, "finished"),
    ):
        assert stopping(steps=3, budget=Budget.read(budget)).ended(examples) == reason


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
    assert run.judged(after(1, scores={"duality_gap": 0.5})) is None  # no tolerance was asked for
    run.tolerance = 0.01
    found = [run.reached(scores) for scores in ({}, {"duality_gap": 0.02}, {"duality_gap": 0.01})]
    assert found == [None, None, "tolerance"]
