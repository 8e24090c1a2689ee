"""A module cut by layers: under every strategy that does so, steps are those of sequential SGD."""

import pytest

from hpcdl.strategies import fully_sharded, grid, model_parallel, pipeline

pytestmark = pytest.mark.four
CNN = "torch:cut_nets:cnn"
ADAM = "adam:eps=0.001"


def fit(text, size):
    """A pipeline's arguments as "SCHEDULE MICRO-BATCHES [recompute]"; interleaved: so many for each stage, 2 chunks."""
    schedule, count, *more = text.split()
    own = {"schedule": schedule, "microbatches": int(count), "recompute": "recompute" in more}
    if schedule == "interleaved":
        own |= {"schedule": "1f1b"} if size == 1 else {"chunks": 2, "microbatches": int(count) * size}
    return own


@pytest.mark.parametrize("own", ["naive 2", "gpipe 3 recompute", "1f1b 5", "interleaved 1 recompute"])
def test_a_pipeline_steps_as_sequential_sgd(own, cut, world):
    cut(world, pipeline.train, fit(own, world.size), CNN, optimizer=ADAM)


def test_model_parallel(cut, world):
    cut(world, model_parallel.train, {"balance": "measured"}, CNN, clip_norm=0.05)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fully_sharded(stage, cut, each_group):
    each_group(lambda comm: cut(comm, fully_sharded.train, {"stage": stage}, CNN, optimizer=ADAM))


@pytest.mark.parametrize("stage, options", [(0, {}), (3, {"optimizer": "muon:eps=0.001", "lr": 0.02})])
def test_a_grid_of_data_and_pipeline(stage, options, cut, world):
    shape = {"data": 2, "pipeline": world.size // 2} if world.size % 2 == 0 else {"data": world.size, "pipeline": 1}
    cut(world, grid.train, {"grid": shape, "stage": stage, "microbatches": 2}, CNN, **options)
