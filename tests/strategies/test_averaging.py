"""--average: under every strategy the model of a run is the mean of its iterates, and training does not notice."""

from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.comm.gossip.topology import topology
from hpcdl.errors import AgreedError
from hpcdl.models import make_model
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.random import Random
from hpcdl.runs.evaluation import evaluate, scores
from hpcdl.strategies import (
    all_reduce,
    asynchronous_gossip,
    federated,
    fully_sharded,
    gossip,
    local_sgd,
    model_parallel,
    parameter_server,
    pipeline,
    tensor_parallel,
)

pytestmark = pytest.mark.four

MODEL = "mlp:12,12,12"  # 5 layers, which 4 ranks can share within and between
HOW = {"model": MODEL, "lr": 0.1, "schedule": "constant", "average": "from=1"}
FIRST, STEPS = 3, 12  # 3 steps an epoch, 4 epochs


def on_ring(comm, *args, **more):
    return gossip.train(comm, *args, topology=topology("ring", comm.size), **more)


SAME = {  # what each rank has is the mean of what it had
    "all-reduce": all_reduce.train,
    "local SGD": partial(local_sgd.train, sync_every=2),
    "gossip": on_ring,
    "D-PSGD": partial(on_ring, method="dpsgd"),
    "gradient tracking": partial(on_ring, method="gradient-tracking"),
    "layers": model_parallel.train,
    "pipeline": partial(pipeline.train, schedule="1f1b", microbatches=2),
    "tensor parallel": tensor_parallel.train,
    "ZeRO 0": partial(fully_sharded.train, stage=0),
    "ZeRO 2": partial(fully_sharded.train, stage=2),
    "ZeRO 3": partial(fully_sharded.train, stage=3),
}
PIPELINED = {"layers", "pipeline"}


def mean(path, first=FIRST):
    return np.mean(path[first:], axis=0)


def close(a, b, tolerance=1e-12):
    return np.abs(a - b).max(initial=0) <= tolerance * max(1, np.abs(b).max(initial=0))


@pytest.mark.parametrize("name", SAME)
def test_the_model_is_the_mean_of_the_iterates(name, world, follow):
    if name in PIPELINED and world.size > 4:
        pytest.skip("a model of 5 layers")
    plain = follow(world, SAME[name], **HOW | {"average": ""})
    run = follow(world, SAME[name], **HOW)
    assert len(run.path) == STEPS
    for mine, before in zip(run.path, plain.path, strict=True):  # training does not notice
        assert np.array_equal(mine, before)
    assert close(run.parameters, mean(run.path)) and not close(run.parameters, run.path[-1], 1e-4)
    assert run.agree in (None, True)
    assert run.scores != plain.scores


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_it_is_that_of_sequential_sgd_and_is_what_is_scored(optimizer, world, follow, alone):
    run = follow(world, all_reduce.train, **HOW, optimizer=optimizer)
    wanted = mean(alone(**HOW, optimizer=optimizer).path)
    assert close(run.parameters, wanted, 1e-10)
    data, model = follow.examples("float64"), make_model(MODEL, (6,), 3, "float64")
    found = scores(evaluate(model, wanted, data.test, 3), 3).named("test")
    assert {name: run.scores[name] for name in found} == pytest.approx(found, rel=1e-9)


def test_messages_are_those_of_a_run_without(world, follow):
    with_mean, without = (follow(world, SAME["ZeRO 2"], **HOW | {"average": average}) for average in ("from=0", ""))
    assert with_mean.comm.traffic.sent_so_far == without.comm.traffic.sent_so_far


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("consistency", [("bsp", 0), ("ssp", 0), ("async", 0)], ids=str)
@pytest.mark.parametrize("servers", [1, 2])
def test_servers_keep_the_mean_of_their_slices(consistency, servers, world, follow, alone):
    train = partial(parameter_server.train, servers=servers, consistency=Consistency(*consistency))
    workers = 1 if consistency[0] == "async" else world.size - servers
    comm = world.Split(0 if world.rank < servers + workers else MPI.UNDEFINED, world.rank)
    if comm == MPI.COMM_NULL:
        return
    run = follow(comm, train, workers=workers, **HOW)
    if comm.rank == 0:
        assert close(run.parameters, mean(alone(**HOW).path), 1e-10)
    comm.Free()


