"""A module of PyTorch's takes the same steps under every strategy, on any number of ranks, as sequential SGD takes.

What cuts a model by its layers has its tests beside it (tests/pytorch/test_layers.py, ...)."""

# ruff: noqa: E402 - PyTorch may be missing

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpi4py import MPI
from paths import agree

from hpcdl.comm.gossip.topology import topology
from hpcdl.data import from_arrays
from hpcdl.models import for_data
from hpcdl.random import Random
from hpcdl.strategies import all_reduce, federated, gossip, local_sgd, parameter_server, sequential

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
pytestmark = pytest.mark.four

EPOCHS = 1  # of 3 steps
CNN = "torch:cnn:make,width=2,hidden=6,kernel=3,dropout=0.4"
RESNET = "torch:resnet:make,width=2,stages=2,norm="
MODELS = [CNN, f"{RESNET}group", f"{RESNET}frozen"]
PLAIN = {"optimizer": "sgd", "schedule": "constant", "lr": 0.1}


def images(dtype="float64", partition="iid"):
    """29 images of 8 x 8 and 3 classes: batches of 13 leave a last one of 3, of which a fourth rank gets nothing."""
    random = np.random.default_rng(4)
    y = random.integers(0, 3, 29)
    x = random.standard_normal((29, 8, 8)) + y[:, None, None]
    return from_arrays(x, y, x[:11], y[:11], dtype=dtype, partition=partition)


@pytest.fixture
def path_alone(alone):
    """A function: the path of the same run on one rank, sequentially."""
    return lambda model, **options: alone(model, images, **{"epochs": EPOCHS} | options).path


def on_complete_graph(comm, *arguments):
    return gossip.train(comm, *arguments, topology=topology("complete", comm.size))


EVERY = {"clients": 5, "fraction": 1.0, "local_epochs": 1, "local_batch": 0}
FULL = {"batch_size": "full", "epochs": 2}
STRATEGIES = {  # the loop, its arguments, options of it, options of both, those of the sequential run
    "all-reduce, adam": (all_reduce.train, {}, {}, {"optimizer": "adam"}, {}),
    "all-reduce in parts": (all_reduce.train, {}, {"accumulate": 3}, {}, {}),
    "overlap": (all_reduce.train, {"overlap": True, "bucket_mib": 1e-4}, {}, {}, {}),
    "servers on workers": (parameter_server.train, {"on_workers": True}, {}, {"optimizer": "adam"}, {}),
    "2 servers": (parameter_server.train, {"servers": 2}, {}, {"optimizer": "adam"}, {}),
    "gossip": (on_complete_graph, {}, {}, {"optimizer": "nesterov"}, {}),
    "local SGD": (local_sgd.train, {"sync_every": 1, "local_momentum": "average"}, {}, {}, {}),
    "every client": (federated.train, EVERY, {"rounds": 2}, PLAIN, FULL),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.in_turn("model")
def test_the_steps_of_sequential_sgd(name, model, follow, path_alone, comm):
    train, own, mine, both, sequentially = STRATEGIES[name]
    reference = path_alone(model, **both, **sequentially)
    data = images(partition="dirichlet:0.5" if train is federated.train else "iid")
    servers = own.get("servers", 0)
    if servers < comm.size:
        run = follow(comm, train, data, model, own, workers=comm.size - servers, **{"epochs": EPOCHS} | both | mine)
        if comm.rank == 0:
            agree(run, reference)
        assert "overlap" not in own or run.reported["overlap"]["buckets"] > 2


@pytest.mark.parametrize("model", [*MODELS[1:], CNN.replace("dropout=0.4", "dropout=0.0")])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.in_turn("optimizer")
def test_as_plain_pytorch_on_one_process(optimizer, model, path_alone):
    path = path_alone(model, optimizer=optimizer, schedule="constant", lr=0.02)
    data = images()
    made = for_data(model, data, "float64")
    made.initialize(Random(0))  # its buffers, too
    module = made.module.train()
    torch.nn.utils.vector_to_parameters(torch.tensor(made.initialize(Random(0))), module.parameters())
    rules = {"adam": torch.optim.Adam, "momentum": lambda w, lr: torch.optim.SGD(w, lr, momentum=0.9)}
    rule, step = rules[optimizer](module.parameters(), lr=0.02), 0
    for epoch in range(EPOCHS):
        for batch in data.batches(epoch, 13):
            rule.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                module(torch.tensor(batch.x).view(-1, 8, 8)), torch.tensor(batch.y)
            )
            loss.backward()
            rule.step()
            agree([torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()], path[step : step + 1])
            step += 1
    assert step == len(path)


