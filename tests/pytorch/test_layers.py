"""A module's layers: what they make, what they keep, and whose weights backward takes."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.comm import Communicator
from hpcdl.data import Batch
from hpcdl.memory import Memory
from hpcdl.models import make_model
from hpcdl.models.layered import FlatWeights
from hpcdl.models.part import ModelPart
from hpcdl.parallel.cut_model import broadcast_initial_values
from hpcdl.random import Random
from hpcdl.strategies import fully_sharded, pipeline, sequential
from hpcdl.torch import TorchModel

pytestmark = pytest.mark.four
CNN = "torch:cut_nets:cnn"
NORMED = "torch:cut_nets:normed"


def made(spec, dtype="float64"):
    return make_model(spec, (6,), 3, dtype)


def batch(rows=5, dtype="float64"):
    random = np.random.default_rng(1)
    x, y = random.standard_normal((rows, 6)).astype(dtype), random.integers(0, 3, rows)
    return Batch(x, y, rows, epoch=0, step=0, index=np.arange(rows))


@pytest.mark.parametrize(
    "spec", [CNN, "torch:cut_nets:tied", "torch:cut_nets:residual", "torch:cut_nets:shifts", NORMED]
)
def test_layers_make_what_the_module_makes(spec):
    one, other = made(f"{spec}"), made(f"{spec}")
    part, rows = ModelPart(one), batch()
    w = part.initialize(Random(3))
    whole = np.empty_like(w)
    for piece, _ in part.pieces():
        whole[piece.start : piece.start + piece.size] = w[piece.local : piece.local + piece.size]
    assert np.array_equal(whole, other.initialize(Random(3)))
    g, wanted = np.zeros_like(w), np.zeros_like(w)
    for _ in range(2):  # gradients add up
        assert part.loss_and_gradient(w, rows, g) == pytest.approx(other.loss_and_gradient(whole, rows, wanted))
    for piece, _ in part.pieces():
        mine, there = g[piece.local : piece.local + piece.size], wanted[piece.start : piece.start + piece.size]
        assert mine == pytest.approx(there, rel=1e-12, abs=1e-14)
    assert one.extra.keys() == other.extra.keys() == set(part.extra)
    assert all(one.extra[name] == pytest.approx(each) for name, each in other.extra.items())
    assert part.evaluate(w, rows) == pytest.approx(other.evaluate(whole, rows))
    assert part.predict(w, rows.x) == pytest.approx(other.predict(whole, rows.x))
    assert part.loss_and_gradient(w, batch(0), g) == 0


def test_the_whole_module_and_its_layers_take_turns():
    model, rows = made(CNN), batch()
    part = ModelPart(model)
    w, g = model.initialize(Random(0)), np.zeros(model.size)
    losses = [each.loss_and_gradient(w, rows, g) for each in (model, part, model, part, model)]
    once = np.zeros(model.size)
    made(CNN).loss_and_gradient(w, rows, once)
    assert len(set(losses)) == 1 and g == pytest.approx(5 * once, rel=1e-12, abs=1e-14)


def test_backward_takes_the_weights_that_it_is_given_and_not_those_of_forward():
    part, rows = ModelPart(made("torch:cut_nets:residual")), batch()
    w, g, wanted = part.initialize(Random(0)), np.zeros(part.size), np.zeros(part.size)
    part.loss_and_gradient(w, rows, wanted)
    layers, elsewhere = range(len(part.layers)), w.copy()
    _, kept = part.forward(FlatWeights(part, w, g), rows.x, layers, rows.y, batch=rows)
    w[:] = np.nan
    part.backward(FlatWeights(part, elsewhere, g), kept, None, layers)
    assert np.array_equal(g, wanted)


def test_what_graphs_keep_is_counted_and_given_back():
    part, rows = ModelPart(made(CNN)), batch()
    part.pool.memory = memory = Memory()
    w, g = part.initialize(Random(0)), np.zeros(part.size)
    _, kept = part.forward(FlatWeights(part, w, g), rows.x, range(9), rows.y, batch=rows)
    outputs = sum(8 * np.prod(layer.output_shape(5, None)) for layer in part.layers[:-1])
    assert memory.now["activations"] >= outputs
    part.backward(FlatWeights(part, w, g), kept, None, range(9))
    assert memory.now["activations"] == 0
    _, kept = part.forward(FlatWeights(part, w, g), rows.x, range(9), rows.y, batch=rows)
    part.release(kept)
    assert memory.now["activations"] == 0


@pytest.mark.parametrize("train", [pipeline.train, fully_sharded.train], ids=["pipeline", "fully sharded"])
def test_statistics_and_dropout_are_those_of_one_rank(train, follow, cut, world):
    """A batch as a whole; with recomputation statistics are updated once, and the draws are the same again."""
    spec, own = f"{NORMED},p=0.4", {"microbatches": 1, "recompute": True}
    if train is fully_sharded.train:
        spec, own = (f"{CNN},dropout=0.4" if world.size > 1 else spec), {"stage": 3}
    options = {"optimizer": "momentum", "steps": 3, "batch_size": 10, "allreduce": "ring"}
    run = cut(world, train, own, spec, 1e-10, **options)
    alone = follow(MPI.COMM_SELF, sequential.train, None, spec, **options)
    extra = alone.model.extra
    assert extra.keys() == run.model.extra.keys()
    for name, array in run.model.extra.items():
        assert array == pytest.approx(extra[name], rel=1e-10), name
    if "1.running_mean" in extra:
        assert extra["1.num_batches_tracked"][0] == 3  # a recomputation is none


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_statistics_of_copies_are_averaged_and_saved(buffers, follow, world, mpi_tmp_path):
    folder = str(mpi_tmp_path / "a")
    options = {"steps": 3, "batch_size": 10, "allreduce": "ring"}
    run = follow(world, fully_sharded.train, None, f"{NORMED},buffers={buffers}", out=folder, **options)
    mean = run.model.extra["1.running_mean"]
    found = Checkpoint.read(mpi_tmp_path / "a").vectors["extra/1.running_mean"]
    of_ranks = world.allgather(mean.copy())
    assert np.array_equal(found, of_ranks[0])
    assert all(np.array_equal(each, found) for each in of_ranks) == (buffers == "average" or world.size == 1)


def test_ranks_that_were_given_other_values_begin_with_those_of_rank_0(world):
    torch.manual_seed(world.rank)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
    model, comm = TorchModel(net, features=(6,), classes=3), Communicator(world)
    broadcast_initial_values(comm, model)
    comm.free()
    starts = world.allgather(ModelPart(model).initialize(Random(0)))
    assert all(np.array_equal(each, starts[0]) for each in starts)


def test_the_gradient_by_the_input_is_none_of_that_by_the_output():
    """That goes back to its pool, and the next message is written over it."""
    part = ModelPart(made("torch:cut_nets:shifts"))
    w, layer = FlatWeights(part, part.initialize(Random(0)), np.zeros(part.size)), part.layers[1]
    x, dy = np.ones((5, 6)), part.pool.take(5, 2, 3)
    dy[...] = 1
    _, saved = layer.forward(w.w[1], x, part.group)
    dx = layer.backward(w.w[1], saved, dy, w.g[1], part.group)
    assert np.array_equal(dx, np.ones((5, 6))) and not np.shares_memory(dx, dy)
