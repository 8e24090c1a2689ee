"""SGLD: on any number of ranks the textbook's steps; an exact posterior; chains, samples and what is kept of them."""

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from paths import agree

from hpcdl.csr import CSR
from hpcdl.data import from_arrays
from hpcdl.errors import AgreedError
from hpcdl.inference.posterior_samples import Samples
from hpcdl.inference.r_hat import rank_normalized_r_hat
from hpcdl.kernels import references
from hpcdl.models import for_data
from hpcdl.strategies import sgld
from hpcdl.strategies.sgld import initial_random, noise_key

pytestmark = pytest.mark.four

PLAIN = {"optimizer": "sgd", "schedule": "polynomial:b=3,gamma=0.4", "lr": 0.01}
OWN = {"burn_in": 4, "thin": 2}


def made(model, dtype="float64"):
    """29 examples: of 3 classes, sparse for softmax; of two values for a regression."""
    random = np.random.default_rng(4)
    x, y = random.standard_normal((29, 6)), random.integers(0, 3, 29)
    if model == "linear":
        return from_arrays(x, random.standard_normal((29, 2)), dtype=dtype)
    return from_arrays(CSR.of(x * (x > 0)) if model == "softmax" else x, y, x_test=None, dtype=dtype)


def rate(step):
    return 0.01 * (3 + step) ** -0.4


def textbook(model, data, steps, prior=1.0, noise=1.0, chain=0, chains=1):
    """The iterates of one chain."""
    model, w, path = for_data(model, data, "float64"), None, []
    w = model.initialize(initial_random(0, chain))
    for step in range(steps):
        epoch, at = divmod(step, 3)
        batch = next(iter(data.batches(epoch * chains + chain, 13, (0, 1), at)))
        g = np.zeros_like(w)
        model.loss_and_gradient(w, batch, g)
        z = references.normals(w.size, 0, step, *noise_key(0, chain))
        w = w - rate(step) / 2 * (29 / (batch.total * noise) * g + prior * w) + np.sqrt(rate(step)) * z
        path.append(w)
    return path


SAMPLED = 6, 8, 10, 12  # after so many steps, as OWN has it


def weighted(paths):
    """The mean of the samples of all chains, each weighted by the rate of its step (Welling and Teh, equation 11)."""
    weights = [rate(at - 1) for at in SAMPLED]
    assert weights[0] > 1.2 * weights[-1]
    return np.mean([np.average([w[at - 1] for at in SAMPLED], axis=0, weights=weights) for w in paths], axis=0)


def iterates(comm, run_of, **own):
    """A run, and this rank's iterate after each step."""
    found = []

    def train(*arguments, **own):
        arguments[4].observe(lambda run, loss, total: found.append(run.held.w.copy()))
        return sgld.train(*arguments, **own)

    return run_of(train, own), found


@pytest.mark.parametrize(
    "model, prior, noise", [("mlp:5", 1.0, 1.0), ("softmax", 0.0, 1.0), ("linear", 3.0, 0.5)], ids=str
)
@pytest.mark.least(1)
def test_the_steps_of_the_textbook(model, prior, noise, follow, comm):
    wanted = textbook(model, made(model), 12, prior, noise)
    own = OWN | {"prior_precision": prior, "noise_variance": noise}
    run, path = iterates(comm, lambda train, own: follow(comm, train, made(model), model, own, **PLAIN), **own)
    agree(path, wanted)
    assert run.agree and run.reported["samples"] == 4
    mean = weighted([wanted])
    assert np.abs(run.parameters - mean).max() < 1e-10
    assert np.abs(run.path[4] - wanted[4]).max() < 1e-10  # no sample yet: the iterate


