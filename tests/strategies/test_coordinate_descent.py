"""Dual coordinate ascent on N ranks: what N simulated workers do, step by step; a gap that bounds the distance to the
best; one all-reduce in a round."""

import numpy as np
import pytest
from mpi4py import MPI
from paths import agree

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.csr import CSR
from hpcdl.data import from_arrays
from hpcdl.data.order.sampler import local_order
from hpcdl.kernels.linear import HINGE, LOGISTIC
from hpcdl.models import make_model
from hpcdl.models.linear_form import LinearForm, linear_form
from hpcdl.parallel.dual_ascent import Ascent
from hpcdl.strategies import coordinate_descent

pytestmark = pytest.mark.four

ROWS, FEATURES, DECAY = 37, 5, 0.05
MODELS = {"linear": "squared", "svm": "hinge", "logistic": "logistic"}


def rows(model):
    random = np.random.default_rng(11)
    x = random.standard_normal((ROWS, FEATURES)) * random.integers(0, 2, (ROWS, FEATURES))
    score = x @ [1.0, -2, 0.5, 0, 3] + 0.3 * random.standard_normal(ROWS) + 0.4
    return x, score if model == "linear" else (score > 0).astype(int)


def examples(model, sparse=False, dtype="float64", **how):
    x, y = rows(model)
    x, few = (CSR.of(each) if sparse else each for each in (x, x[:9]))
    return from_arrays(x, y, few, y[:9], dtype=dtype, **how)


@pytest.fixture
def descend(follow):
    """A function: train on `bare` for some rounds by coordinate descent; returns the run."""

    def run(bare, model="svm", data=None, rounds=6, sparse=False, how=None, dtype="float64", options=None, **own):
        data = data or examples(model, sparse, dtype, **(how or {}))
        own = {"weight_decay": DECAY} | own
        return follow(bare, coordinate_descent.train, data, model, own, rounds=rounds, dtype=dtype, **(options or {}))

    return run


# The textbook: z, the slope and the conjugate of each loss, on whole arrays.


def losses(loss, z, y):
    if loss == "squared":
        return (z - y) ** 2 / 2
    m = (2 * y - 1) * z
    return np.maximum(0, 1 - m) if loss == "hinge" else np.logaddexp(0, -m)


def best_dual(loss, a, z, y, q):
    if loss == "squared":
        return a + (y - z - a) / (1 + q)
    s = 2 * y - 1
    if loss == "hinge":
        return s * min(1, max(0, s * a + (1 - s * z) / q))
    low, high = 0.0, 1.0
    for _ in range(70):
        b = (low + high) / 2
        low, high = (b, high) if b < 1 / (1 + np.exp(s * z + q * (b - s * a))) else (low, b)
    return s * low


def shrunk(v, l1):
    return np.sign(v) * np.maximum(abs(v) - l1 / DECAY, 0)


def simulate(model, data, ranks, rounds, local_steps=1.0, aggregate="add", l1=0.0, seed=0):
    """The parameters after each round of so many workers, one after the other, each with its rows of `data`."""
    loss, (x, y) = MODELS[model], rows(model)
    x = np.column_stack([x, np.ones(ROWS)])
    numbers = [np.sort(data.in_place(0, (rank, ranks))[2]) for rank in range(ranks)]
    assert sorted(np.concatenate(numbers)) == list(range(ROWS))
    sigma, gamma = (ranks, 1.0) if aggregate == "add" else (1, 1 / ranks)
    a, v, path = np.zeros(ROWS), np.zeros(FEATURES + 1), []
    for turn in range(rounds):
        change, moved = np.zeros(ROWS), np.zeros_like(v)
        for rank, own in enumerate(numbers):
            visits = max(1, round(local_steps * len(own)))
            mine, gained = np.zeros(ROWS), np.zeros_like(v)
            for visit in range(turn * visits, (turn + 1) * visits):
                number, at = divmod(visit, len(own))
                i = own[local_order(seed, len(own), number, rank)[at]]
                z, q = shrunk(v + sigma * gained, l1) @ x[i], sigma * x[i] @ x[i] / (DECAY * ROWS)
                step = best_dual(loss, a[i] + mine[i], z, y[i], q) - a[i] - mine[i]
                mine[i] += step
                gained += step * x[i] / (DECAY * ROWS)
            change, moved = change + mine, moved + gained
        a, v = a + gamma * change, v + gamma * moved
        path.append(shrunk(v, l1))
    return path, a


