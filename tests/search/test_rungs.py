"""Successive halving: ASHA's promotions one by one, Hyperband's brackets."""

import itertools
from collections import Counter

import pytest
from searching import one_after_another

from hpcdl.search.methods.asha import Asha, amounts
from hpcdl.search.methods.hyperband import Hyperband
from hpcdl.search.methods.random import point
from hpcdl.search.space import Space

SPACE = Space.read(["x=0..1", "y=log:0.01..1"])


def asked(method):
    task = method.ask()
    return None if task is None else (task.trial, task.rung, task.amount)


@pytest.mark.parametrize(
    "least, most, eta, expected",
    [
        (1, 27, 3, [1, 3, 9, 27]),
        (0.1, 0.8, 2, [0.1, 0.2, 0.4, 0.8]),
        (1, 20, 4, [1, 4, 20]),
        (1, 3, 4, [3]),
        (0.3, 0.3 * 3**5, 3, [0.3 * 3**k for k in range(6)]),
    ],
)
def test_amounts(least, most, eta, expected):
    assert amounts(least, most, eta) == pytest.approx(expected)
    assert amounts(least, most, eta)[-1] == most


def test_promotions_by_hand():
    """eta = 3, R / r = 9: nine trials, as in the example of the paper, on one worker; losses by trial."""
    losses = dict(enumerate([7, 5, 6, 1, 2, 3, 9, 8, 4]))
    asha = Asha(SPACE, 9, 0, 1, 9, 3)
    found = one_after_another(asha, lambda task: losses[task.trial])
    assert [(task.trial, task.rung) for task in found] == [
        (0, 0), (1, 0), (2, 0),  # the best of three goes on
        (1, 1), (3, 0),  # of four still one: 3, so that 1 has gone on too early
        (3, 1), (4, 0), (5, 0),  # of six the best two are 3 and 4
        (4, 1),  # rung 1 has three: the best goes on
        (3, 2), (6, 0), (7, 0), (8, 0),  # of nine the best are 3, 4 and 5
        (5, 1),
    ]  # fmt: skip
    assert [task.amount for task in found] == [{0: 1, 1: 3, 2: 9}[task.rung] for task in found]
    assert all(task.values == point(SPACE, 0, task.trial) for task in found)


def test_who_is_free_does_not_wait():
    """The rung is not whole, and trials are out: a new one begins; upper rungs come first."""
    asha = Asha(SPACE, 7, 0, 1, 4, 2)
    tasks = [asha.ask() for _ in range(4)]
    asha.tell(tasks[2], 0.5)
    assert asked(asha) == (4, 0, 1)  # half of one is none
    asha.tell(tasks[0], 0.3)
    assert asked(asha) == (0, 1, 2)
    asha.tell(tasks[1], 0.2)
    asha.tell(tasks[3], 0.1)
    third = asha.ask()
    assert (third.trial, third.rung) == (3, 1)
    asha.tell(third, 0.1)
    assert asked(asha) == (1, 1, 2)
    asha.tell(third._replace(trial=0), 0.2)
    assert asked(asha) == (3, 2, 4)
    assert [asked(asha) for _ in range(3)] == [(5, 0, 1), (6, 0, 1), None]
    assert not asha.over


def test_upper_rungs_come_first():
    """Both rungs have one that may go on."""
    asha = Asha(SPACE, 6, 0, 1, 4, 2)
    for task in [asha.ask() for _ in range(4)]:
        asha.tell(task, task.trial)
    upper = [asha.ask(), asha.ask()]
    assert [(task.trial, task.rung) for task in upper] == [(0, 1), (1, 1)]
    new = [asha.ask(), asha.ask()]
    for task in [*new, *upper]:
        asha.tell(task, -task.trial)
    assert [asked(asha) for _ in range(3)] == [(1, 2, 4), (5, 1, 2), (4, 1, 2)]


