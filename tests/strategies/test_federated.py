"""Federated averaging: against the algorithm in plain numpy, and to the bit the same on any number of ranks."""

import itertools
import tracemalloc

import numpy as np
import pytest
from mpi4py import MPI
from written_runs import lines

from hpcdl.data import from_arrays, open_data
from hpcdl.data.partition import partition
from hpcdl.errors import TrainingError
from hpcdl.federated.clients import fate, sample
from hpcdl.federated.codec import fraction_bits
from hpcdl.random import Random
from hpcdl.strategies import federated

pytestmark = pytest.mark.four

PLAIN = {"optimizer": "sgd", "schedule": "constant", "lr": 0.1}


@pytest.fixture
def federate(follow):
    """A function: train by federated averaging on `bare`; own: the strategy's arguments, else 5 clients, all asked."""

    def run(bare, data=None, model="mlp:5", own=None, **options):
        own = {"clients": 5, "fraction": 1.0, "local_epochs": 1, "local_batch": 0} | (own or {})
        return follow(bare, federated.train, data, model, own, **{"rounds": 4} | PLAIN | options)

    return run


def mixed(dtype, spec="dirichlet:0.5", rows=61):
    """Examples of 3 classes, by which the clients' shares differ."""
    random = np.random.default_rng(5)
    y = random.integers(0, 3, rows)
    x = random.standard_normal((rows, 6)) + y[:, None]
    return from_arrays(x, y, x[:11], y[:11], dtype=dtype, partition=spec)


def same_bits(runs):
    first, *others = runs
    assert all(np.array_equal(first.path, other.path) for other in others)
    return len(first.path) > 0


@pytest.mark.parametrize("model", ["mlp:5", "softmax"])
@pytest.mark.parametrize("spec", ["iid", "by-label", "dirichlet:0.3"])
@pytest.mark.in_turn("model")
def test_every_client_one_epoch_one_batch_is_full_gradient_descent(spec, model, federate, alone, comm):
    options = {"weight_decay": 0.01, "rounds": 6}
    descent = {"batch_size": "full", "epochs": 6, "weight_decay": 0.01}
    reference = alone(model, mixed, **PLAIN | descent)
    run = federate(comm, mixed("float64", spec), model, {"clients": 7}, **options)
    assert len(run.path) == 6
    bound = 1e-12 + 7 * 2.0 ** -fraction_bits(61) / 61
    assert np.abs(np.array(run.path) - reference.path).max() < 6 * bound < 1e-10


WAYS = {
    "all at once": {},
    "momentum of a client's own": {"beta": 0.9, "local_epochs": 2, "local_batch": 2},
    "small batches": {"fraction": 0.6, "local_epochs": 2, "local_batch": 3},
    "proximal": {"local_epochs": 3, "local_batch": 2, "proximal": 0.5},
    "server momentum": {"fraction": 0.5, "server": "momentum:beta=0.7", "server_lr": 0.5, "local_epochs": 2},
    "fedadam": {"fraction": 0.6, "server": "fedadam", "local_batch": 2},
    "fedyogi": {"server": "fedyogi", "drop_out": 0.5},
    "fedadagrad": {"server": "fedadagrad", "local_epochs": 2},
    "fedyogi, settings": {"server": "fedyogi:beta1=0.5,beta2=0.9,tau=0.02", "server_lr": 0.3},
    "fedadagrad, settings": {"server": "fedadagrad:beta1=0.5,tau=0.02", "server_lr": 0.3},
    "dropped": {"drop_out": 0.5, "local_batch": 2},
    "late": {"drop_out": 0.2, "late": 0.5, "local_batch": 4, "server_lr": 0.8},
    "a rate that falls from round to round": {"decay": 1.0, "local_epochs": 2, "local_batch": 3, "beta": 0.5},
}


class Adaptive:
    """Reddi et al. 2021, algorithm 2: the server's parameters x after a round, by its mean change Delta."""

    def __init__(self, spec, eta):
        self.name, _, settings = spec.partition(":")
        self.set = {"beta1": 0.0 if self.name == "fedadagrad" else 0.9, "beta2": 0.99, "tau": 1e-3}
        for setting in filter(None, settings.split(",")):
            key, _, value = setting.partition("=")
            self.set[key] = float(value)
        self.eta = eta or {"fedadam": 0.01, "fedyogi": 0.01, "fedadagrad": 0.1}[self.name]
        self.m, self.v = 0.0, self.set["tau"] ** 2

    def __call__(self, x, change):
        beta1, beta2, tau = self.set["beta1"], self.set["beta2"], self.set["tau"]
        self.m = beta1 * self.m + (1 - beta1) * change
        if self.name == "fedadagrad":
            self.v = self.v + change**2
        elif self.name == "fedyogi":
            self.v = self.v - (1 - beta2) * change**2 * np.sign(self.v - change**2)
        else:
            self.v = beta2 * self.v + (1 - beta2) * change**2
        return x + self.eta * self.m / (np.sqrt(self.v) + tau)