@pytest.mark.parametrize(
    "model, sparse, how, own",
    [
        ("svm", False, {}, {}),
        ("svm", True, {}, {"aggregate": "average"}),
        ("svm", True, {"partition": "by-label"}, {"local_steps": 2.5}),
        ("linear", False, {}, {"l1": 0.03}),
        ("linear", True, {}, {"local_steps": 0.3}),
        ("logistic", False, {}, {"local_steps": 0.25}),
        ("logistic", True, {}, {"l1": 0.01, "aggregate": "average"}),
    ],
    ids=str,
)
@pytest.mark.least(1)
def test_the_steps_of_simulated_workers(model, sparse, how, own, descend, comm):
    path, a = simulate(model, examples(model, **how), comm.size, 6, **own)
    run = descend(comm, model, sparse=sparse, how=how, **own)
    agree(run, path)
    whole = np.zeros(ROWS)
    whole[run.held.mine.numbers] = run.held.mine.dual[:, 0]
    comm.Allreduce(MPI.IN_PLACE, whole)
    assert np.abs(whole - a).max() <= 1e-10 and run.agree is True
    assert run.scores["drift"] < 1e-13


def test_on_one_rank_both_ways_are_sdca_to_the_bit(descend):
    added = descend(MPI.COMM_SELF, "logistic", threads=1, locking="none")
    assert added.reported["locking"] is None  # one thread takes no locks
    averaged = descend(MPI.COMM_SELF, "logistic", aggregate="average")
    assert np.array_equal(added.path, averaged.path)
    model = make_model("logistic", (FEATURES,), 2, "float64")
    form = linear_form(model, "", (1,))
    alone = Ascent(examples("logistic"), form, (0, 1), DECAY)
    for turn in range(6):
        alone.visit(turn * ROWS, ROWS, 1)
        assert np.array_equal(added.path[turn], alone.v[0])


def optimum(model, l1=0.0):
    """The best w by very many steps of other methods: proximal gradients; of the svm projected ones in the dual."""
    x, y = rows(model)
    x = np.column_stack([x, np.ones(ROWS)])
    if model == "svm":
        signed, b = x * (2 * y - 1)[:, None], np.zeros(ROWS)
        rate = DECAY * ROWS / np.linalg.norm(x, 2) ** 2
        for _ in range(20_000):
            b = np.clip(b + rate * (1 - signed @ (signed.T @ b) / (DECAY * ROWS)), 0, 1)
        return signed.T @ b / (DECAY * ROWS)
    rate = 1 / (np.linalg.norm(x, 2) ** 2 / ROWS + DECAY)
    w = np.zeros(FEATURES + 1)
    for _ in range(10_000):
        z = x @ w
        slope = z - y if model == "linear" else 1 / (1 + np.exp(-z)) - y
        w = w - rate * (x.T @ slope / ROWS + DECAY * w)
        w = np.sign(w) * np.maximum(abs(w) - rate * l1, 0)
    return w


def primal(model, w, l1=0.0):
    x, y = rows(model)
    z = np.column_stack([x, np.ones(ROWS)]) @ w
    return losses(MODELS[model], z, y).mean() + DECAY / 2 * w @ w + l1 * abs(w).sum()


@pytest.fixture
def certificates(monkeypatch):
    """The certificates of all evaluations, as they come."""
    found, original = [], Ascent.certificate

    def note(self, *arguments):
        found.append(original(self, *arguments))
        return found[-1]

    monkeypatch.setattr(Ascent, "certificate", note)
    return found


@pytest.mark.parametrize(
    "model, l1, aggregate",
    [
        ("svm", 0.0, "add"),
        ("svm", 0.0, "average"),
        ("linear", 0.0, "average"),
        ("linear", 0.2, "add"),
        ("logistic", 0.0, "add"),
        ("logistic", 0.04, "average"),
    ],
)
def test_it_ends_at_the_optimum_and_the_gap_bounds_the_way_there(model, l1, aggregate, descend, certificates, world):
    wanted = optimum(model, l1)
    best = primal(model, wanted, l1)
    rounds = 120 if world.size == 1 else 30
    run = descend(world, model, rounds=rounds, l1=l1, aggregate=aggregate, local_steps=1.0 if world.size == 1 else 5.0)
    assert len(certificates) == len(run.path) == rounds
    before = -np.inf
    for w, found in zip(run.path, certificates, strict=True):
        assert found["primal"] == pytest.approx(primal(model, w, l1), abs=1e-12)
        assert found["duality_gap"] == found["primal"] - found["dual"] >= -1e-13
        assert found["primal"] - best <= found["duality_gap"] + 1e-12 and found["dual"] <= best + 1e-12
        assert found["dual"] >= before - 1e-13  # each round ascends
        before = found["dual"]
    if world.size == 1:
        assert before > best - 1e-9 and np.abs(run.path[-1] - wanted).max() < 1e-4
        assert l1 == 0 or 0 < (wanted == 0).sum() == (run.path[-1] == 0).sum()


