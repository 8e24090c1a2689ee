"""The set-up of a pipeline: groups, the layers of each rank, whose losses count, and what is summed between ranks."""

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.comm.grid import Grid
from hpcdl.data import from_arrays
from hpcdl.models import make_model
from hpcdl.parallel.pipelined import pipelined, place_layers
from hpcdl.parallel.timetable import Placement
from hpcdl.runs import Options, Run

FEATURES, CLASSES = 5, 3
DEEP = "mlp:4,6,5,4,7,6,5"  # 8 layers
GPT = "gpt:layers=3,width=12,heads=12,context=12"  # 9 layers


@pytest.fixture
def run(world):
    """A run that trains nothing, of all ranks."""
    comm = Communicator(world, "ring")
    made = Run(comm, Options(dtype="float64", progress="none", steps=1))
    yield made
    for each in (made.bookkeeping, comm):
        each.free()


def examples(features=FEATURES, classes=CLASSES):
    x = np.zeros((20, features), int)
    return from_arrays(x, np.arange(20) % classes, classes=classes, dtype="float64")


@pytest.mark.parametrize("balance, v_shaped", [("parameters", False), ("measured", False), ("measured", True)])
def test_layers_of_stages_are_the_same_on_all_ranks(balance, v_shaped, run, world):
    model = make_model(DEEP, (FEATURES,), CLASSES, "float64")
    parts = 2 if world.size > 1 else 1
    ranges = place_layers(run, model, examples(), run.comm, Placement(world.size, parts, v_shaped), balance)
    assert len(ranges) == parts and all(len(each) for each in ranges)
    dealt = world.allgather(ranges)
    turns = list(zip(*dealt, strict=True))
    in_turns = [each for i, turn in enumerate(turns) for each in (turn[::-1] if v_shaped and i % 2 else turn)]
    assert [layer for each in in_turns for layer in each] == list(range(9))
    names = [[model.layers[i].name for each in ranges for i in each] for ranges in dealt]
    assert run.reported["layers_of_stages"] == names


@pytest.mark.parametrize("axis", ["one", "pipeline", "tensor", "data"])
@pytest.mark.parametrize("sequence", [False, True])
def test_who_reports_losses_and_what_is_summed(axis, sequence, run, world):
    """One rank of each copy reports. Both ends sum the tied table, and, with sequence parallelism, those that share
    layers what each of them has whole."""
    if axis == "one" and sequence:
        pytest.skip("no layer is shared")
    model, data, p = make_model(GPT, (12,), 7, "float64"), examples(12, 7), world.size
    grid = None if axis == "one" else Grid(run.comm, **{axis: p})
    held, stage = pipelined(run, model, data, run.make_optimizer(model, data, 0), grid, sequence=sequence, zero=1)
    copies, ends = (grid.data, grid.ends) if grid else (*run.groups, None)[:2]
    assert world.allgather(held.reports_loss) == {
        "one": [rank == p - 1 for rank in range(p)],
        "pipeline": [rank == p - 1 for rank in range(p)],
        "tensor": [rank == 0 for rank in range(p)],
        "data": [True] * p,
    }.get(axis)
    assert held.part is stage.part and held.computing is stage and held.share == (copies.rank, copies.size)
    summed = {id(group): sum(view.size for view in views) for group, views in held.summed}
    wanted = {id(ends): 7 * 12} if ends is not None else {}
    assert ends is None or (ends.size, ends.rank) == (2, int(world.rank > 0))
    if sequence:
        own = sum(view.size for part in held.part.replicated() for view in held.shards.gradients_of(part))
        wanted[id(grid.tensor)] = own
        assert own > 0
    assert summed == wanted
    for each in [grid] if grid else run.groups:
        each.free()
