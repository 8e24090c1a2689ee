"""Strategies with compressed messages: a codec that sends all values changes nothing, and each codec trains."""

import numpy as np
import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.comm import Communicator
from hpcdl.comm.compression import codecs, make_codec, methods
from hpcdl.comm.compression.codec import VectorCodec
from hpcdl.comm.compression.exchange import ChunkExchange
from hpcdl.comm.compression.method import CompressionMethod
from hpcdl.comm.gossip.choco import ChocoGossip, measured
from hpcdl.comm.gossip.mixing import mixing
from hpcdl.comm.gossip.topology import topology
from hpcdl.errors import TrainingError, UsageError
from hpcdl.memory import Memory
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.strategies import federated, gossip, hogwild, local_sgd, parameter_server
from hpcdl.strategies.compressing import check_averaging, check_codec
from hpcdl.strategies.parameter_server import PULLED


class Exact(VectorCodec):
    """Sends the values as they are."""

    def message_bytes(self, n):
        return n * self.dtype.itemsize

    def encode(self, values, message, key):
        message.view(self.dtype)[:] = values

    def add(self, message, into, factor=1.0):
        into += factor * message.view(self.dtype)


class Half(Exact):
    """Sends the first half of the values: the other ones stay."""

    def add(self, message, into, factor=1.0):
        half = into.size // 2
        into[:half] += factor * message.view(self.dtype)[:half]


@pytest.fixture(autouse=True)
def further_methods(monkeypatch):
    for name, codec in (("exact", Exact), ("half", Half)):
        method = CompressionMethod(
            name,
            codec=lambda dtype, feedback, codec=codec: codec(dtype),
            state=lambda size, dtype, key, layout, feedback, codec=codec: ChunkExchange(
                size, codec(dtype), feedback, key
            ),
        )
        monkeypatch.setitem(methods(), name, method)
    for name, optimizers in (("factors", ()), ("momentum", ("sgd",))):
        method = CompressionMethod(name, state=lambda *arguments: None, optimizers=optimizers)
        monkeypatch.setitem(methods(), name, method)


def ring_of(comm):
    return {"topology": topology("ring", comm.size, 0)}


STRATEGIES = {
    "local SGD": (local_sgd.train, lambda comm: {"sync_every": 2}),
    "SlowMo": (local_sgd.train, lambda comm: {"sync_every": 2, "outer": "momentum", "outer_lr": 0.9}),
    "post-local SGD": (local_sgd.train, lambda comm: {"sync_every": 2, "local_from": 1, "local_momentum": "average"}),
    "gossip": (gossip.train, ring_of),
    "HOGWILD!": (hogwild.train, lambda comm: {"join_every": 2}),
    "HOGWILD! by gossip": (
        hogwild.train,
        lambda comm: {"join_every": 2, "join": "gossip", "topology": lambda n: topology("ring", n, 0)},
    ),
}
SERVED = {
    "bsp": {"servers": 1},
    "2 servers": {"servers": 2},
    "on workers": {"on_workers": True},
    "ssp": {"consistency": Consistency("ssp", 2)},
    "broadcast": {"on_workers": True, "consistency": Consistency("ssp", 2), "broadcast_every": 1},
    "async": {"consistency": Consistency("async")},
}


def options_of(name, **options):
    """HOGWILD! has linear models, and sgd without momentum."""
    return options | ({"model": "softmax", "optimizer": "sgd"} if "HOGWILD" in name else {})


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.mpi(min_size=2)
def test_all_values_are_as_no_compression(name, bare, follow):
    train, own = STRATEGIES[name]
    options = options_of(name, optimizer="momentum")
    plain = follow(bare, train, own=own(bare), **options)
    exact = follow(bare, train, own=own(bare) | {"compress": "exact"}, **options)
    assert np.allclose(exact.path, plain.path, rtol=0, atol=1e-10)
    half = follow(bare, train, own=own(bare) | {"compress": "half"}, **options)
    assert not np.allclose(half.path, plain.path, rtol=0, atol=1e-10)  # what is sent counts