def test_single_precision_has_a_certificate_of_what_it_saves(descend, certificates, world):
    run = descend(world, "logistic", rounds=60, dtype="float32")
    assert run.parameters.dtype == np.float32
    w = run.parameters.astype(np.float64)
    x, y = rows("logistic")
    z = np.column_stack([x.astype(np.float32), np.ones(ROWS)]) @ w
    assert certificates[-1]["primal"] == pytest.approx(np.logaddexp(0, (1 - 2 * y) * z).mean() + DECAY / 2 * w @ w)
    assert world.size > 1 or 0 < certificates[-1]["duality_gap"] < 1e-6
    assert 1e-9 < certificates[-1]["drift"] < 1e-6  # the rounding of w


def test_several_outputs_are_as_many_problems(follow, world):
    x, y = rows("linear")
    both = np.column_stack([y, -2 * y + x[:, 0]])
    own = {"weight_decay": DECAY, "l1": 0.01}
    runs = [
        follow(world, coordinate_descent.train, from_arrays(x, each, dtype="float64"), "linear", own, rounds=5)
        for each in (both, both[:, 0], both[:, 1])
    ]
    for step in range(5):
        w, *each = (run.path[step] for run in runs)
        assert np.abs(w.reshape(FEATURES + 1, 2).T - each).max() < 1e-13
    gaps = [run.scores["duality_gap"] for run in runs]
    assert gaps[0] == pytest.approx(gaps[1] + gaps[2], abs=1e-12)


def test_standardized_rows_are_those_that_the_model_sees(follow, world):
    x, y = rows("linear")
    x = np.round(20 * x + 7).clip(0, 255).astype(np.uint8)
    standard = from_arrays(x, y, dtype="float64", standardize=True, scale=0.1)
    seen, value = standard.train.rows(0, ROWS)
    plain = from_arrays(seen.copy(), value.copy(), dtype="float64")
    own = {"weight_decay": DECAY}
    one, other = (
        follow(world, coordinate_descent.train, each, "linear", own, rounds=4).path for each in (standard, plain)
    )
    assert np.abs(np.subtract(one, other)).max() < 1e-12


@pytest.mark.parametrize("validation", [0.0, 0.3])
def test_a_row_that_is_held_out_has_no_dual_variable(validation, descend, world):
    run = descend(world, how={"validation": validation}, local_steps=0.5)
    n = ROWS - round(validation * ROWS)
    assert world.allreduce(len(run.held.mine.numbers)) == run.held.mine.examples == n
    assert ("validation_loss" in run.scores) == bool(validation)


def test_one_all_reduce_of_the_model_in_a_round(descend, ring, world):
    run = descend(world, local_steps=3.0, rounds=7)
    sent = run.comm.traffic["all_reduce"]
    assert sent.calls == 7 and sent.bytes == 7 * ring.all_reduce(FEATURES + 1, world.rank, world.size)
    assert set(name for name, each in run.comm.traffic.items() if each.calls) == {"all_reduce"}
    visits = world.allgather(run.held.mine.visits(3.0))
    assert run.examples == 7 * sum(visits) == 7 * 3 * ROWS


def test_a_tolerance_ends_the_run(descend, world, certificates):
    run = descend(world, "linear", rounds=500, tolerance=1e-3)
    assert run.stopped == "tolerance" and 1 < run.step < 500 and len(certificates) == run.step
    gaps = [found["duality_gap"] for found in certificates]
    assert gaps[-1] <= 1e-3 < gaps[-2]


@pytest.mark.parametrize("aggregate", ["add", "average"])
def test_resumed_to_the_bit(aggregate, descend, world, mpi_tmp_path):
    folder = str(mpi_tmp_path / "a")
    own = {"model": "logistic", "local_steps": 0.7, "aggregate": aggregate, "l1": 0.01}
    whole = descend(world, rounds=8, **own)
    descend(world, rounds=3, options={"out": folder}, **own)
    again = descend(world, rounds=8, options={"resume": folder}, **own)
    assert np.array_equal(again.path, whole.path[3:])
    assert np.array_equal(again.held.mine.dual, whole.held.mine.dual)
    assert again.scores == whole.scores