def by_numpy(x, y, w, rounds, ways):
    """The algorithm for linear regression as the papers write it, with fates and the server's rule; sums of losses."""
    ways = {"fraction": 1.0, "local_epochs": 1, "local_batch": 0, "drop_out": 0.0, "late": 0.0, "decay": 0.0} | ways
    parts, random, path, losses = partition("iid", y, 0, 5, 0), Random(0), [], []
    x, velocity, late = np.c_[x, np.ones(len(x))], np.zeros(len(w)), (np.zeros(len(w)), 0)
    server, rate = ways.get("server", ""), ways.get("server_lr", 0.0)
    adaptive = Adaptive(server, rate) if server.startswith("fed") else None
    for t in range(rounds):
        (change, examples), late, loss = late, (np.zeros(len(w)), 0), 0.0
        for k in sample(random, t, range(5), max(1, round(5 * ways["fraction"]))):
            own, mine, n, v = w.copy(), parts[k], len(parts[k]), np.zeros(len(w))
            for epoch in range(ways["local_epochs"]):
                order = mine[random("local order", k, t, epoch).permutation(n)]
                size = ways["local_batch"] or n
                for rows in (order[start : start + size] for start in range(0, n, size)):
                    apart = x[rows] @ own - y[rows]
                    loss += (apart**2).sum() / 2
                    g = x[rows].T @ apart / len(rows)
                    v = ways.get("beta", 0.0) * v + g + ways.get("proximal", 0.0) * (own - w)
                    own = own - 0.1 / (1 + ways["decay"] * t) * v
            what = fate(random, t, k, ways["drop_out"], ways["late"])
            if what == "answers":
                change, examples = change + n * (own - w), examples + n
            elif what == "late":
                late = late[0] + n * (own - w), late[1] + n
        if examples and adaptive:
            w = adaptive(w, change / examples)
        elif examples:
            velocity = (0.7 if server else 0.0) * velocity - change / examples
            w = w - (rate or 1.0) * velocity
        path.append(w)
        losses.append(loss)
    return path, losses


@pytest.mark.parametrize("way", WAYS)
def test_as_the_algorithm_in_plain_numpy(way, federate, comm):
    random = np.random.default_rng(1)
    x, y = random.standard_normal((17, 3)), random.standard_normal(17)  # shares of 4, 4, 3, 3 and 3 rows
    first = federate(MPI.COMM_SELF, from_arrays(x, y, dtype="float64"), "linear").model.initialize(Random(0))
    wanted, losses = by_numpy(x, y, first, 8, WAYS[way])
    own = {name: value for name, value in WAYS[way].items() if name not in ("beta", "decay")}
    options = {"optimizer": f"momentum:beta={WAYS[way]['beta']}"} if "beta" in WAYS[way] else {}
    options |= {"schedule": "1/t:decay=1"} if "decay" in WAYS[way] else {}
    run = federate(comm, from_arrays(x, y, dtype="float64"), "linear", own, rounds=8, **options)
    assert np.abs(np.array(run.path) - wanted).max() < 1e-10
    assert np.sum(comm.allgather(run.own_losses), axis=0) == pytest.approx(losses, rel=1e-10)
    assert way == "all at once" or np.abs(np.array(wanted) - by_numpy(x, y, first, 8, {})[0]).max() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("algorithm", ["ring", "auto", "mpi"])
@pytest.mark.in_turn("algorithm", "dtype")
def test_the_same_bits_on_any_number_of_ranks(algorithm, optimizer, dtype, federate, comm):
    own = {"clients": 9, "fraction": 0.7, "local_epochs": 2, "local_batch": 4, "proximal": 0.1}
    own |= {"drop_out": 0.2, "late": 0.3, "server": "adam", "server_lr": 0.02}
    options = {"dtype": dtype, "optimizer": optimizer, "lr": 0.02, "schedule": "cosine:warmup=1", "clip_norm": 1.0}
    alone = federate(MPI.COMM_SELF, mixed(dtype), "mlp:7", own, **options)
    run = federate(comm, mixed(dtype), "mlp:7", own, allreduce=algorithm, **options)
    assert same_bits([alone, run])
    assert run.agree is True


def test_on_digits_the_same_bits_with_products_of_many_rows(federate, world):
    data = open_data("digits", comm=world, dtype="float32", seed=3, partition="shards:2", validation=0.1)
    own = {"clients": 10, "fraction": 0.5, "local_batch": 0, "local_epochs": 2}
    settings = {"dtype": "float32", "seed": 3, "rounds": 3}
    alone = federate(MPI.COMM_SELF, data, "mlp:64", own, **settings)
    assert same_bits([alone, federate(world, data, "mlp:64", own, **settings)])
    data.close()


@pytest.mark.parametrize("own", [{"server": "momentum"}, {"late": 0.5}, {"late": 0.5, "server": "fedyogi"}], ids=str)
def test_resumed_is_never_stopped_to_the_bit_on_any_number_of_ranks(own, federate, world, mpi_tmp_path, each_group):
    own = own | {"local_batch": 4, "fraction": 0.6, "server_lr": 0.1}
    whole = federate(MPI.COMM_SELF, mixed("float32"), own=own, dtype="float32", rounds=9)
    federate(world, mixed("float32"), own=own, dtype="float32", rounds=4, out=str(mpi_tmp_path / "a"))

    def body(comm):
        again = federate(comm, mixed("float32"), own=own, dtype="float32", rounds=9, resume=str(mpi_tmp_path / "a"))
        assert np.array_equal(again.path, whole.path[4:])

    each_group(body)


