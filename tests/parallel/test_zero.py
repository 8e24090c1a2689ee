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
def test_what_is_held_is_counted(stage, owners, hold, world):
    shards = hold(stage, owners).shards
    now, part = shards.memory.now, shards.part.size
    assert now["parameters"] == 8 * (part if stage < 3 else shards.units.size) == shards.parameters.nbytes
    assert now["gradients"] == 8 * (part if stage < 2 else shards.units.size) == shards.gradient.nbytes
    assert now["optimizer"] == 2 * 8 * shards.units.size
    assert sum(world.allgather(shards.units.size)) == part * (world.size if stage == 0 else 1)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("owners", [False, True])
def test_what_is_owned_is_summed_once(stage, owners, hold, world):
    """At these stages the whole gradient is here, and is summed at once."""
    shards = hold(stage, owners).shards
    shards.gradient[:] = np.arange(shards.gradient.size) + world.rank
    shards.reduce_scatter()
    for own, gradient in zip(shards.units.in_vector, shards.owned_gradients, strict=True):
        assert np.array_equal(gradient, world.size * np.arange(own.start, own.stop) + sum(range(world.size)))


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_spoken_for_are_the_whole_one_once(stage, hold, world, gpt):
    shards = hold(stage).shards
    for u, view in enumerate(shards.owned_gradients):
        view[:] = np.arange(shards.units.in_vector[u].start, shards.units.in_vector[u].stop)
    found = world.allgather(np.concatenate([np.empty(0), *shards.unique_gradients()]))
    assert sorted(np.concatenate(found)) == list(range(gpt.made().size))


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


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_a_slice(stage, hold, world):
    """What all ranks own of any slice of the gradient is, together, that slice; at stage 0 each owns all of it."""
    shards = hold(stage).shards
    for u, view in enumerate(shards.owned_gradients):
        view[:] = np.arange(shards.units.in_vector[u].start, shards.units.in_vector[u].stop)
    for part in (slice(0, 0), slice(3, 100), slice(0, shards.part.size)):
        mine = np.concatenate([np.empty(0), *shards.gradients_of(part)])
        found = [mine] if stage == 0 else world.allgather(mine)
        assert sorted(np.concatenate(found)) == list(range(part.start, part.stop))
