"""Strategies that hold the model whole, or in slices: what is foretold is what a run holds, on every rank."""

import pytest

from hpcdl.planning.memory import forecast
from hpcdl.strategies.parameter_server import STRATEGY, ServerOptions
from hpcdl.strategies.workload import Workload

ONE_COPY = 4 * (64 * 128 + 128 + 128 * 10 + 10)  # of the digits' mlp, in bytes
CASES = [  # ranks, program, options
    (1, "sequential", "--steps 3 --optimizer adam --dtype float64"),
    (2, "allreduce", "--steps 3 --model mlp:64,32,activation=gelu --accumulate 3"),
    (3, "allreduce", "--steps 3 --data-servers 1"),
    (2, "svrg", "--steps 50 --snapshot random"),
    (3, "sgld", "--steps 3 --chains 2 --model softmax"),
    (3, "local-sgd", "--steps 4 --sync-every 2 --outer nesterov"),
    (2, "allreduce", "--steps 3 --model mlp:32,32 --optimizer muon"),
    (2, "parameter-server", "--steps 5 --consistency async"),
    (2, "parameter-server", "--steps 5 --consistency ssp --staleness 2 --broadcast-every 3 --optimizer sgd"),
    (2, "federated", "--clients 20 --rounds 2 --late 0.2 --server-optimizer fedyogi"),
    (2, "hogwild", "--steps 2 --optimizer adagrad --threads 2"),
    (2, "hogwild", "--steps 2 --join servers"),
    (1, "hogwild", "--steps 2 --threads 2 --exchange-every 100"),
    (4, "gossip", "--steps 6 --topology exponential"),
    (4, "gossip", "--steps 6 --method detag --optimizer sgd"),
    (4, "gossip", "--steps 6 --method defacto --topology hypercube"),
]
LONG = [
    (2, "hogwild", "--steps 2 --optimizer adagrad --shared"),
    (2, "hogwild", "--steps 2 --optimizer adagrad --join gossip"),
    (4, "gossip", "--steps 6 --method dpsgd --topology one-peer"),
    (4, "gossip", "--steps 6 --method gradient-tracking"),
    (2, "allreduce", "--steps 3 --compress bfloat16 --average"),
    (3, "allreduce", "--steps 3 --compress powersgd:rank=1"),
    (2, "allreduce", "--steps 3 --compress dgc:0.1"),
    (2, "allreduce", "--steps 3 --compress qsgd"),
    (3, "local-sgd", "--steps 3 --sync-every 2 --compress powersgd:rank=1"),
    (3, "hogwild", "--steps 3 --model softmax --compress topk:0.1"),
    (3, "hogwild", "--steps 3 --model softmax --join gossip --compress sign"),
    (2, "hogwild", "--steps 3 --model softmax --join servers --compress int8"),
    (2, "allreduce", "--steps 3 --overlap --model softmax"),
    (2, "svrg", "--steps 50 --model softmax --method saga"),
    (1, "svrg", "--steps 1 --model softmax --threads 2"),
    (2, "parameter-server", "--steps 5 --consistency ssp --staleness 2"),
]
LONG = [pytest.param(*each, marks=pytest.mark.long) for each in LONG]


@pytest.mark.parametrize("ranks, program, options", [*CASES, *LONG])
def test_a_run_holds_what_is_foretold(foretold, ranks, program, options):
    foretold(ranks, f"train-{program}", *options.split())


def test_pairs_hold_what_is_on_its_way(foretold):
    foretold(2, "train-gossip", "--steps", "60", "--method", "adpsgd", late=ONE_COPY)


@pytest.mark.parametrize("more", ["--servers 1", "--servers 2 --optimizer adam", "--servers-on-workers"])
def test_servers_in_rounds(foretold, more):
    foretold(3, "train-parameter-server", "--steps", "5", *more.split(), late=ONE_COPY)


def test_slices_of_12_values_on_5_servers(rows_file):
    options = ServerOptions(data=rows_file(), model="softmax", servers=5, optimizer="momentum")
    case = Workload(STRATEGY, options, 6)
    assert [rank.bytes["optimizer"] for rank in forecast(case)] == [12, 12, 8, 8, 8, 0]


def test_coordinate_descent(foretold, rows_file):
    data = "--data", rows_file(), "--weight-decay", "0.01"
    foretold(3, "train-coordinate-descent", "--model", "svm", "--rounds", "2", *data)
