"""A module cut by layers: its weights where several stages share them, where they move, and where they are gone."""

import pytest
from strategies.test_pipeline import simulate, stages_of

from hpcdl.strategies import fully_sharded, pipeline

pytestmark = pytest.mark.four
CNN = "torch:cut_nets:cnn"


@pytest.mark.parametrize("model", ["torch:cut_nets:tied", "torch:cut_nets:residual"])
def test_tied_tensors_on_any_stages_and_what_works_in_place(model, cut, world):
    own = {"schedule": "1f1b", "microbatches": 3}
    if 1 < world.size < 4 and "tied" in model:  # there are 6 layers
        own = {"schedule": "interleaved", "microbatches": world.size, "chunks": 2, "recompute": True}
    cut(world, pipeline.train, own, model, optimizer="momentum", steps=3)
    cut(world, fully_sharded.train, {"stage": 3}, model, optimizer="momentum", steps=3)


@pytest.mark.parametrize("model, recompute", [(CNN, False), ("torch:cut_nets:residual", True)])
def test_pipedream_goes_back_by_the_weights_that_forward_had(model, recompute, cut, world):
    data = cut.data(model, "float64")
    wanted = simulate(data, model, stages_of(model, data, world.size), 6)
    own = {"schedule": "pipedream", "recompute": recompute}
    options = {"schedule": "constant", "lr": 0.05, "optimizer": "momentum", "steps": 6}
    cut(world, pipeline.train, own, model, 1e-10, wanted, **options)


@pytest.mark.parametrize("train, own", [(pipeline.train, {"microbatches": 3}), (fully_sharded.train, {"stage": 3})])
def test_resumed_is_never_stopped(train, own, resumes):
    resumes(3, train, CNN, own, optimizer="adam")


@pytest.mark.parametrize("train, own", [(pipeline.train, {"microbatches": 2}), (fully_sharded.train, {"stage": 3})])
def test_a_module_holds_nothing_but_what_its_rank_holds(train, own, cut, world):
    """Not what others have of a pipeline, nor, between steps, what was gathered."""
    run = cut(world, train, own, CNN, steps=1)
    parameters = list(run.model.module.parameters())
    own = 0 if train is fully_sharded.train else run.held.part.size
    assert sum(each.untyped_storage().nbytes() for each in parameters) <= 8 * (own + len(parameters))
    assert all(each.grad is None for each in parameters)