def test_the_learning_rate_of_a_round_is_the_clients(federate, world, mpi_tmp_path):
    federate(world, own={"server_lr": 0.7}, rounds=3, lr=0.2, schedule="1/t:decay=1", out=str(mpi_tmp_path / "a"))
    world.Barrier()
    rates = [line["learning_rate"] for line in lines(mpi_tmp_path / "a") if "test_loss" not in line]
    assert rates == [0.2, 0.1, 0.2 / 3]


def test_a_round_in_which_nobody_answers_changes_nothing(federate, world):
    own = {"drop_out": 0.7, "fraction": 0.4, "server": "adam", "server_lr": 0.1}
    run = federate(world, own=own, rounds=12)
    path = [run.model.initialize(Random(0)), *run.path]
    silent = []
    for turn in range(12):
        asked = sample(Random(0), turn, range(5), 2)
        silent.append(all(fate(Random(0), turn, client, 0.7, 0.0) == "dropped" for client in asked))
    assert 0 < sum(silent) < 12
    assert [np.array_equal(one, two) for one, two in itertools.pairwise(path)] == silent
    assert run.optimizer.step == 12 - sum(silent)


def test_sends_one_vector_a_round_and_counts_what_was_processed(federate, comm):
    own = {"clients": 8, "fraction": 0.5, "local_epochs": 3, "local_batch": 4, "drop_out": 0.3}
    data = mixed("float32")
    rows = data.divide(8)
    having = [client for client in range(8) if len(rows[client])]
    work = sum(3 * len(rows[client]) for turn in range(6) for client in sample(Random(0), turn, having, 4))
    run = federate(comm, data, own=own, allreduce="ring", dtype="float32", rounds=6)
    counted, size = run.comm.traffic["all_reduce"], run.model.layout.size + 1
    assert counted.calls == 6
    assert comm.allreduce(counted.bytes) == 6 * 2 * (comm.size - 1) * size * 8
    assert (run.examples, run.reported["rounds"], run.reported["clients_per_round"]) == (work, 6, 4)
    late = federate(comm, data, own=own | {"late": 0.1}, allreduce="ring", dtype="float32", rounds=6)
    assert late.comm.traffic["all_reduce"].calls == 12


def test_clients_without_rows_are_never_asked(federate, world):
    data = mixed("float64", "dirichlet:0.05")
    rows = data.divide(30)
    having = sum(len(own) > 0 for own in rows)
    assert having < 25
    own = {"clients": 30, "local_batch": 5}
    run = federate(world, data, own=own, rounds=2)
    assert run.reported["clients_per_round"] == having and run.examples == 2 * 61


@pytest.mark.long
def test_memory_does_not_grow_with_the_clients(federate, world):
    """A thousand clients cost rows' numbers, no models: 8 bytes a row and an array's header for each client."""
    random = np.random.default_rng(0)
    data = from_arrays(random.random((2000, 50), np.float32), np.arange(2000) % 4, dtype="float32")

    def peak(clients):
        tracemalloc.start()
        own, options = {"clients": clients, "local_batch": 10}, {"dtype": "float32", "rounds": 1, "trace": 0}
        federate(world, data, "mlp:300", own, allreduce="ring", **options)
        return tracemalloc.get_traced_memory()[1], tracemalloc.stop()

    peak(10)  # what is loaded once
    few, many = peak(10)[0], peak(1000)[0]
    model = 4 * (50 * 300 + 300 + 300 * 4 + 4)
    assert many - few < 1000 * 1000  # bytes; a copy of the model has 66,016, for each client 66 MB
    assert 7 * model < few < 20 * model


def test_the_accuracy_asked_for_ends_the_run(federate, world):
    data = open_data("digits", comm=world, dtype="float32", seed=1)
    own = {"clients": 20, "fraction": 0.25, "local_batch": 10, "local_epochs": 5, "rounds_to": 0.9}
    run = federate(world, data, "mlp:32", own, dtype="float32", seed=1, rounds=60)
    assert run.stopped == "accuracy" and run.scores["test_accuracy"] >= 0.9
    assert run.reported["rounds_to_accuracy"] == run.reported["rounds"] == run.step == len(run.path) < 60
    run = federate(world, data, "mlp:32", own | {"rounds_to": 1.0}, dtype="float32", seed=1, rounds=2)
    assert run.stopped == "finished" and run.reported["rounds_to_accuracy"] is None
    data.close()


def test_who_diverges_ends_the_run(federate, world):
    for lr in (1e5, 1e200):  # farther than fixed point goes; not even finite
        with pytest.raises(
            TrainingError, match=r"client \d has a 2-norm of 1024 or more, or is not finite, in round \d; a smaller"
        ):
            federate(world, model="linear", data=from_arrays(np.ones((9, 2)), np.ones(9), dtype="float64"), lr=lr)