@pytest.mark.parametrize("how", [SAME["all-reduce"], SAME["gossip"], SAME["ZeRO 2"], SAME["ZeRO 3"]], ids=range(4))
@pytest.mark.parametrize("stop", [2, 7])  # before there is a mean, and after
def test_resumed_is_never_stopped_to_the_bit(how, stop, world, follow, mpi_tmp_path):
    options = HOW | {"dtype": "float32", "checkpoint_every": 1}
    whole = follow(world, how, **options)
    folder = str(mpi_tmp_path / "a")
    follow(world, how, **options, steps=stop, out=folder)
    again = follow(world, how, **options, steps=STEPS, resume=folder, out=folder)
    assert np.array_equal(whole.parameters, again.parameters) and whole.scores["test_loss"] == again.scores["test_loss"]
    if world.rank == 0 and how is SAME["all-reduce"]:
        found = Checkpoint.read(mpi_tmp_path / "a")
        assert np.array_equal(found.vectors["parameters"], whole.parameters)
        assert np.array_equal(found.vectors["optimizer/average"], whole.path[-1])


@pytest.mark.mpi(min_size=3)
def test_servers_go_on_from_what_they_had(world, follow, mpi_tmp_path):
    train, options = partial(parameter_server.train, servers=2), HOW | {"workers": world.size - 2}
    whole = follow(world, train, **options)
    folder = str(mpi_tmp_path / "a")
    follow(world, train, **options, steps=7, out=folder)
    again = follow(world, train, **options, steps=STEPS, resume=folder)
    if world.rank == 0:
        assert np.array_equal(whole.parameters, again.parameters)


@pytest.mark.mpi(min_size=2)
def test_replicas_without_common_steps_have_a_mean_too(world, follow, mpi_tmp_path):
    train = partial(asynchronous_gossip.train, topology=topology("ring", world.size))
    folder = str(mpi_tmp_path / "a")
    options = HOW | {"average": "from=0", "lr": 1e-30}  # nothing moves: all means are where they began
    run = follow(world, train, **options, steps=6, out=folder)
    start = make_model(MODEL, (6,), 3, "float64").initialize(Random(0))
    assert close(run.parameters, start)
    options["lr"] = 0.1
    run = follow(world, train, **options, steps=9, resume=folder, out=folder)
    if world.rank == 0:
        found = Checkpoint.read(mpi_tmp_path / "a").vectors
        apart = [np.linalg.norm(found[name] - start) for name in ("parameters", "optimizer/average")]
        assert 0 < apart[0] < apart[1]  # the mean lags behind
        assert close(run.parameters, found["parameters"])


def test_a_federated_server_has_the_mean_of_its_rounds(world, follow):
    train = partial(federated.train, clients=3, fraction=1.0, local_epochs=1)
    run = follow(world, train, **HOW | {"average": "from=2"}, rounds=6)
    assert close(run.parameters, mean(run.path, 2)) and not close(run.parameters, run.path[-1], 1e-4)


def test_another_mean_is_not_gone_on_with(world, follow, mpi_tmp_path):
    folder = str(mpi_tmp_path / "a")
    follow(world, all_reduce.train, **HOW, steps=5, out=folder)
    with pytest.raises(AgreedError, match="average is from=1, not from=2"):
        follow(world, all_reduce.train, **HOW | {"average": "from=2"}, steps=9, resume=folder)
    with pytest.raises(AgreedError, match="average is from=1, not none"):
        follow(world, all_reduce.train, **HOW | {"average": ""}, steps=9, resume=folder)