@pytest.mark.parametrize("chains", [2, 3])
def test_chains_are_runs_of_their_own(chains, follow, comm):
    if comm.size < chains:
        return
    own = OWN | {"chains": chains}
    run, path = iterates(comm, lambda train, own: follow(comm, train, made("softmax"), "softmax", own, **PLAIN), **own)
    wanted = [textbook("softmax", made("softmax"), 12, chain=c, chains=chains) for c in range(chains)]
    agree(path, wanted[run.held.number])
    assert {*comm.allgather(run.held.number)} == {*range(chains)} and run.reported["samples"] == 4 * chains
    mean = weighted(wanted)
    assert np.abs(run.parameters - mean).max() < 1e-10 and run.agree
    assert run.examples == chains * 4 * 29
    r_hat = rank_normalized_r_hat(np.array([[w[at - 1] for at in SAMPLED] for w in wanted]))
    assert run.scores["r_hat_max"] == pytest.approx(r_hat.max(), rel=1e-8)
    assert run.scores["r_hat_median"] == pytest.approx(np.median(r_hat), rel=1e-8)


@pytest.mark.parametrize("chains", [1, 2])
def test_bytes(chains, follow, ring, comm):
    """One all-reduce of the parameters in each step, within a chain; nothing between chains."""
    if comm.size < chains:
        return
    run = follow(comm, sgld.train, made("softmax"), "softmax", OWN | {"chains": chains}, **PLAIN)
    counted, size = run.comm.traffic["all_reduce"], run.model.layout.size
    part = next(cut for cut in np.array_split(np.arange(comm.size), chains) if comm.rank in cut)
    one = ring.all_reduce(size, comm.rank - part[0], len(part))
    assert counted.calls == 12 and counted.bytes == 12 * one
    assert run.comm.traffic.bytes == counted.bytes + run.comm.traffic["broadcast"].bytes


STEPS, BURN_IN, ROWS, NOISE, PRIOR = 30_000, 500, 20, 0.25, 2.0


def posterior(x, y):
    """Mean and precision of the exact posterior of the weights and the bias of a linear regression."""
    rows = np.column_stack([x, np.ones(len(x))])
    precision = rows.T @ rows / NOISE + PRIOR * np.eye(rows.shape[1])
    return np.linalg.solve(precision, rows.T @ y / NOISE), precision


@pytest.mark.long
def test_the_exact_posterior_of_a_linear_regression(follow):
    """Mean and covariance within the Monte-Carlo error; at a rate h the exact covariance is (A - h/4 A^2)^-1.
    For w <- (I - h/2 A) w + noise of variance h has that one for its own. (A: the precision. Whole batches.)"""
    random = np.random.default_rng(2)
    x = random.standard_normal((ROWS, 2))
    y = x @ [1.0, -0.5] + 0.3 + np.sqrt(NOISE) * random.standard_normal(ROWS)
    mean, precision = posterior(x, y)
    h = 0.2 / np.linalg.eigvalsh(precision).max()
    covariance = np.linalg.inv(precision - h / 4 * precision @ precision)
    own = {"noise_variance": NOISE, "prior_precision": PRIOR, "burn_in": BURN_IN, "thin": STEPS}
    options = {"batch_size": "full", "steps": STEPS, "evaluate_every": STEPS, "lr": h, "schedule": "constant"}
    data = from_arrays(x, y, dtype="float64")
    _, path = iterates(
        MPI.COMM_SELF, lambda train, own: follow(MPI.COMM_SELF, train, data, "linear", own, **PLAIN | options), **own
    )
    drawn = np.array(path[BURN_IN:])
    slowest = 4 / (h * np.linalg.eigvalsh(precision).min())  # steps after which a sample counts as a new one
    count = len(drawn) / slowest
    deviations = np.sqrt(np.diag(covariance))
    assert count > 300
    assert (np.abs(drawn.mean(axis=0) - mean) < 4 * deviations / np.sqrt(count)).all()
    scale = np.linalg.inv(np.linalg.cholesky(covariance))
    found = scale @ np.cov(drawn.T) @ scale.T  # the identity, but for the error
    assert np.abs(found - np.eye(3)).max() < 5 * np.sqrt(2 / count) < 0.4


