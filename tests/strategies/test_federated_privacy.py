"""Private federated averaging: secure sums change nothing, and the noise is what the accountant takes it for."""

import math

import numpy as np
import pytest
from mpi4py import MPI
from written_runs import lines

from hpcdl.data import from_arrays
from hpcdl.federated.clients import poisson_sample
from hpcdl.federated.privacy import divergences, epsilon
from hpcdl.random import Random
from hpcdl.strategies import federated

pytestmark = pytest.mark.four


@pytest.fixture
def federate(follow):
    """A function: train by federated averaging on `bare`; own: the strategy's arguments, else 7 clients, all asked."""

    def run(bare, own=None, data=None, **options):
        own = {"clients": 7, "fraction": 1.0, "local_epochs": 2, "local_batch": 2} | (own or {})
        options = {"optimizer": "sgd", "schedule": "constant", "lr": 0.1, "trace": 0, "allreduce": "ring"} | options
        data = data or examples(options.get("dtype", "float64"))
        return follow(bare, federated.train, data, "mlp:5", own, **{"rounds": 4} | options)

    return run


def examples(dtype):
    """28 examples of 3 classes: 4 for each of 7 clients."""
    x, y = arrays()
    return from_arrays(x, y, x[:11], y[:11], dtype=dtype)


def arrays():
    random = np.random.default_rng(4)
    y = random.integers(0, 3, 28)
    return random.standard_normal((28, 6)) + y[:, None], y


def path(run):
    return np.array([run.model.initialize(run.random), *run.path])


def steps(run):
    """How the server's parameters move in each round."""
    return np.diff(path(run), axis=0)


@pytest.mark.parametrize(
    "own", [{}, {"drop_out": 0.2}, {"clip": 0.3, "noise": 0.7, "fraction": 0.8, "server": "momentum"}], ids=str
)
def test_secure_sums_are_the_plain_ones_to_the_bit_on_any_number_of_ranks(own, federate, comm):
    plain = federate(MPI.COMM_SELF, own, dtype="float32")
    run = federate(comm, own | {"secure": 0.5}, dtype="float32")
    assert np.array_equal(run.path, plain.path)
    assert run.reported["rounds_abandoned"] == 0 and run.agree


def test_a_round_with_too_few_answers_changes_nothing(federate, world):
    own = {"drop_out": 0.5, "server": "momentum"}
    secure, plain = federate(world, own | {"secure": 0.5}, rounds=12), federate(world, own, rounds=12)
    still = (steps(secure) == 0).all(axis=1)
    assert 0 < still.sum() == secure.reported["rounds_abandoned"] < 12
    first = int(still.argmax())
    assert np.array_equal(secure.path[:first], plain.path[:first]) and (steps(plain)[first] != 0).any()


def test_clients_of_equal_size_that_are_not_clipped_are_averaged_as_ever(federate, comm):
    plain = federate(MPI.COMM_SELF)
    assert np.abs(path(federate(comm, {"clip": 1000.0})) - path(plain)).max() < 1e-10


def test_no_client_moves_the_model_by_more_than_its_share(federate, world):
    """All 7 clients: the server moves by S at most, and by less than without clipping; a half of them asked: by the
    number that came, but divided by the number expected."""
    clip = 0.05
    moves = np.linalg.norm(steps(federate(world, {"clip": clip})), axis=1)
    assert (moves <= clip * (1 + 1e-9)).all() and (moves > clip / 7).all()
    assert (moves < np.linalg.norm(steps(federate(world)), axis=1)[0]).all()
    one = federate(world, {"clients": 1, "clip": clip})
    assert np.linalg.norm(steps(one), axis=1) == pytest.approx(clip, rel=1e-9)
    half = federate(world, {"clip": clip, "fraction": 0.5}, rounds=8)
    asked = [len(poisson_sample(half.random, turn, range(7), 0.5)) for turn in range(8)]
    assert len(set(asked)) > 2
    bounds = clip * np.array(asked) / 3.5
    assert (np.linalg.norm(steps(half), axis=1) <= bounds * (1 + 1e-9)).all()


