"""hpcdl/search/importance.py: what an option alone explains, by hand and where it is known."""

import random

import pytest
from made_search import trials_of

from hpcdl.search.importance import binned, explained, importance
from hpcdl.search.space import Parameter


def rows_of(points):
    return trials_of(points).rows()


def test_two_groups_by_hand():
    """Scores 1, 2, 3, 2, 2 and 4, 5, 6, 5, 5: means 2, 5 and 3.5; 10 * 1.5^2 between groups, and 4 within them."""
    points = [("a", each) for each in (1, 2, 3, 2, 2)] + [("b", each) for each in (4, 5, 6, 5, 5)]
    assert explained(points, True) == pytest.approx(1 - (1 - 22.5 / 26.5) * 9 / 8)
    huge = [(value, 1e300 * score) for value, score in points]
    assert explained(huge, True) == pytest.approx(explained(points, True))


def test_bins_hold_as_many_trials_and_equal_values_stay_together():
    assert [len(group) for group in binned([(i, 0.0) for i in range(20)]).values()] == [5, 5, 5, 5]
    assert [len(group) for group in binned([(i, 0.0) for i in range(100)]).values()] == [17, 17, 16, 17, 17, 16]
    assert [len(group) for group in binned([(i // 9, 0.0) for i in range(20)]).values()] == [9, 9, 2]


def test_the_option_that_counts_has_it_all_and_chance_nothing():
    draw = random.Random(1)
    points = [({"x": draw.random(), "y": draw.random(), "z": draw.choice("abc")}, 0.0) for _ in range(300)]
    axes = [Parameter("y", "float"), Parameter("z"), Parameter("x", "float")]
    found = dict(importance(rows_of([(values, values["x"]) for values, _ in points]), axes))
    assert found["x"] > 0.95 and found["y"] < 0.03 and found["z"] < 0.03
    by_choice = importance(rows_of([(values, float(values["z"] == "a")) for values, _ in points]), axes)
    assert by_choice[0] == ("z", pytest.approx(1)) and len(by_choice) == 3


def test_without_the_correction_chance_would_have_a_share():
    draw, found = random.Random(2), []
    for _ in range(200):
        found.append(explained([(draw.random(), draw.random()) for _ in range(30)], False))
    assert sum(found) / 200 < 0.08 and sum(each == 0 for each in found) > 80  # eta^2 would be 5 / 29 in the mean


def test_of_options_that_depend_on_others_the_trials_where_they_are_active():
    draw = random.Random(3)
    points = []
    for _ in range(80):
        beta = draw.random()
        points.append(({"o": "sgd"}, 10 * draw.random()) if beta < 0.5 else ({"o": "momentum", "beta": beta}, beta))
    assert dict(importance(rows_of(points), [Parameter("beta", "float")]))["beta"] > 0.8


def test_too_little_says_nothing():
    same = [({"x": i, "y": 1, "z": str(i)}, float(i)) for i in range(12)]
    axes = [Parameter("x", "int"), Parameter("y", "int"), Parameter("z"), Parameter("w", "float")]
    found = importance(rows_of(same), axes)
    assert found[0][0] == "x" and found[0][1] > 0.6 and [each[1] for each in found[1:]] == [None] * 3
    assert importance(rows_of(same[:9]), axes)[0][1] is None
    assert importance(rows_of([(values, 0.5) for values, _ in same]), axes)[0][1] is None
    assert importance(rows_of([(values, None) for values, _ in same]), axes)[0][1] is None
    assert importance([], axes)[0][1] is None and importance(rows_of(same), []) == []
