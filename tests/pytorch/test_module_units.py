"""A module that is no chain, sharded by its children: units, steps of one rank, bytes, and what is held."""

import re

import numpy as np
import pytest
import torch

from hpcdl.comm import Communicator
from hpcdl.errors import AgreedError, UsageError
from hpcdl.models import make_model
from hpcdl.parallel.cut_model import sharded_part
from hpcdl.strategies import all_reduce, fully_sharded
from hpcdl.torch.module_units import ModuleUnits

SKIP, SHARED, USED = "torch:cut_nets:skip", "torch:cut_nets:shared", "torch:cut_nets:shared,how=used"
APART, ROUTED = "torch:cut_nets:checkpointed,together=False", "torch:cut_nets:routed"
ADAM = "adam:eps=0.001"
LENGTHS = {"first": 42, "twice": 42, "blocks.0": 54, "blocks.1": 54, "head": 39, "(rest)": 1}  # of SKIP
GATHERED = ["(rest)", "first", "twice", "blocks.0", "twice", "blocks.1", "head"]  # in forward; head stays for backward
AGAIN = ["blocks.1", "twice", "blocks.0", "twice"]  # backward of `first` needs no parameter, as x is a batch


def units(spec):
    return {unit.name: unit.names for unit in make_model(spec, (6,), 3, "float64").whole_part.layers}


def test_the_units_of_a_module():
    assert {name: len(names) for name, names in units(SKIP).items()} == {name: 2 for name in LENGTHS} | {
        "blocks.0": 4,
        "blocks.1": 4,
        "(rest)": 1,
    }
    assert units(SHARED)["(rest)"] == ["first.weight", "unused.weight", "unused.bias"]
    assert units(SHARED)["rest"] == ["rest.weight", "rest.bias"]  # the name of a child
    assert units(SHARED)["first"] == ["first.bias"] and "last" not in units(SHARED)
    assert list(units(USED)) == ["(rest)"] and len(units(USED)["(rest)"]) == 9  # it reads first.weight by itself
    assert list(units("torch:cut_nets:checkpointed")) == ["(rest)"]  # `one` is gone when its backward comes
    assert list(units(APART)) == ["one", "two", "head", "stem"]
    assert {"wrapped.gate", "wrapped.head", "(rest)"} < units(ROUTED).keys()  # experts that no row chooses are the rest
    assert list(units("torch:cut_nets:whole,kind=few")) == ["one", "two"]  # its stages are invalid


@pytest.mark.parametrize(
    "model, own, options",
    [
        (SKIP, {"stage": 1}, {"optimizer": ADAM}),
        (SKIP, {"stage": 2}, {"clip_norm": 0.05, "accumulate": 3}),
        (f"{SKIP},p=0.4", {"stage": 3}, {"optimizer": ADAM, "accumulate": 2}),
        (SKIP, {"stage": 3, "gather": "broadcast"}, {"clip_norm": 0.05}),
        (SHARED, {"stage": 2}, {"optimizer": ADAM}),
        (SHARED, {"stage": 3}, {"optimizer": "momentum"}),
        (USED, {"stage": 3}, {}),
        ("torch:torch_nets:tied", {"stage": 3}, {}),
        ("torch:torch_nets:branches", {"stage": 3}, {}),  # a rank has no rows, or rows of the other branch alone
        ("torch:cut_nets:checkpointed", {"stage": 3}, {"optimizer": ADAM}),
        (APART, {"stage": 3}, {}),
        (ROUTED, {"stage": 3}, {}),
        (ROUTED, {"stage": 2}, {"accumulate": 2}),
    ],
    ids=str,
)
def test_steps_are_those_of_one_rank(model, own, options, cut, world):
    run = cut(world, fully_sharded.train, own, model, **options)
    assert all(each.grad is None for each in run.model.module.parameters())
    assert not any(each._forward_pre_hooks for each in run.model.module.modules())


