"""Layers gathered one by one: which are there when, that their gradient is summed once, and that nothing stays."""

import pytest

from hpcdl.models.layered import FlatWeights
from hpcdl.parallel.sharded_weights import ShardedWeights, weights_of


def test_weights_are_flat_where_parameters_and_gradient_are_whole(hold):
    for stage, kind in {0: FlatWeights, 1: FlatWeights, 2: ShardedWeights, 3: ShardedWeights}.items():
        held = hold(stage)
        assert type(held.weights) is type(weights_of(held.shards)) is kind


@pytest.mark.parametrize("head", ["tied", "own"])
def test_two_layers_are_gathered_at_once_the_right_ones(head, hold, gpt):
    """While a layer is computed, its own parameters are there and those of the next one come; none else are held."""
    held, seen = hold(3, spec=getattr(gpt, head)), []
    for i, layer in enumerate(held.part.layers):

        def forward(*arguments, i=i, original=layer.forward):
            seen.append(("F", i, set(held.weights.gathered)))
            return original(*arguments)

        def backward(*arguments, i=i, original=layer.backward):
            seen.append(("B", i, set(held.weights.gathered)))
            return original(*arguments)

        layer.forward, layer.backward = forward, backward
    last = len(held.part.layers) - 1
    held.forward_backward(gpt.rows(2))
    assert seen == [("F", i, {i, i + 1} - {last + 1}) for i in range(last + 1)] + [
        ("B", i, {i, i - 1} - {-1}) for i in reversed(range(last + 1))
    ]
    assert held.weights.gathered == {}
    held.update(2)
    now = held.shards.memory.now
    assert now["parameters"] == now["gradients"] == 8 * held.shards.units.size and now["activations"] == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_the_gradient_of_a_layer_is_gone_before_the_next_has_one(stage, hold, gpt):
    """What lies in buffers of gradients is never more than the largest layer."""
    held, seen = hold(stage), []
    for layer in held.part.layers:

        def backward(*arguments, original=layer.backward):
            seen.append(held.shards.memory.now["gradients"] - held.shards.gradient.nbytes)
            return original(*arguments)

        layer.backward = backward
    held.forward_backward(gpt.rows(2))
    assert max(seen) == 8 * max(held.weights.lengths) > 0
    held.weights.finish()
    assert held.shards.memory.now["gradients"] == held.shards.gradient.nbytes
