"""SVRG, SAGA and SVRG on threads: on any number of ranks the textbook's steps; what they send; how they converge."""

import numpy as np
import pytest
from mpi4py import MPI
from paths import agree

from hpcdl.csr import CSR
from hpcdl.data import from_arrays
from hpcdl.errors import AgreedError
from hpcdl.models import for_data
from hpcdl.random import Random
from hpcdl.strategies import asynchronous_svrg, saga, sequential, svrg

pytestmark = pytest.mark.four

RATE, DECAY, PER_EPOCH = 0.05, 0.02, 3  # 29 examples in batches of 13
PLAIN = {"optimizer": "sgd", "schedule": "constant", "lr": RATE}
KINDS = {"softmax": 3, "logistic": 2, "svm": 2, "linear": 0}


def made(kind, sparse=False, dtype="float64", outputs=2, rows=29, features=6):
    """Examples for a model of this kind: dense, or sparse with a row and a column that are empty."""
    random, classes = np.random.default_rng(4), KINDS.get(kind, 3)
    x = random.standard_normal((rows, features)) * (random.random((rows, features)) < (0.4 if sparse else 1))
    y = random.integers(0, classes, rows) if classes else random.standard_normal((rows, outputs))
    if sparse:
        x[5], x[:, 2] = 0, 0
    return from_arrays(CSR.of(x) if sparse else x, y, classes=classes, dtype=dtype)


def gradients(model, data, w):
    """Of each example, (examples, parameters), in the order of their numbers."""
    x, y = data.train.rows(0, data.examples)
    found = np.zeros((data.examples, w.size))
    for i in range(data.examples):
        batch = next(iter(data.batches(0, 1)))
        batch.x, batch.y = x[i : i + 1], y[i : i + 1]
        model.loss_and_gradient(w, batch, found[i])
    return found


