"""Grids drawn at random, and each axis alone: on up to 8 ranks their steps are those of sequential SGD."""

import itertools
import math
import random

import pytest

from hpcdl.comm.grid import AXES
from hpcdl.strategies import grid
from hpcdl.strategies.pipeline_schedules import INTERLEAVED, SCHEDULES, V_SHAPED

SIZES = "layers=3,width=48,heads=24,context=24"
LATENT = "latent=12,query-latent=10,head-width=4"
EXPERTS = "layers=3,width=48,heads=24,kv-heads=24,context=24,units=24,experts=24"
MODELS = {  # and the axes that cut it
    "mlp:24,24,24,24,24,24,24,24": {"data", "pipeline", "tensor"},
    f"gpt:{SIZES}": {"data", "pipeline", "context", "tensor"},
    f"gpt:{SIZES},head=own": {"data", "pipeline", "context", "tensor"},
    f"llama:{SIZES},units=24,{LATENT}": {"data", "pipeline", "context", "tensor"},
    f"llama:{EXPERTS},capacity=1.25,shared=1,dense=1,dense-units=48,{LATENT}": {"data", "pipeline", "expert", "tensor"},
    f"llama:{SIZES},kv-heads=24,units=24": {"data", "pipeline", "context", "tensor"},
    f"gpt:{EXPERTS}": {"data", "pipeline", "expert", "tensor"},
}
STAGES = 8  # at most: each model has 8 layers or more
ALONE = [(axis, size) for axis in AXES for size in (2, 3, 4, 6, 8) if (axis, size) != ("context", 8)]
pytestmark = pytest.mark.exhaustive  # test_eight_ranks.py runs some of it


def shapes(size, axes):
    """The grids of so many ranks on these axes: 2C chunks of 24 tokens, and parts of 24 heads, units or experts."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    found = (shape for shape in itertools.product(divisors, repeat=len(AXES)) if math.prod(shape) == size)
    named = (dict(zip(AXES, shape, strict=True)) for shape in found)
    cuts = [each for each in named if not any(24 % n for n in (2 * each["context"], each["expert"], each["tensor"]))]
    return [each for each in cuts if all(number == 1 or axis in axes for axis, number in each.items())]


def drawn(draw, model, shape):
    """The strategy's arguments on a grid, and options."""
    stages = shape["pipeline"]
    chunked = INTERLEAVED if stages > 1 else ()
    fitting = [name for name in SCHEDULES if name not in ("pipedream", *INTERLEAVED, *V_SHAPED)]
    schedule = draw.choice([*fitting, *chunked, *V_SHAPED] if 2 * stages <= STAGES else fitting)
    microbatches = draw.randint(1, 5)
    if schedule in INTERLEAVED:
        microbatches = stages
    elif schedule == "dualpipe-v":
        microbatches = 2 * stages
    own = {"grid": shape, "schedule": schedule, "microbatches": microbatches, "stage": draw.randrange(4)}
    own |= {"chunks": 2} if schedule in INTERLEAVED else {}
    own |= {"recompute": draw.random() < 0.3}
    if not model.startswith("mlp"):
        own |= {"sequence": draw.random() < 0.5, "attention": draw.choice(["ring", "ulysses"])}
    optimizer = draw.choice([{}, {"optimizer": "adam:eps=0.001"}, {"optimizer": "muon:eps=0.001", "lr": 0.02}])
    return own, optimizer | draw.choice([{}, {"clip_norm": 0.1}])


@pytest.fixture
def on(world, cut):
    """A function: train `model` on the first ranks on own["grid"], compare, and return the run; None where the ranks
    are too few, or have no part in it. own: the strategy's arguments."""

    def run(model, own, options):
        size, found = math.prod(own["grid"].values()), None
        part = world.Split(0 if world.rank < size else 1, world.rank)
        if world.rank < size <= world.size:
            print(f"\n{model} {own} {options}", end="")
            found = cut(part, grid.train, own, model, 1e-9, **options)
        part.Free()
        return found

    return run


@pytest.mark.parametrize("number", range(40), ids="draw{}".format)
def test_of_random_shape(number, on):
    """On 1 to 8 ranks in turn."""
    draw, model = random.Random(number), list(MODELS)[number % len(MODELS)]
    on(model, *drawn(draw, model, draw.choice(shapes(1 + number % 8, MODELS[model]))))


@pytest.mark.parametrize("axis, size", ALONE)
def test_of_one_axis(axis, size, on):
    """Of each model that the axis cuts."""
    for model in (each for each in MODELS if axis in MODELS[each]):
        on(model, *drawn(random.Random(size), model, dict.fromkeys(AXES, 1) | {axis: size}))


def test_parts_of_uneven_tensors(world, on):
    """Tensors that all parts of a layer have get the same bits in all, also beside a vocabulary that is cut unevenly:
    an all-reduce adds in an order that depends on places in the vector."""
    own = {"grid": {"data": 3, "tensor": 2}, "microbatches": 1}
    run = on("gpt:layers=1,width=4,heads=4,context=12", own, {"optimizer": "adam:eps=0.001"})
    assert (run is not None) == (world.rank < 6 <= world.size)
    assert run is None or (run.held.part.uneven and run.agree)
