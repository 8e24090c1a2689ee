"""Population based training: the paper's toy, who copies whom, and how a number changes."""

import numpy as np
import pytest
from searching import one_after_another

from hpcdl.search.methods.pbt import PopulationBasedTraining
from hpcdl.search.methods.random import point
from hpcdl.search.space import Space
from hpcdl.search.tasks import SearchTask

SPACE = Space.read(["lr=log:0.001..0.5", "batch-size=int:1..512:log", "o=adam|sgd", "model=gpt:layers=2|mlp"])


def population(count=10, interval=1, most=5, space=SPACE, seed=0):
    return PopulationBasedTraining(space, count, seed, interval, most)


def test_the_toy_of_the_paper():
    """Q = 1.2 - (a^2 + b^2) is scored; a descends along h_0 a^2, b along h_1 b^2, so that either h alone gets stuck."""
    space = Space.read(["h0=0..1", "h1=0..1"])

    def trained(exploit):
        pbt = population(2, 1, 60, space)
        pbt.members[0].values, pbt.members[1].values = {"h0": 1.0, "h1": 0.0}, {"h0": 0.0, "h1": 1.0}
        weights, best = [(0.9, 0.9), (0.9, 0.9)], -1.0
        while task := pbt.ask():
            if exploit:
                h0, h1 = task.values["h0"], task.values["h1"]
                a, b = weights[task.trial if task.parent is None else task.parent]
            else:
                (h0, h1), (a, b) = [(1, 0), (0, 1)][task.trial], weights[task.trial]
            for _ in range(4):
                a, b = a - 0.02 * h0 * a, b - 0.02 * h1 * b
            weights[task.trial] = a, b
            best = max(best, 1.2 - (a * a + b * b))
            pbt.tell(task, a * a + b * b)
        assert pbt.over
        return best

    assert trained(exploit=False) < 0.4  # 1.2 - 0.81, for one of them never moves
    assert trained(exploit=True) > 1.1


def test_members_begin_as_random_search_does():
    pbt = population()
    tasks = [pbt.ask() for _ in range(10)]
    assert tasks == [SearchTask(i, point(SPACE, 0, i), 0, 1.0) for i in range(10)]
    assert pbt.ask() is None and not pbt.over


def test_the_worst_fifth_goes_on_from_the_best_fifth():
    pbt = population()
    first = [pbt.ask() for _ in range(10)]
    for task in first:
        pbt.tell(task, float(task.trial))
    second = [pbt.ask() for _ in range(10)]
    assert [task.trial for task in second] == list(range(10))
    assert {(task.rung, task.amount) for task in second} == {(1, 2.0)}
    assert [task.parent is None for task in second] == [True] * 8 + [False] * 2
    for task in second[8:]:
        assert task.parent in (0, 1)
    assert [task.values for task in second[:8]] == [task.values for task in first[:8]]


def test_one_that_is_ready_compares_with_what_was_told_so_far():
    pbt = population()
    tasks = [pbt.ask() for _ in range(10)]
    for loss, task in enumerate(tasks[:4]):
        pbt.tell(task, loss)
    assert [pbt.ask().parent for _ in range(4)] == [None] * 4  # a fifth of four is none
    pbt.tell(tasks[9], 9.0)
    assert pbt.ask().parent == 0


def test_who_has_trained_least_comes_first():
    pbt = population(3)
    tasks = [pbt.ask()]
    pbt.tell(tasks[0], 0.0)
    assert [pbt.ask().trial for _ in range(3)] == [1, 2, 0]


def test_a_copy_goes_on_from_where_its_parent_is():
    """Member 0 is two pieces ahead when member 1 brings its first; a parent behind, or at its end, is none."""
    pbt = population(2, 10, 40)
    ahead, behind = pbt.ask(), pbt.ask()
    pbt.tell(ahead, 0.3)
    second = pbt.ask()
    assert (second.trial, second.amount, second.parent) == (0, 20, None)
    pbt.tell(second, 0.2)
    third = pbt.ask()
    pbt.tell(behind, 0.9)
    copy = pbt.ask()
    assert (copy.trial, copy.rung, copy.amount, copy.parent) == (1, 1, 30, 0)
    pbt.tell(copy, 0.01)
    pbt.tell(third, 0.5)  # as far, and worse now
    last = pbt.ask()
    assert (last.trial, last.amount, last.parent) == (0, 40, 1)
    pbt.tell(last, 0.005)
    final = pbt.ask()
    assert (final.trial, final.amount, final.parent) == (1, 40, None)  # the best one is at its end
    pbt.tell(final, 0.6)
    assert pbt.over