@pytest.mark.mpi(min_size=2)
def test_batch_norm_is_that_of_all_reduce(cut, follow, world):
    model, options = f"{SKIP},norm=BatchNorm1d", {"batch_size": 29, "epochs": 3}
    whole, sharded = (
        follow(world, train, cut.data(model, "float64"), model, own, **options)
        for train, own in ((all_reduce.train, {}), (fully_sharded.train, {"stage": 3}))
    )
    assert sharded.own_losses == pytest.approx(whole.own_losses, rel=1e-10)
    assert sharded.scores == pytest.approx(whole.scores, rel=1e-10)
    for name, each in whole.model.extra.items():
        assert sharded.model.extra[name] == pytest.approx(each, rel=1e-10) and each.any(), name


def test_one_unit_of_all_is_told(cut, world, caplog):
    cut(world, fully_sharded.train, {"stage": 3}, SKIP, steps=1)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    cut(world, fully_sharded.train, {"stage": 3}, USED, steps=1)
    assert ("all parameters of the module are gathered at once" in caplog.text) == (world.rank == 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("parts", [1, 2])
def test_bytes_by_unit_and_micro_batch(parts, cut, ring, comm):
    """5 of 6 units are gathered for forward, and again for backward if it reads their parameters; head stays."""
    where = comm.rank, comm.size
    run = cut(comm, fully_sharded.train, {"stage": 3}, SKIP, epochs=1, accumulate=parts)
    gathered = sum(ring.all_gather(LENGTHS[name], *where) for name in GATHERED + AGAIN)
    scattered = sum(ring.reduce_scatter(n, *where) for n in LENGTHS.values())
    sent = {name: (each.calls, each.bytes) for name, each in run.comm.traffic.items() if each.calls}
    passes = 3 * parts
    assert sent == {
        "all_gather": (passes * len(GATHERED + AGAIN), passes * gathered),
        "reduce_scatter": (passes * len(LENGTHS), passes * scattered),
    }


def test_what_is_held_between_steps_and_at_most(cut, world):
    run = cut(world, fully_sharded.train, {"stage": 3}, SKIP)
    own, now, peak = run.held.shards.units.size, run.memory.now, run.memory.peak
    assert now["parameters"] == now["gradients"] == 8 * own
    two = 8 * sum(sorted(LENGTHS.values())[-2:])
    assert 8 * own < peak["parameters"] <= 8 * (own + LENGTHS["(rest)"]) + two
    assert sum(each.untyped_storage().nbytes() for each in run.model.module.parameters()) <= 8 * 17


@pytest.mark.parametrize("model", [SKIP, SHARED])
def test_resumed_is_never_stopped(model, resumes):
    resumes(3, fully_sharded.train, model, {"stage": 3}, optimizer="adam")


def test_another_order_of_children_is_refused(follow, world):
    with pytest.raises(UsageError, match=re.escape("in another order than on the rows of the trial")) as found:
        follow(world, fully_sharded.train, follow.examples("float64"), "torch:cut_nets:restless", {"stage": 3}, steps=1)
    assert "\n" not in str(found.value)


def test_the_order_does_not_depend_on_the_values_that_a_rank_has_drawn():
    orders = []
    for seed in range(3):
        torch.manual_seed(seed)
        orders.append(make_model(ROUTED, (6,), 3, "float64").whole_part.order)
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.mpi(min_size=2)
def test_ranks_with_another_order_are_refused(world):
    comm, model = Communicator(world), make_model(SHARED if world.rank else USED, (6,), 3, "float64")
    with pytest.raises(AgreedError, match="on the same two rows some ranks run other children of the module"):
        sharded_part(comm, model)
    comm.free()


@pytest.mark.parametrize("name", ["tied", "normed"])  # a buffer that is replaced, and some that change in place
def test_the_module_is_as_before_the_trial(name):
    model = make_model(f"torch:torch_nets:{name}", (6,), 3, "float64")
    before = {name: each.clone() for name, each in model.module.state_dict().items()}
    assert ModuleUnits(model).size == model.size and model.module.training
    for name, each in model.module.state_dict().items():
        assert np.array_equal(each, before[name]), name
    assert all(each.grad is None for each in model.module.parameters())
