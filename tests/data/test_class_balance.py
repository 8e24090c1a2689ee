"""Weights of classes follow their rows, and a rare class is seen before the training."""

import numpy as np
import pytest

from hpcdl.data import from_arrays
from hpcdl.data.class_balance import class_weights, count_classes, rare_class
from hpcdl.errors import UsageError


def data(*counts, **how):
    y = np.repeat(np.arange(len(counts)), counts)
    return from_arrays(np.arange(2.0 * len(y)).reshape(-1, 2), y, classes=len(counts), **how)


def weights_of(text, data):
    return class_weights(text, data, data.class_counts)


def advice(data, **how):
    return rare_class(data, data.class_counts, **how)


def test_balanced_classes_weigh_the_same_together():
    weights = weights_of("balanced", data(60, 30, 10))
    assert weights == pytest.approx([100 / (3 * 60), 100 / (3 * 30), 100 / (3 * 10)])
    weights = weights_of("balanced", data(60, 0, 20))  # a class without rows is none of those that share
    assert weights == pytest.approx([80 / (2 * 60), 1, 80 / (2 * 20)])
    held_out = data(60, 30, validation=0.2)
    counts = held_out.class_counts
    assert counts.sum() == 72 and np.array_equal(counts, np.bincount(held_out.train.rows(0, 72)[1]))


def test_one_rank_counts_for_all(each_group):
    def body(comm):
        asked = []

        class Counting:
            @property
            def class_counts(self):
                asked.append(comm.rank)
                return np.array([3, 1])

        last = comm.size - 1
        assert list(count_classes(comm, Counting(), last)) == [3, 1]
        assert asked == [last] * (comm.rank == last)

    each_group(body)


def test_equal_weights_are_none():
    assert weights_of("balanced", data(20, 20)) is None
    assert weights_of("0=1,1=1", data(30, 20)) is None and weights_of("", data(30, 20)) is None


def test_weights_by_name():
    assert list(weights_of("1=5", data(30, 20, 10))) == [1, 5, 1]
    with pytest.raises(UsageError, match="there is no class 'b'"):
        weights_of("b=5", data(30, 20))


@pytest.mark.parametrize("text", ["yes", "balance", "1=", "1=0", "1=-2", "1=nan", "=3", "1=2,"])
def test_what_is_no_weight_is_refused(text):
    with pytest.raises(UsageError, match="give balanced, or weights greater than 0"):
        weights_of(text, data(30, 20))


def test_values_have_no_classes():
    values = from_arrays(np.ones((9, 2)), np.linspace(0, 1, 9))
    assert values.class_counts is None and advice(values) is None
    with pytest.raises(UsageError, match="the data have values to predict: leave it out"):
        weights_of("balanced", values)


def test_a_rare_class_is_told_with_what_to_do():
    said = advice(data(980, 20))
    assert said == (
        "class 1 has 2.00% of the training rows (20 of 1,000), so a model that never predicts it looks accurate: "
        "add --class-weight balanced, and judge by --scores f1"
    )
    assert "never predicts it looks accurate: judge by --scores macro_f1" in advice(data(500, 480, 5), weighs=False)
    assert advice(data(950, 50)) is None and advice(data(30, 0)) is None