def test_the_parent_is_as_it_was_told_not_as_it_trains():
    pbt = population(3)
    tasks = [pbt.ask() for _ in range(3)]
    for task, loss in zip(tasks, (0.2, 0.1, 0.9), strict=True):
        pbt.tell(task, loss)
    first, second, copy = pbt.ask(), pbt.ask(), pbt.ask()
    assert (first.parent, second.parent, copy.parent, copy.amount) == (None, None, 1, 2)
    pbt.members[1].goal = 5  # what it trains for now is no place to go on from
    pbt.tell(first, None)
    replaced = pbt.ask()
    assert (replaced.trial, replaced.parent, replaced.amount) == (0, 1, 2)


def test_a_copy_keeps_the_values_that_it_has_got():
    pbt = population(2)
    for task in [pbt.ask(), pbt.ask()]:
        pbt.tell(task, task.trial)
    _, copy = pbt.ask(), pbt.ask()
    pbt.tell(copy, -1.0)
    following = pbt.ask()
    assert (copy.parent, following.trial, following.parent) == (0, 1, None)
    assert following.values == copy.values != point(SPACE, 0, 1)


def test_how_numbers_change_and_choices_stay():
    pbt = population(3, space=Space.read([*SPACE.described(), "gpt:width=int:8..64"]))
    old = {"lr": 0.01, "batch-size": 100, "o": "sgd", "model": "gpt:layers=2", "gpt:width": 16}
    rates, batches = set(), set()
    random = np.random.default_rng(0)
    for _ in range(400):
        new = pbt._explored(old, random)
        assert list(new) == list(old)
        assert (new["o"], new["model"], new["gpt:width"]) == ("sgd", "gpt:layers=2", 16)
        rates.add(new["lr"]), batches.add(new["batch-size"])
    assert {0.01 * 0.8, 0.01 * 1.2} < rates and {80, 120} < batches
    assert all(0.001 <= rate <= 0.5 for rate in rates) and 60 < len(rates) < 140  # a quarter is drawn anew
    small = {pbt._explored({"batch-size": 1}, random)["batch-size"] for _ in range(50)}
    assert {1, 2} <= small and 0 not in small
    assert max(pbt._explored({"lr": 0.49}, random)["lr"] for _ in range(50)) == 0.5


def test_who_fails_is_replaced_at_once():
    pbt = population(4)
    tasks = [pbt.ask() for _ in range(4)]
    pbt.tell(tasks[3], None)
    assert pbt.ask() is None and not pbt.over  # nobody has told yet
    pbt.tell(tasks[1], 0.5)
    replaced = pbt.ask()
    assert (replaced.trial, replaced.parent, replaced.amount, replaced.rung) == (3, 1, 2, 1)
    assert replaced.values != tasks[3].values


@pytest.mark.parametrize("interval, most, pieces", [(1, 5, 5), (2, 5, 3), (5, 5, 1), (0.1, 0.3, 3), (0.1, 0.7, 7)])
def test_all_pieces_of_all_members(interval, most, pieces):
    pbt, found = population(4, interval, most), []
    while tasks := [task for _ in range(4) if (task := pbt.ask())]:
        found += tasks
        for task in tasks:
            pbt.tell(task, float(task.trial))
    assert pbt.over
    assert len(found) == 4 * pieces
    assert len({(task.trial, task.rung) for task in found}) == 4 * pieces
    assert {task.trial for task in found if task.amount == most} == {0, 1, 2, 3}
    amounts = [task.amount for task in found if task.trial == 2]
    assert amounts == pytest.approx([min((i + 1) * interval, most) for i in range(pieces)])


def test_it_ends_where_all_fail():
    assert len(one_after_another(population(4), lambda task: None)) == 4
    found = one_after_another(population(4), lambda task: None if task.trial else 1.0)
    assert len([task for task in found if task.trial == 0]) == 5
    assert len(found) <= 4 * 5
