"""Cutting layers into parts: compared with every possible cut; the loss goes with the last layer."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_models import make_batch

from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.models.balance import balanced, cut_layers, measured_costs, parameter_costs

GPT = "gpt:layers=2,width=8,heads=2,context=6"


def largest(costs, ranges):
    return max(sum(costs[i] for i in each) for each in ranges)


def every_cut(n, parts):
    """Yield all ways to cut range(n) into `parts` nonempty parts."""
    for inner in itertools.combinations(range(1, n), parts - 1):
        yield [range(a, b) for a, b in itertools.pairwise((0, *inner, n))]


@settings(max_examples=200, deadline=None)
@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_no_cut_has_a_smaller_largest_part(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    found = balanced(costs, parts)
    assert len(found) == parts and all(len(each) > 0 for each in found)
    assert list(itertools.chain(*found)) == list(range(len(costs)))
    assert largest(costs, found) == min(largest(costs, cut) for cut in every_cut(len(costs), parts))


def test_costs_are_parameters():
    model = make_model("mlp:8,5", (4,), 3)
    assert parameter_costs(model) == [4 * 8 + 8, 8 * 5 + 5, 5 * 3 + 3]
    costs = parameter_costs(make_model(GPT, (6,), 10))
    assert costs[0] == 10 * 8 + 6 * 8 and costs[-1] == 10 * 8  # the head uses the tied table
    assert costs[1:-1] == [4 * 64 + 6 * 8, 8 * 64 + 7 * 8] * 2 + [2 * 8]


@pytest.mark.parametrize(("spec", "count"), [("mlp:8,5", 3), (GPT, 7)])
def test_the_loss_goes_with_the_last_layer(spec, count):
    model = make_model(spec, (6,), 10)
    assert len(model.layers) == count + 1
    for parts in range(1, count + 1):
        ranges = cut_layers(model, parts)
        assert list(itertools.chain(*ranges)) == list(range(count + 1))
        assert len(ranges) == parts and all(len(each) > 0 for each in ranges) and len(ranges[-1]) > 1
        costs = parameter_costs(model)
        cut = [*ranges[:-1], range(ranges[-1].start, count)]
        assert largest(costs, cut) == min(largest(costs, other) for other in every_cut(count, parts))


def test_costs_of_ones_own():
    model = make_model("mlp:8,8,8", (4,), 3)
    assert cut_layers(model, 2, [9, 1, 1, 1]) == [range(0, 1), range(1, 5)]
    assert cut_layers(model, 2, [1, 1, 1, 9]) == [range(0, 3), range(3, 5)]


def test_refusals():
    model = make_model("mlp:8,5", (4,), 3)
    message = r"^4 stages are more than the model's 3 layers \(dense1, dense2, dense3\); take fewer stages$"
    with pytest.raises(UsageError, match=message):
        cut_layers(model, 4)
    with pytest.raises(UsageError, match="and this model lists none"):
        cut_layers(object(), 1)


@pytest.mark.parametrize(
    ("spec", "tokens"), [("softmax", False), ("mlp:8,5,activation=gelu", False), (GPT, True), (f"{GPT},head=own", True)]
)
def test_measured_costs(spec, tokens):
    """There is a cost for each layer except the loss; the batch is unchanged, and all buffers are given back."""
    model = make_model(spec, (6,), 10)
    batch = make_batch(5, 6, 10, "float32", tokens=tokens)
    x, y = batch.x.copy(), batch.y.copy()
    costs = measured_costs(model, batch)
    assert len(costs) == len(model.layers) - 1 and all(cost > 0 for cost in costs)
    np.testing.assert_array_equal(batch.x, x)
    np.testing.assert_array_equal(batch.y, y)
    assert sum(map(len, model.pool.free.values())) == len(model.pool.bases)
    assert [len(each) for each in cut_layers(model, 1, costs)] == [len(model.layers)]