@pytest.mark.parametrize("spec", codecs())
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.in_turn("spec")
@pytest.mark.mpi(min_size=2)
def test_each_codec_trains(name, spec, bare, follow):
    train, own = STRATEGIES[name]
    options = options_of(name, dtype="float32", lr=0.01)
    path = follow(bare, train, own=own(bare) | {"compress": spec}, **options).path
    assert np.isfinite(path).all() and (np.diff(path, axis=0) != 0).any(axis=1).all()


@pytest.mark.parametrize("spec", codecs())
@pytest.mark.parametrize("name", ["local SGD", "gossip", "HOGWILD!", "HOGWILD! by gossip"])
@pytest.mark.in_turn("spec")
@pytest.mark.mpi(min_size=2)
def test_what_is_not_finite_is_found_on_all_ranks(name, spec, bare, follow):
    train, own = STRATEGIES[name]
    options = options_of(name, dtype="float32", lr=3e38, steps=30)
    with pytest.raises(TrainingError, match=r"(loss|parameters|train loss) .*not finite"):
        follow(bare, train, own=own(bare) | {"compress": spec}, **options)


@pytest.mark.mpi(min_size=2)
def test_choco_is_its_formula(bare):
    """In numpy: each rank with estimates of all, where only the first half of a difference travels."""
    comm, n, rounds, gamma = Communicator(bare), 11, 5, 0.4
    w = mixing(topology("ring", comm.size, 0), 0)
    drift = np.random.default_rng(1).standard_normal((rounds, comm.size, n))
    x = np.zeros((comm.size, n))
    estimates, mine = x.copy(), np.zeros(n)
    run = ChocoGossip(comm, mine, w, "half", gamma, 0, Memory())
    sent = comm.traffic["push"].bytes
    for turn in range(rounds):
        x += drift[turn]
        estimates[:, : n // 2] += (x - estimates)[:, : n // 2]
        x += gamma * (w @ estimates - estimates)
        mine += drift[turn, comm.rank]
        run.factor = 1.0  # the formula's Q is not scaled
        run.round(turn)
        assert np.allclose(mine, x[comm.rank], rtol=0, atol=1e-12)
        assert np.allclose(run.estimate, estimates[comm.rank], rtol=0, atol=1e-12)
    assert comm.traffic["push"].bytes - sent == rounds * len(run.receivers) * make_codec("half", "f8").message_bytes(n)
    comm.free()


@pytest.mark.parametrize("spec", ["exact", "half", *codecs()])
@pytest.mark.mpi(min_size=2)
def test_gossip_agrees_by_the_measured_step(spec, bare):
    """Rounds alone bring all ranks towards the average, also by the methods that leave out most."""
    spec += ":0.25" * (spec in ("topk", "randomk"))  # gamma is about this fraction, and a round goes as far squared
    comm, codec = Communicator(bare), make_codec(spec, "float64")
    if spec == "exact":
        assert measured(codec, 99) == (1.0, 1.0)
    start = np.random.default_rng(2).standard_normal((comm.size, 64))
    mine = np.zeros(64)
    run = ChocoGossip(comm, mine, mixing(topology("ring", comm.size, 0), 0), spec, 0.0, 0, Memory())
    mine += start[comm.rank]
    for turn in range(200):
        run.round(turn)
    sent = slice(0, 32) if spec == "half" else slice(None)
    far, at_first = (np.linalg.norm((each - start.mean(axis=0))[sent]) for each in (mine, start[comm.rank]))
    assert far < 0.5 * at_first
    comm.free()


@pytest.mark.parametrize("name", ["bsp", "2 servers", "on workers"])
@pytest.mark.mpi(min_size=2)
def test_servers_get_all_values(name, bare, serve):
    own = SERVED[name]
    if own.get("servers", 0) < bare.size:
        plain, exact = serve(bare, own), serve(bare, own | {"compress": "exact", "compress_pull": "exact"})
        half = serve(bare, own | {"compress": "half"})
        if bare.rank == 0:
            assert np.allclose(exact.path, plain.path, rtol=0, atol=1e-10)
            assert not np.allclose(half.path, plain.path, rtol=0, atol=1e-10)


@pytest.mark.parametrize("spec", codecs())
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.in_turn("spec")
@pytest.mark.mpi(min_size=2)
def test_each_codec_trains_on_servers(name, spec, bare, serve):
    own = SERVED[name] | {"compress": spec}
    if own.get("servers", 0) < bare.size:
        pulled = spec.partition(":")[0] in PULLED and name != "broadcast"
        run = serve(bare, own | {"compress_pull": spec if pulled else "none"}, dtype="float32", lr=0.01)
        if bare.rank == 0:
            assert np.isfinite(run.path).all() and run.step == 12


@pytest.mark.parametrize("spec", ["exact", "half", *codecs()])
@pytest.mark.mpi(min_size=2)
def test_rounds_of_hogwild_are_pushed_compressed(spec, bare, follow):
    """With one worker the order of pushes is given, and a codec that sends all values changes nothing."""
    options = options_of("HOGWILD!", dtype="float32" if spec in codecs() else "float64", lr=0.01)

    def path(compress):
        own = {"servers": bare.size - 1, "compress": compress}
        return follow(bare, hogwild.train_on_servers, own=own, workers=1, **options).path

    found, plain = path(spec), path("none")
    if bare.rank == 0:
        assert np.isfinite(found).all() and np.allclose(found, plain, rtol=0, atol=1e-12) == (spec == "exact")


CLIENTS = {"clients": 7, "fraction": 0.6, "local_epochs": 1, "local_batch": 3, "drop_out": 0.2}


def test_clients_send_all_values(bare, follow):
    """To the bit: sums are of fixed-point numbers."""
    paths = {
        spec: follow(bare, federated.train, own=CLIENTS | {"compress": spec}, rounds=4).path
        for spec in ("none", "exact", "half")
    }
    assert np.array_equal(paths["none"], paths["exact"]) and not np.array_equal(paths["none"], paths["half"])


@pytest.mark.parametrize("spec", codecs())
def test_answers_of_clients_do_not_depend_on_the_number_of_ranks(spec, world, follow):
    own, found = CLIENTS | {"compress": spec}, []
    for ranks in (1, world.size):
        part = world.Split(0 if world.rank < ranks else 1, world.rank)
        found.append(np.array(follow(part, federated.train, own=own, dtype="float32", rounds=4).path))
    assert np.isfinite(found[0]).all() and np.array_equal(world.bcast(found[0]), found[1])


@pytest.mark.parametrize(
    "name", ["on workers", "2 servers", "local SGD", "SlowMo", "gossip", "HOGWILD!", "HOGWILD! by gossip"]
)
@pytest.mark.mpi(min_size=2)
def test_resumed_is_never_stopped(name, world, follow, mpi_tmp_path):
    """To the bit, what messages have left out as well."""
    train, own = STRATEGIES.get(name, (parameter_server.train, lambda comm: SERVED[name]))
    own, folder, path = own(world) | {"compress": "bfloat16"}, str(mpi_tmp_path / "a"), None
    workers = world.size - own.get("servers", 0)
    if not workers:
        return
    for stop, options in ((11, {}), (5, {"out": folder}), (11, {"resume": folder})):
        settings = options_of(name, dtype="float32", schedule="constant", steps=stop) | options
        run = follow(world, train, own=own, workers=workers, **settings)
        path = run.path if not options else path
    if world.rank == 0 or name not in SERVED:
        assert np.array_equal(run.path, path[5:])
    if world.rank == 0:
        kept = [each for each in Checkpoint.read(folder).vectors if "residual" in each or "estimate" in each]
        assert len(kept) == (2 if "gossip" in name else 1)
        assert all(np.any(row) for each in kept for row in Checkpoint.read(folder).vectors[each])


def test_methods_that_do_not_fit_are_refused():
    check_averaging("factors", None)  # an all-reduce of their own is all that averages need
    with pytest.raises(UsageError, match="--compress momentum is a part of the optimizer of all-reduced gradients"):
        check_averaging("momentum", None)
    for spec in ("factors", "momentum"):
        with pytest.raises(
            UsageError, match=f"--compress {spec} works in an all-reduce, and here clients answer; take"
        ):
            check_codec(spec, "clients answer")
    for spec in ("none", "exact"):
        check_codec(spec, "")
        check_averaging(spec, None)
