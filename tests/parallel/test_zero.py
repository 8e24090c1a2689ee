"""The stages of ZeRO: what a rank holds at first, what it owns of it, and how that is summed and gathered."""

import numpy as np
import pytest

from hpcdl.random import Random

STAGES = 0, 1, 2, 3


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("owners", [False, True])
def test_initial_values_are_those_of_the_whole_model(stage, owners, hold, gpt):
    for chunks in (None, [range(1, 3)], [range(3, 6)]):  # the last has a copy of the table that is tied
        shards = hold(stage, owners, chunks=chunks).shards
        whole = gpt.made().initialize(Random(0))
        for piece, _ in shards.parameter_pieces:
            held = shards.parameters[piece.local : piece.local + piece.size]
            assert np.array_equal(held, whole[gpt.places(piece)])
        assert shards.parameters.size == sum(piece.size for piece, _ in shards.parameter_pieces)
        owned = np.concatenate([np.empty(0), *shards.owned_parameters])
        for piece, _ in shards.pieces:
            assert np.array_equal(owned[piece.local : piece.local + piece.size], whole[gpt.places(piece)])
        assert shards.optimizer.state["first_moment"].size == shards.optimizer.size == owned.size
        for view in shards.owned_parameters:  # what is updated is what is held
            assert view.size == 0 or np.shares_memory(view, shards.parameters)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("owners", [False, True])
def test_an_update_is_that_of_the_whole_vector(stage, owners, hold, gpt, world):
    """Of a run that goes on, too: each rank updates what it owns, and where parameters are held whole, has the rest."""
    shards, model = hold(stage, owners).shards, gpt.made()
    gradient, whole = np.cos(np.arange(model.size)), model.initialize(Random(0))
    rule = shards.optimizer.of_size(model.size)
    rule.step = shards.optimizer.step = 3
    for turn in range(2):
        for own, view in zip(shards.units.in_vector, shards.owned_gradients, strict=True):
            view[:] = gradient[own]
        shards.update(0.5, None)
        shards.all_gather()
        rule.update(whole, gradient, 0.5)
        assert shards.optimizer.step == 3 + turn + 1
    for piece, _ in shards.parameter_pieces:
        assert np.array_equal(shards.parameters[piece.local : piece.local + piece.size], whole[gpt.places(piece)])
