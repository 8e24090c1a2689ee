"""Strategies that hold the model whole, or in slices: what is foretold is what a run holds, on every rank."""

import pytest

from hpcdl.planning.memory import rank_memory
from hpcdl.strategies.parameter_server import STRATEGY, ServerOptions
from hpcdl.strategies.workload import Workload

FEW = "--steps", "3"


@pytest.mark.parametrize(
    "ranks, program, options",
    [
        (1, "train-sequential", [*FEW, "--optimizer", "adam", "--dtype", "float64"]),
        (2, "train-allreduce", [*FEW, "--model", "mlp:64,32,activation=gelu", "--accumulate", "3"]),
        pytest.param(2, "train-allreduce", [*FEW, "--compress", "bfloat16", "--average"], marks=pytest.mark.long),
        pytest.param(2, "train-allreduce", [*FEW, "--overlap", "--model", "softmax"], marks=pytest.mark.long),
        (2, "train-svrg", ["--steps", "50", "--snapshot", "random"]),
        pytest.param(
            2, "train-svrg", ["--steps", "50", "--model", "softmax", "--method", "saga"], marks=pytest.mark.long
        ),
        pytest.param(1, "train-svrg", ["--steps", "1", "--model", "softmax", "--threads", "2"], marks=pytest.mark.long),
        (3, "train-sgld", [*FEW, "--chains", "2", "--model", "softmax"]),
        (3, "train-local-sgd", ["--steps", "4", "--sync-every", "2", "--outer", "nesterov"]),
        (3, "train-allreduce", [*FEW, "--data-servers", "1"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_data_parallel(foretold, ranks, program, options):
    foretold(ranks, program, *options)


@pytest.mark.parametrize(
    "more", [["--servers", "1"], ["--servers", "2", "--optimizer", "adam"], ["--servers-on-workers"]], ids=" ".join
)
def test_servers_in_rounds(foretold, more):
    one_copy = 4 * (64 * 128 + 128 + 128 * 10 + 10)  # of the digits' mlp
    foretold(3, "train-parameter-server", "--steps", "5", *more, late=one_copy)


def test_slices_of_12_values_on_5_servers(rows_file):
    options = ServerOptions(data=rows_file(), model="softmax", servers=5, optimizer="momentum")
    case = Workload(STRATEGY, options, 6)
    assert [rank_memory(case, rank)[0].peak["optimizer"] for rank in range(6)] == [12, 12, 8, 8, 8, 0]


@pytest.mark.parametrize(
    "more",
    [
        ["--consistency", "async"],
        pytest.param(["--consistency", "ssp", "--staleness", "2"], marks=pytest.mark.long),
        ["--consistency", "ssp", "--staleness", "2", "--broadcast-every", "3", "--optimizer", "sgd"],
    ],
    ids=" ".join,
)
def test_servers_without_rounds_send_one_worker_one_copy(foretold, more):
    foretold(2, "train-parameter-server", "--steps", "5", *more)


def test_federated_clients(foretold):
    foretold(2, "train-federated", "--clients", "20", "--rounds", "2", "--late", "0.2", "--server-optimizer", "fedyogi")


@pytest.mark.parametrize("locking", [["--threads", "2"], ["--shared"], ["--join", "gossip"]], ids=" ".join)
def test_hogwild(foretold, locking):
    foretold(2, "train-hogwild", "--steps", "2", "--optimizer", "adagrad", *locking)


def test_hogwild_with_replicas_and_on_servers(foretold):
    foretold(1, "train-hogwild", "--steps", "2", "--threads", "2", "--exchange-every", "100")
    foretold(2, "train-hogwild", "--steps", "2", "--join", "servers")


def test_coordinate_descent(foretold, rows_file):
    data = "--data", rows_file(), "--weight-decay", "0.01"
    foretold(3, "train-coordinate-descent", "--model", "svm", "--rounds", "2", *data)