def test_gone_on_with_on_other_ranks(descend, world, mpi_tmp_path):
    folder = str(mpi_tmp_path / "a")
    before = descend(world, rounds=4, options={"out": folder})
    found = Checkpoint.read(mpi_tmp_path / "a").vectors
    assert found["dual/variables"].shape == (ROWS, 1) and found["dual/v"].shape == (1, FEATURES + 1)
    if world.rank == 0:
        after = descend(MPI.COMM_SELF, rounds=5, options={"resume": folder, "out": "none"})
        alone = Ascent(examples("svm"), LinearForm(HINGE, FEATURES, 1), (0, 1), DECAY)
        alone.dual[:], alone.v[:] = found["dual/variables"], found["dual/v"]
        alone.visit(4 * ROWS, ROWS, 1)
        assert np.array_equal(after.path[0], alone.v[0]) and after.scores["drift"] < 1e-13
        assert after.scores["dual"] > before.scores["dual"]
    world.Barrier()


@pytest.mark.parametrize("locking", ["atomic", "none"])
def test_many_threads_end_at_the_optimum_or_at_that_of_a_near_problem(locking):
    """PASSCoDe: atomic ascends as fast as SDCA without delays; wild ends where each a_i is best for its w (theorem 3).
    SDCA (theorem 1 of its paper): of losses that are 1/gamma-smooth, a step leaves 1 - s/n of the dual distance to the
    best, s = lambda n gamma / (R^2 + lambda n gamma). PASSCoDe's own factor (theorem 2) is no smaller."""
    n, decay, gamma, passes = 1000, 0.02, 4, 40
    random = np.random.default_rng(8)
    x = random.standard_normal((n, 12)) * (random.random((n, 12)) < 0.4)
    x /= np.maximum(1, np.linalg.norm(x, axis=1))[:, None]
    y = (x @ random.standard_normal(12) + 0.2 * random.standard_normal(n) > 0).astype(int)
    data, rows = from_arrays(CSR.of(x), y, dtype="float64"), np.column_stack([x, np.ones(n)])
    sign, squares = 2 * y - 1, (rows**2).sum(axis=1)

    def ascent(threads, how):
        """The dual's value after each pass, its variables and v."""
        made, found = Ascent(data, LinearForm(LOGISTIC, 12, 1), (0, 1), decay, 0.0, 0, threads, how), []
        for turn in range(passes):
            made.visit(turn * n, n, 1)
            b = np.clip(sign * made.dual[:, 0], 1e-300, 1 - 1e-16)
            w = rows.T @ made.dual[:, 0] / (decay * n)
            found.append(-(b * np.log(b) + (1 - b) * np.log1p(-b)).mean() - decay / 2 * w @ w)
        made.close()
        return np.array(found), made.dual[:, 0], made.v[0], w

    wanted, _, best, _ = ascent(1, "atomic")
    values, a, v, proved = ascent(4, locking)
    if locking == "atomic":
        s = decay * n * gamma / (squares.max() + decay * n * gamma)
        assert (wanted[-1] - values <= wanted[-1] * np.exp(-s * np.arange(1, passes + 1)) + 1e-13).all()
        assert np.abs(v - proved).max() < 1e-12 and np.abs(v - best).max() < 1e-8
    z = rows @ v
    apart = [abs(best_dual("logistic", *each) - each[0]) for each in zip(a, z, y, squares / (decay * n), strict=True)]
    assert max(apart) < 1e-8


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("locking", ["atomic", "none"])
@pytest.mark.in_turn("sparse")
def test_threads(locking, sparse, descend, certificates, world):
    best = primal("svm", optimum("svm"))
    run = descend(world, sparse=sparse, rounds=15, threads=3, locking=locking)
    assert run.reported["threads"] == 3 and run.reported["locking"] == locking
    for found in certificates:
        assert found["primal"] - best <= found["duality_gap"] + 1e-12  # true of lost additions, too
    if locking == "atomic":
        assert certificates[-1]["drift"] < 1e-13


def test_a_rank_without_rows(descend, world):
    if world.size == 1:
        return
    x, y = rows("svm")
    data = from_arrays(x[: world.size - 1], y[: world.size - 1], classes=2, dtype="float64")
    run = descend(world, data=data, rounds=3)
    assert sorted(world.allgather(len(run.held.mine.numbers))) == [0, *[1] * (world.size - 1)]
    assert run.scores["duality_gap"] >= 0 and run.agree