def test_the_noise_is_what_the_accountant_takes_it_for(federate, world):
    """N(0, (z S)^2) on the first round's sum, which is divided by C K; the run's epsilon is that of its rounds."""
    own = {"clip": 0.05, "fraction": 0.6}
    with_noise, without = federate(world, own | {"noise": 1.3, "delta": 1e-4}, rounds=5), federate(world, own, rounds=5)
    noise = steps(without)[0] - steps(with_noise)[0]
    wanted = 1.3 * 0.05 * Random(0)("noise", 0).standard_normal(noise.size) / (0.6 * 7)
    assert np.abs(noise - wanted).max() < 1e-10
    alone = federate(world, {"clip": 1e-9, "noise": 1e6})  # in all rounds another one
    for turn, step in enumerate(steps(alone)):
        assert np.abs(step + 1e-3 * Random(0)("noise", turn).standard_normal(noise.size) / 7).max() < 2e-9
    assert with_noise.reported["epsilon"] == pytest.approx(epsilon(5 * divergences(1.3, 0.6), 1e-4))
    assert without.reported["epsilon"] is None
    assert "epsilon" not in federate(world).reported


@pytest.mark.parametrize("first", ["first round empty", "first round not empty"])
def test_rounds_without_clients_are_rounds_of_noise(first, federate, world, mpi_tmp_path):
    folder = mpi_tmp_path / "run"
    own = {"fraction": 0.1, "clip": 0.05, "noise": 1.0}
    empty = [not poisson_sample(Random(seed), 0, range(7), 0.1) for seed in range(20)]
    seed = empty.index(first == "first round empty")
    run = federate(world, own, rounds=12, out=str(folder), seed=seed)
    asked = [len(poisson_sample(run.random, turn, range(7), 0.1)) for turn in range(12)]
    assert 0 in asked[1:] and max(asked) > 0
    assert (np.linalg.norm(steps(run), axis=1) > 0).all()
    assert run.reported["epsilon"] == pytest.approx(epsilon(12 * divergences(1.0, 0.1), 1e-5))
    if world.rank == 0:
        lost = [line["train_loss"] is None for line in lines(folder) if "test_loss" not in line]
        assert lost == [count == 0 for count in asked]
        assert math.isfinite(run.progress.train_loss)
        scored = [line["train_loss"] for line in lines(folder) if "test_loss" in line]
        assert scored[0] is None if asked[0] == 0 else scored[0] > 0


def test_the_divisor_of_a_private_mean_does_not_tell_who_has_rows(federate, world):
    """C K, though some of the K clients have no rows, and coins of all K."""
    own = {"clients": 20, "clip": 0.05, "fraction": 0.5}
    data = from_arrays(*arrays(), *arrays(), dtype="float64", partition="dirichlet:0.05")
    assert 0 in map(len, data.divide(20))
    noisy, plain = (federate(world, own | {"noise": noise}, rounds=1, data=data) for noise in (1.0, 0.0))
    noise = steps(plain)[0] - steps(noisy)[0]
    wanted = 0.05 * Random(0)("noise", 0).standard_normal(noise.size) / (0.5 * 20)
    assert np.abs(noise - wanted).max() < 1e-10


@pytest.mark.parametrize("secure", [0.0, 0.5])
def test_resumed_is_never_stopped_and_the_budget_is_kept(secure, federate, world, mpi_tmp_path):
    """Also where the noise changes on the way, and the number of ranks."""
    own = {"clip": 0.1, "noise": 1.0, "fraction": 0.7, "drop_out": 0.4, "secure": secure}
    whole = federate(MPI.COMM_SELF, own, rounds=9)
    federate(world, own, rounds=4, out=str(mpi_tmp_path / "a"))
    again = federate(MPI.COMM_SELF, own, rounds=9, resume=str(mpi_tmp_path / "a"))
    assert np.array_equal(again.path, whole.path[4:])
    for key in ("epsilon", "rounds_abandoned") if secure else ("epsilon",):
        assert again.reported[key] == pytest.approx(whole.reported[key], rel=1e-12)
    more = federate(world, own | {"noise": 2.0}, rounds=9, resume=str(mpi_tmp_path / "a"))
    spent = 4 * divergences(1.0, 0.7) + 5 * divergences(2.0, 0.7)
    assert more.reported["epsilon"] == pytest.approx(epsilon(spent, 1e-5))