def test_dropout_drops_and_the_draws_of_others_repeat(follow, path_alone):
    path = path_alone(CNN, optimizer="sgd")
    assert not np.allclose(path[-1], path_alone(CNN.replace("0.4", "0.0"), optimizer="sgd")[-1], rtol=1e-4)
    assert not np.allclose(path[-1], path_alone(CNN, optimizer="sgd", seed=1)[-1], rtol=1e-4)
    again = follow(MPI.COMM_SELF, sequential.train, images(), CNN, epochs=EPOCHS, optimizer="sgd").path
    assert np.array_equal(again, path)


@pytest.mark.parametrize("name", ["branches", "tied"])
@pytest.mark.parametrize("own", [{}, {"overlap": True, "bucket_mib": 1e-5}], ids=str)
@pytest.mark.in_turn("name")
def test_what_a_rank_does_not_use_has_no_gradient_there(own, name, follow, alone, comm):
    """Which branch computes differs from rank to rank; and one has no rows."""
    model = f"torch:torch_nets:{name}"
    reference = alone(model, epochs=EPOCHS)
    run = follow(comm, all_reduce.train, follow.examples("float64"), model, own, epochs=EPOCHS)
    agree(run, reference)
    assert run.model.extra.get("count", [3])[0] == 3


def test_batch_norm_averages_its_statistics_over_the_ranks(follow, comm):
    model = f"{RESNET}batch"
    run = follow(comm, all_reduce.train, images(), model, epochs=EPOCHS, batch_size=28)
    mean = run.model.extra["2.running_mean"]
    assert all(np.array_equal(each, mean) for each in comm.allgather(mean)) and mean.any()
    assert run.model.extra["2.num_batches_tracked"] == len(run.path)
    own = {"overlap": True, "bucket_mib": 1e-4}  # whose trial leaves no trace
    overlapped = follow(comm, all_reduce.train, images(), model, own, epochs=EPOCHS, batch_size=28)
    for name, array in run.model.extra.items():
        np.testing.assert_allclose(overlapped.model.extra[name], array, rtol=1e-10, atol=1e-12)
    local = follow(comm, all_reduce.train, images(), f"{model},buffers=local", epochs=EPOCHS, batch_size=28)
    everyone = comm.allgather(local.model.extra["2.running_mean"].copy())
    assert all(not np.array_equal(each, everyone[0]) for each in everyone[1:])
    if comm.size == 1:
        assert np.array_equal(run.path, local.path)


@pytest.mark.parametrize("model", [CNN, f"{RESNET}batch"])
def test_resumed_is_never_stopped(model, resumes):
    whole, again = resumes(2, all_reduce.train, model, data=images, optimizer="adam")
    for name, array in whole.model.extra.items():
        assert np.array_equal(again.model.extra[name], array)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("own", [{"servers": 1}, {"on_workers": True}], ids=str)
def test_servers_score_with_the_mean_of_the_workers_statistics(own, follow, world):
    """In bulk: of the rows of a batch each worker has as many as under all-reduce."""
    model, workers = f"{RESNET}batch", world.size - own.get("servers", 0)
    working = world.Split(int(world.rank >= world.size - workers), world.rank)
    run = follow(world, parameter_server.train, images(), model, own, epochs=1, batch_size=12, workers=workers)
    if world.rank >= world.size - workers:
        wanted = follow(working, all_reduce.train, images(), model, epochs=1, batch_size=12)
        if working.rank == 0:
            extra = {name: array.copy() for name, array in wanted.model.extra.items()}
            sending = world.isend((extra, wanted.scores), 0)  # which may be this very rank
    if world.rank == 0:
        extra, scores = world.recv()
        assert run.scores == pytest.approx(scores, rel=1e-10)
        for name, array in extra.items():
            np.testing.assert_allclose(run.model.extra[name], array, rtol=1e-10, atol=1e-12)
    if world.rank == world.size - workers:
        sending.wait()
    working.Free()


@pytest.mark.mpi(min_size=2)
def test_a_worker_of_servers_goes_on_with_its_statistics(follow, world, mpi_tmp_path):
    """The only one: what is scored and saved is its own."""
    own = {"servers": world.size - 1}

    def steps(count, **more):
        options = {"steps": count, "workers": 1, "dtype": "float32", "schedule": "constant"}
        return follow(world, parameter_server.train, images("float32"), f"{RESNET}batch", own, **options, **more)

    whole = steps(6)
    steps(3, out=str(mpi_tmp_path / "a"))
    again = steps(6, resume=str(mpi_tmp_path / "a"))
    if world.rank == 0:
        assert np.array_equal(again.path, whole.path[3:])
        for name, array in whole.model.extra.items():
            assert np.array_equal(again.model.extra[name], array)