def batches(data, steps, size):
    """The numbers of the examples of each of so many steps."""
    epochs = -(-data.examples // size)
    found = [batch.index.copy() for epoch in range(-(-steps // epochs)) for batch in data.batches(epoch, size)]
    return found[:steps]


def textbook(model, data, steps, size=13, m=None, drawn=False, decay=DECAY):
    """Parameters after each step; m: steps of a round, None: SAGA."""
    model = for_data(model, data, "float64")
    w, path, table = model.initialize(Random(0)), [], None
    for step, batch in enumerate(batches(data, steps, size)):
        g = gradients(model, data, w)
        if table is None or (m and step % m == 0):
            table = g.copy()
        if drawn and step % m == Random(0)("snapshot", step // m).integers(m):
            kept = w
        w = w - RATE * ((g - table)[batch].mean(axis=0) + table.mean(axis=0) + decay * w)
        if m is None:
            table[batch] = g[batch]
        if drawn and step % m == m - 1:
            w = kept
        path.append(w)
    return path


@pytest.mark.parametrize(
    "model, sparse, own",
    [
        ("mlp:5", False, {"inner_epochs": 1.0}),
        ("mlp:5", True, {"inner_epochs": 5 / 3, "snapshot": "random"}),
        ("softmax", False, {"inner_epochs": 4 / 3, "snapshot": "random"}),
        ("logistic", True, {"inner_epochs": 2.0}),
        ("linear", False, {"inner_epochs": 0.1}),  # a full gradient in each step: gradient descent
    ],
    ids=str,
)
@pytest.mark.least(1)
def test_svrg_takes_the_steps_of_the_textbook(model, sparse, own, follow, comm):
    m = max(1, round(own["inner_epochs"] * PER_EPOCH))
    wanted = textbook(model, made(model, sparse), 12, m=m, drawn="snapshot" in own)
    run = follow(comm, svrg.train, made(model, sparse), model, own, weight_decay=DECAY, **PLAIN)
    agree(run, wanted)
    assert run.agree and run.reported["snapshots"] == -(-12 // m)
    assert run.reported["gradients_per_example"] == pytest.approx(2 * 4 + -(-12 // m))


@pytest.mark.parametrize(
    "model, sparse", [("softmax", True), ("logistic", False), ("svm", True), ("linear", False)], ids=str
)
@pytest.mark.least(1)
def test_saga_takes_the_steps_of_the_textbook(model, sparse, follow, comm):
    wanted = textbook(model, made(model, sparse), 12)
    run = follow(comm, saga.train, made(model, sparse), model, weight_decay=DECAY, **PLAIN)
    agree(run, wanted)
    assert run.agree and run.reported["gradients_per_example"] == pytest.approx(4 + 1)


@pytest.mark.parametrize("partition", ["by-label", "dirichlet:0.5"])
def test_rows_that_belong_to_ranks(partition, follow, world):
    """The table by numbers of examples: a method that converges to the optimum, whoever has which rows."""
    random = np.random.default_rng(3)
    x, y = random.standard_normal((40, 3)), random.integers(0, 2, 40)
    ends = []
    for kind in (partition, "iid"):
        data = from_arrays(x, y, classes=2, dtype="float64", partition=kind)
        options = {"weight_decay": 0.1, "epochs": 60, "batch_size": 8} | PLAIN | {"lr": 0.4}
        ends.append(follow(world, saga.train, data, "logistic", **options).parameters)
    assert np.abs(ends[0] - ends[1]).max() < 1e-10


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize("model", KINDS)
@pytest.mark.in_turn("decay")
def test_one_thread_takes_the_steps_of_svrg_with_batches_of_one(model, sparse, decay, follow):
    own, options = {"threads": 1, "inner_epochs": 2}, PLAIN | {"rounds": 4, "weight_decay": decay}
    run = follow(MPI.COMM_SELF, asynchronous_svrg.train, made(model, sparse), model, own, **options)
    wanted = textbook(model, made(model, sparse), 4 * 29, size=1, m=2 * 29, decay=decay)
    agree(run, wanted[28::29])
    assert run.reported["snapshots"] == 2 and run.reported["gradients_per_example"] == 2 * 4 + 2


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_several_threads_come_to_the_same_optimum(sparse, follow):
    """However they interleave. 2,000 rows, so that they do."""
    data = [made("logistic", sparse, rows=2000) for _ in range(2)]
    options = {"weight_decay": 0.1, "optimizer": "sgd", "schedule": "constant", "lr": 0.05}
    ends = [
        follow(MPI.COMM_SELF, asynchronous_svrg.train, each, "logistic", {"threads": threads}, rounds=28, **options)
        for each, threads in zip(data, (1, 4), strict=True)
    ]
    assert np.abs(ends[0].parameters - ends[1].parameters).max() < 1e-8
    assert ends[1].reported["threads"] == 4


@pytest.mark.parametrize("model", ["logistic", "softmax", "svm"])
def test_threads_in_float32_with_scales_and_standardized(model, follow):
    random = np.random.default_rng(6)
    x, y = random.integers(0, 200, (50, 4)).astype(np.uint8), random.integers(0, 2, 50)
    data = [from_arrays(x, y, scale=0.01, dtype="float32", standardize=True) for _ in range(2)]
    options = {"dtype": "float32", **PLAIN}
    own = {"threads": 1, "inner_epochs": 1}
    mine = follow(MPI.COMM_SELF, asynchronous_svrg.train, data[0], model, own, rounds=2, **options)
    own = {"inner_epochs": 1.0}
    wanted = follow(MPI.COMM_SELF, svrg.train, data[1], model, own, epochs=2, batch_size=1, **options)
    agree(mine, wanted.path[49::50], 1e-5)
    assert mine.own_losses == pytest.approx([sum(wanted.own_losses[:50]), sum(wanted.own_losses[50:])], rel=1e-4)


@pytest.mark.parametrize(
    "train, own, steps, vectors, tables",  # calls of all-reduce with as many values as parameters, and as the table
    [
        (svrg.train, {"inner_epochs": 1.0}, 12, 12 + 4, 0),
        (svrg.train, {"inner_epochs": 5 / 3}, 12, 12 + 3, 0),
        (svrg.train, {"inner_epochs": 2.0}, 7, 7 + 2, 0),
        (saga.train, {}, 12, 12 + 1, 4 + 1),  # slopes at first, and after each epoch
        (saga.train, {}, 7, 7 + 1, 2 + 1),
    ],
)
def test_bytes(train, own, steps, vectors, tables, follow, ring, comm):
    run = follow(comm, train, made("softmax"), "softmax", own, steps=steps, **PLAIN)
    counted, (size, table) = run.comm.traffic["all_reduce"], (run.model.layout.size, 29 * 3)
    sizes = [size] * vectors + [table] * tables
    assert counted.calls == len(sizes)
    assert counted.bytes == sum(ring.all_reduce(each, comm.rank, comm.size) for each in sizes)
    assert run.comm.traffic.bytes == counted.bytes + run.comm.traffic["broadcast"].bytes


@pytest.mark.parametrize(
    "method, stop",
    [("svrg", 4), ("svrg", 5), ("svrg random", 3), ("svrg random", 9), ("saga", 1), ("saga", 6), ("saga", 8)],
)
def test_resumed_is_never_stopped_to_the_bit(method, stop, follow, resumes, world, mpi_tmp_path):
    train, options = saga.train if method == "saga" else svrg.train, PLAIN | {"dtype": "float64"}
    own = {} if method == "saga" else {"inner_epochs": 5 / 3, "snapshot": "random" if "random" in method else "last"}
    whole, again = resumes(stop, train, "softmax", own, lambda dtype: made("softmax"), **options)
    assert whole.reported["gradients_per_example"] == again.reported["gradients_per_example"]
    if world.rank == 0:  # and on another number of ranks, to rounding
        options |= {"steps": 11, "resume": str(mpi_tmp_path / "a")}
        agree(follow(MPI.COMM_SELF, train, made("softmax"), "softmax", own, **options), whole.path[stop:], 1e-12)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_one_thread_resumed_is_never_stopped_to_the_bit(stop, follow, tmp_path):
    def epochs(count, **more):
        options = {"rounds": count, "weight_decay": DECAY} | PLAIN | more
        own = {"threads": 1, "inner_epochs": 3}
        return follow(MPI.COMM_SELF, asynchronous_svrg.train, made("svm", True), "svm", own, **options)

    whole = epochs(5)
    epochs(stop, out=str(tmp_path / "a"))
    assert np.array_equal(epochs(5, resume=str(tmp_path / "a")).path, whole.path[stop:])


def test_a_rate_that_takes_more_than_all_away(follow):
    with pytest.raises(AgreedError, match="must be less than 1"):
        own = {"threads": 1}
        options = PLAIN | {"lr": 3.0, "weight_decay": 0.5, "rounds": 1}
        follow(MPI.COMM_SELF, asynchronous_svrg.train, made("svm", True), "svm", own, **options)


# A strongly convex problem: logistic regression with an L2 penalty, rows of length 1.
EXAMPLES, PENALTY = 250, 0.05
SMOOTHNESS = 2 / 4 + PENALTY  # largest curvature of one example's function: |(x, 1)|^2 / 4, and the penalty's


def problem(sparse):
    random = np.random.default_rng(1)
    x = random.standard_normal((EXAMPLES, 8)) * (random.random((EXAMPLES, 8)) < 0.5)
    x[:, 0] += 0.1
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y = (x @ random.standard_normal(8) + 0.3 * random.standard_normal(EXAMPLES) > 0).astype(np.int64)
    return x, y, from_arrays(CSR.of(x) if sparse else x, y, dtype="float64")


def suboptimality(x, y):
    """The function w -> P(w) - P(w*), from Newton's method for w*; by Taylor where it is small."""
    rows, sign = np.column_stack([x, np.ones(len(x))]), 2 * y - 1

    def value(w):
        return np.logaddexp(0, -sign * (rows @ w)).mean() + PENALTY / 2 * w @ w

    best = np.zeros(rows.shape[1])
    for _ in range(20):
        p = 1 / (1 + np.exp(-rows @ best))
        hessian = (rows * (p * (1 - p))[:, None]).T @ rows / len(x) + PENALTY * np.eye(len(best))
        best = best - np.linalg.solve(hessian, rows.T @ (p - y) / len(x) + PENALTY * best)

    def apart(w):
        far = value(w) - value(best)
        return far if far > 1e-9 else (w - best) @ hessian @ (w - best) / 2

    return apart


@pytest.mark.long
@pytest.mark.parametrize("method", ["last", "random", "saga", "4 threads"])
def test_the_rate_is_linear(method, follow):
    """By the factor of the paper's theorem for each round, or faster, to 1e-12; SGD with the same rate stalls."""
    sparse = method != "last"
    x, y, data = problem(sparse)
    apart, rate, m = suboptimality(x, y), 0.1 / SMOOTHNESS, 4 * EXAMPLES
    options = {"optimizer": "sgd", "schedule": "constant", "lr": rate, "weight_decay": PENALTY, "batch_size": 1}
    start = apart(np.zeros(9))
    alone = MPI.COMM_SELF
    if method == "saga":
        run = follow(alone, saga.train, data, "logistic", epochs=48, **options)
    elif "threads" in method:
        own = {"threads": 4, "inner_epochs": 4}
        run = follow(alone, asynchronous_svrg.train, data, "logistic", own, **options | {"rounds": 48})
    else:
        own = {"inner_epochs": 4.0, "snapshot": method}
        run = follow(alone, svrg.train, data, "logistic", own, epochs=48, **options)
    every = 4 if "threads" in method else m
    reached = [apart(w) for w in run.path[every - 1 :: every]]
    bound = 1 / (PENALTY * rate * (1 - 2 * SMOOTHNESS * rate) * m) + 2 * SMOOTHNESS * rate / (1 - 2 * SMOOTHNESS * rate)
    assert len(reached) == 12 and bound < 0.5
    for s, found in enumerate(reached, 1):
        assert found <= max(1e-14, bound**s * apart(run.model.initialize(Random(0)))), s
    assert reached[-1] < 1e-12 < start
    if method == "last":
        stalled = follow(alone, sequential.train, data, "logistic", epochs=8, **options)
        assert min(apart(w) for w in stalled.path[m:]) > 1e-6