def test_equal_losses_go_on_in_the_order_of_their_numbers():
    found = one_after_another(Asha(SPACE, 8, 0, 1, 8, 2), lambda task: 0.0)
    assert [task.trial for task in found if task.rung == 3] == [0]
    assert Counter(task.rung for task in found) == {0: 8, 1: 4, 2: 2, 3: 1}


def test_who_fails_never_goes_on():
    asha = Asha(SPACE, 9, 0, 1, 9, 3)
    found = one_after_another(asha, lambda task: None if task.trial != 4 or task.rung else 1.0)
    assert [(task.trial, task.rung) for task in found if task.rung] == [(4, 1)]
    assert one_after_another(Asha(SPACE, 9, 0, 1, 9, 3), lambda task: None)[-1].trial == 8


def test_it_is_over_when_the_last_ones_train_at_the_top():
    asha = Asha(SPACE, 2, 0, 1, 2, 2)
    first, second = asha.ask(), asha.ask()
    asha.tell(first, 0.1)
    assert asha.ask() is None and not asha.over
    asha.tell(second, 0.2)
    assert not asha.over
    assert asked(asha) == (0, 1, 2)
    assert asha.over


def test_brackets_of_the_paper():
    """R = 81, eta = 3: trials and epochs of each rung of each bracket, and all epochs."""
    table = [
        [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        [(34, 3), (11, 9), (3, 27), (1, 81)],
        [(15, 9), (5, 27), (1, 81)],
        [(8, 27), (2, 81)],
        [(5, 81)],
    ]
    found = one_after_another(Hyperband(SPACE, 0, 0, 1, 81, 3), lambda task: task.values["x"])
    ends = [0, *itertools.accumulate(row[0][0] for row in table)]
    for row, first, end in zip(table, ends, ends[1:], strict=False):
        bracket = [task for task in found if first <= task.trial < end]
        assert [(n, amount) for (_, amount), n in sorted(Counter((t.rung, t.amount) for t in bracket).items())] == row
        for rung in range(1, len(row)):  # the best of the rung before, exactly
            before = {t.trial: t.values["x"] for t in bracket if t.rung == rung - 1}
            went = {t.trial for t in bracket if t.rung == rung}
            assert went == set(sorted(before, key=before.get)[: len(went)])
    assert sum(task.amount for task in found) == 405 + 363 + 351 + 378 + 405
    assert ends[-1] == 143


def test_a_rung_that_is_not_whole_does_not_keep_others():
    band = Hyperband(SPACE, 0, 0, 1, 4, 2)  # brackets of 4, 3 and 3 trials
    tasks = [band.ask() for _ in range(4)]
    assert asked(band) == (4, 0, 2)  # the next bracket begins
    for task in tasks[:3]:
        band.tell(task, task.trial)
    assert asked(band) == (5, 0, 2)
    band.tell(tasks[3], None)
    assert [asked(band) for _ in range(2)] == [(0, 1, 2), (1, 1, 2)]  # the earlier bracket comes first
    assert [asked(band) for _ in range(5)] == [(6, 0, 2), (7, 0, 4), (8, 0, 4), (9, 0, 4), None]
    assert not band.over


@pytest.mark.parametrize("trials, begun", [(5, 5), (10, 10), (13, 13), (1, 1), (0, 10)])
def test_brackets_until_there_were_enough(trials, begun):
    found = one_after_another(Hyperband(SPACE, trials, 0, 1, 4, 2), lambda task: task.values["x"])
    assert sorted({task.trial for task in found}) == list(range(begun))
    if trials == 13:  # the fourth bracket is as the first one, cut off: 3 trials, 1 of which goes on once
        assert [(t.trial, t.amount) for t in found if t.trial >= 10 and t.rung == 0] == [(10, 1), (11, 1), (12, 1)]
        assert [t.amount for t in found if t.trial >= 10 and t.rung] == [2]


def test_a_bracket_in_which_all_fail():
    found = one_after_another(Hyperband(SPACE, 0, 0, 1, 9, 3), lambda task: None)
    assert all(task.rung == 0 for task in found)
    assert len(found) == 9 + 5 + 3