@pytest.mark.parametrize("chains, stop", [(1, 2), (1, 7), (2, 8), (2, 5)])
def test_resumed_is_never_stopped_to_the_bit(chains, stop, follow, world, mpi_tmp_path):
    folder, chains = mpi_tmp_path, min(chains, world.size)

    def steps(count, comm=world, **more):
        def start(train, own):
            return follow(comm, train, made("softmax"), "softmax", own, steps=count, **PLAIN, **more)

        return iterates(comm, start, **OWN | {"chains": chains})

    whole, path = steps(12, out=str(folder / "whole"))
    steps(stop, out=str(folder / "a"))
    steps(stop, out=str(folder / "half"))
    again, rest = steps(12, resume=str(folder / "a"), out=str(folder / "a"))
    assert np.array_equal(rest, path[stop:]) and np.array_equal(again.parameters, whole.parameters)
    assert again.scores == whole.scores and "r_hat_max" in whole.scores
    if world.rank == 0:
        with h5py.File(folder / "a/samples.h5") as mine, h5py.File(folder / "whole/samples.h5") as wanted:
            assert wanted["steps"][()].tolist() == mine["steps"][()].tolist() == [6, 8, 10, 12]
            assert wanted["samples"].shape == (chains, 4, 21)
            assert np.array_equal(mine["samples"], wanted["samples"])
            assert np.array_equal(mine["weights"], wanted["weights"])
            assert mine["weights"][()] == pytest.approx([rate(at - 1) for at in SAMPLED])
    few = world.Split(0 if world.rank < chains else MPI.UNDEFINED, world.rank)
    if few != MPI.COMM_NULL:  # on as many ranks as chains, to rounding, into another folder
        other, rest = steps(12, few, resume=str(folder / "half"), out=str(folder / "b"))
        agree([other.parameters], [whole.parameters], 1e-12)
        if few.rank == 0:  # of the first chain, as here
            agree(rest, path[stop:], 1e-12)
        few.Free()
    world.Barrier()
    if world.rank == 0:
        assert Samples.read(folder / "b", 12, 21, np.dtype("float64")).steps.tolist() == [6, 8, 10, 12]


def test_an_older_checkpoint_has_the_samples_up_to_its_step(follow, world, mpi_tmp_path):

    def steps(count, **more):
        options = {"checkpoint_every": 4, "keep": 3} | PLAIN | more
        return follow(world, sgld.train, made("softmax"), "softmax", OWN, steps=count, **options)

    whole = steps(12, out=str(mpi_tmp_path / "a"))
    again = steps(12, resume=str(mpi_tmp_path / "a/checkpoint-000000008.h5"), out=str(mpi_tmp_path / "a"))
    assert np.array_equal(again.parameters, whole.parameters) and again.scores == whole.scores
    if world.rank == 0:
        assert Samples.read(mpi_tmp_path / "a", 12, 21, np.dtype("float64")).steps.tolist() == [6, 8, 10, 12]
        assert Samples.read(mpi_tmp_path / "a", 9, 21, np.dtype("float64")).steps.tolist() == [6, 8]


@pytest.mark.parametrize(
    "left, words",
    [
        (None, r"there is no .*samples.h5: only runs of train-sgld have samples"),
        ([6], r"samples.h5 does not hold the samples of the checkpoint of step 8"),
    ],
)
def test_without_its_samples_a_run_is_not_gone_on_with(left, words, follow, world, mpi_tmp_path):

    def steps(count, **more):
        return follow(world, sgld.train, made("softmax"), "softmax", OWN, steps=count, **PLAIN, **more)

    steps(8, out=str(mpi_tmp_path / "a"))
    if world.rank == 0 and left is None:
        (mpi_tmp_path / "a/samples.h5").unlink()
    elif world.rank == 0:
        Samples(np.array(left), np.zeros((1, len(left), 21))).write(mpi_tmp_path / "a")
    with pytest.raises(AgreedError, match=words):
        steps(12, resume=str(mpi_tmp_path / "a"))


def test_another_number_of_chains_is_another_run(follow, world, mpi_tmp_path):
    folder = str(mpi_tmp_path / "a")
    follow(world, sgld.train, made("softmax"), "softmax", OWN, steps=5, out=folder, **PLAIN)
    with pytest.raises(AgreedError, match="thin is 2, not 3"):
        follow(world, sgld.train, made("softmax"), "softmax", OWN | {"thin": 3}, steps=9, resume=folder, **PLAIN)
