"""Local SGD: one local step is all-reduce SGD; several are what replicas simulated on one rank do; bytes fall by H."""

from collections import namedtuple

import numpy as np
import pytest
from paths import agree

from hpcdl.data import from_arrays
from hpcdl.models import make_model
from hpcdl.random import Random
from hpcdl.strategies import all_reduce, local_sgd

pytestmark = pytest.mark.four

RATE, STEPS, PER_EPOCH = 0.05, 12, 3  # 29 examples in batches of 13, 4 epochs


# The textbook, on whole arrays: w, its state and the mean gradient -> the next w. t counts from 1.


def sgd(w, state, g, rate, t):
    return w - rate * g


def momentum(w, state, g, rate, t):
    state["v"] = 0.9 * state.get("v", 0) + g
    return w - rate * state["v"]


def nesterov(w, state, g, rate, t):
    state["v"] = 0.9 * state.get("v", 0) + g
    return w - rate * (g + 0.9 * state["v"])


def adam(w, state, g, rate, t):
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["s"] = 0.999 * state.get("s", 0) + 0.001 * g**2
    m, s = state["m"] / (1 - 0.9**t), state["s"] / (1 - 0.999**t)
    return w - rate * m / (np.sqrt(s) + 1e-8)


RULES = {"sgd": sgd, "momentum": momentum, "nesterov": nesterov, "adam": adam}
Simulated = namedtuple("Simulated", "path distances")


def simulate(ranks, data, optimizer, sync_every, local_from=0, local_momentum="keep", outer="average", outer_lr=1.0):
    """The averages after each step of so many replicas, and their consensus distances."""
    model = make_model("mlp:5", (6,), 3, "float64")
    w = [model.initialize(Random(0)) for _ in range(ranks)]
    states, start, outside, path, distances = [{} for _ in w], w[0], {}, [], []
    epochs = [data("float64") for _ in w]  # a source each, as each reuses the batches it gives
    first, last = PER_EPOCH * local_from, 0

    def averaged():
        return [{name: np.mean([s[name] for s in states], axis=0) for name in states[0]} for _ in w]

    for t in range(STEPS):
        epoch, step = divmod(t, PER_EPOCH)
        for r in range(ranks):
            batch = next(iter(epochs[r].batches(epoch, 13, (r, ranks), step)))
            g = np.zeros_like(w[r])
            model.loss_and_gradient(w[r], batch, g)
            count = t + 1 - (last if local_momentum == "reset" else 0)
            w[r] = RULES[optimizer](w[r], states[r], g * ranks / batch.total, RATE, count)
        if t < first:  # all of linear rules is averaged at each step, which is all-reduce SGD
            start = np.mean(w, axis=0)
            w, states = [start] * ranks, averaged()
        elif (t + 1 - first) % sync_every == 0:
            mean, last = np.mean(w, axis=0), t + 1
            if outer != "average":
                mean = start = RULES[outer](start, outside, start - mean, outer_lr, (t + 1 - first) // sync_every)
            w = [mean] * ranks
            if local_momentum == "average":
                states = averaged()
            elif local_momentum == "reset":
                states = [{} for _ in w]
        path.append(np.mean(w, axis=0))
        distances.append(np.mean([np.sum((each - path[-1]) ** 2) for each in w]))
    return Simulated(path, distances)


@pytest.mark.parametrize(
    "fate, options",
    [
        ("keep", {"optimizer": "sgd"}),
        ("keep", {"optimizer": "momentum"}),
        ("average", {"optimizer": "momentum"}),
        ("keep", {"optimizer": "nesterov"}),
        ("average", {"optimizer": "nesterov"}),
        ("keep", {"weight_decay": 0.1}),
        ("keep", {"accumulate": 3}),
        ("average", {"batch_size": 2}),  # fewer examples than ranks in every batch
        ("keep", {"batch_size": "full", "epochs": 6}),
    ],
    ids=str,
)
@pytest.mark.least(4)
def test_one_local_step_is_all_reduce_sgd(fate, options, follow, comm):
    reference = follow(comm, all_reduce.train, **options)
    agree(follow(comm, local_sgd.train, own={"sync_every": 1, "local_momentum": fate}, **options), reference)


@pytest.mark.parametrize(
    "optimizer, own",
    [
        ("sgd", {"sync_every": 3}),
        ("momentum", {"sync_every": 4}),
        ("momentum", {"sync_every": 5, "local_momentum": "average"}),
        ("nesterov", {"sync_every": 2, "local_momentum": "reset"}),
        ("adam", {"sync_every": 5}),
        ("adam", {"sync_every": 3, "local_momentum": "average"}),
        ("adam", {"sync_every": 3, "local_momentum": "reset"}),
        ("sgd", {"sync_every": 2, "outer": "sgd", "outer_lr": 0.6}),
        ("adam", {"sync_every": 2, "outer": "sgd", "outer_lr": 1.0}),
        ("momentum", {"sync_every": 2, "outer": "momentum", "outer_lr": 0.8}),  # SlowMo
        ("adam", {"sync_every": 3, "outer": "nesterov", "outer_lr": 0.7}),  # DiLoCo, but for the decay
        ("nesterov", {"sync_every": 2, "local_momentum": "average", "outer": "adam", "outer_lr": 0.01}),
        ("momentum", {"sync_every": 2, "local_from": 1, "local_momentum": "reset", "outer": "nesterov"}),  # post-local
    ],
    ids=str,
)
@pytest.mark.least(3)
def test_several_local_steps_are_those_of_simulated_replicas(optimizer, own, follow, comm):
    wanted = simulate(comm.size, follow.examples, optimizer, **own)
    run = follow(comm, local_sgd.train, own=own, optimizer=optimizer, schedule="constant", lr=RATE)
    agree(run, wanted)
    assert run.agree is None
    synchronized = (STEPS - PER_EPOCH * own.get("local_from", 0)) % own["sync_every"] == 0
    assert run.scores["consensus_distance"] == pytest.approx(wanted.distances[-1], rel=1e-6, abs=1e-25)
    assert (wanted.distances[-1] > 1e-9) == (comm.size > 1 and not synchronized)
    assert comm.size == 1 or max(wanted.distances) > 1e-9


@pytest.mark.parametrize("options", [{"optimizer": "momentum"}, {"optimizer": "adam", "clip_norm": 0.05}], ids=str)
def test_post_local_is_all_reduce_sgd_at_first(options, follow, comm):
    """To the bit and with every rule; then the local steps begin, from parameters and state that are the same."""
    reference = follow(comm, all_reduce.train, allreduce="ring", dtype="float32", **options)
    own = {"sync_every": 4, "local_from": 2, "outer": "nesterov", "outer_lr": 0.7}
    run = follow(comm, local_sgd.train, own=own, allreduce="ring", dtype="float32", **options)
    exact = 2 * PER_EPOCH if comm.size in (1, 2, 4, 8) else 0  # else the average of equal bits is rounded
    assert np.array_equal(run.path[:exact], reference.path[:exact])
    assert np.allclose(run.path[: 2 * PER_EPOCH], reference.path[: 2 * PER_EPOCH], rtol=1e-6, atol=0)
    assert run.comm.traffic["all_reduce"].calls == 2 * PER_EPOCH + 1  # of 6 local steps, 4 make a round
    assert np.allclose(run.path[2 * PER_EPOCH + 3], run.state.tracked["outer/start"].array, rtol=1e-6, atol=0)


def post_local_sgd(data, w, workers, switch, H, rates, m):
    """Lin et al. 2020, section 3, for a linear regression: the mean of the workers' models after each step.
    H(t) = 1 in the first `switch` steps, mini-batch SGD, whose momentum all workers share; H after it, and each worker
    goes on with a momentum of its own. rates: of each step; m: of Nesterov's momentum."""
    start, w = w, np.tile(w, (workers, 1))
    velocity, path = np.zeros_like(w), []
    for t, rate in enumerate(rates):
        epoch, step = divmod(t, 3)
        for k in range(workers):
            batch = next(iter(data.batches(epoch, 12, (k, workers), step)))
            x = np.c_[batch.x, np.ones(len(batch.x))]
            gradient = x.T @ (x @ w[k] - batch.y) / len(x)  # of the B_loc = 12 / workers rows of worker k
            velocity[k] = m * velocity[k] + gradient
            w[k] -= rate * (gradient + m * velocity[k])
        if t < switch:
            velocity[:] = velocity.mean(axis=0)
        if t < switch or (t + 1 - switch) % H == 0:
            start = start - np.mean(start - w, axis=0)
            w[:] = start
        path.append(w.mean(axis=0))
    return path


@pytest.mark.parametrize("optimizer, m", [("sgd", 0.0), ("nesterov", 0.9)])
def test_post_local_sgd_in_plain_numpy(optimizer, m, follow, comm):
    """As in the paper the local steps begin where the rate first falls; the last of 15 steps is not averaged."""
    random = np.random.default_rng(2)
    x, y = random.standard_normal((36, 3)), random.standard_normal(36)
    rates = [0.1 * 0.2 ** (t // 6) for t in range(15)]
    data = [from_arrays(x, y, dtype="float64") for _ in range(2)]
    options = {"optimizer": optimizer, "model": "linear", "batch_size": 12, "epochs": 5}
    options |= {"lr": 0.1, "schedule": "step:every=2,factor=0.2"}
    run = follow(comm, local_sgd.train, data[0], own={"sync_every": 4, "local_from": 2}, **options)
    first = run.model.initialize(Random(0))
    agree(run, post_local_sgd(data[1], first, comm.size, 6, 4, rates, m), 1e-12)
    large_batch = post_local_sgd(data[1], first, comm.size, 15, 1, rates, m)
    assert comm.size == 1 or np.abs(np.array(run.path) - large_batch).max() > 1e-4


@pytest.mark.parametrize("steps, own, calls", [
    (12, {}, {1: 12, 2: 6, 3: 4, 4: 3, 6: 2, 12: 1}),
    (11, {}, {2: 5, 4: 2, 12: 0}),
    (12, {"local_from": 2}, {1: 12, 2: 9, 3: 8, 6: 7}),
    (12, {"local_momentum": "average"}, {1: 24, 4: 6}),
    (12, {"local_momentum": "reset", "outer": "nesterov", "outer_lr": 0.7}, {1: 12, 4: 3}),
], ids=str)  # fmt: skip
@pytest.mark.least(3)
def test_bytes_fall_by_exactly_h(steps, own, calls, follow, ring, comm):
    for sync_every, count in calls.items():
        run = follow(comm, local_sgd.train, own={"sync_every": sync_every} | own, steps=steps, allreduce="ring")
        counted, size = run.comm.traffic["all_reduce"], run.model.layout.size
        assert counted.calls == count
        assert counted.bytes == count * ring.all_reduce(size, comm.rank, comm.size)
        assert counted.messages == count * 2 * (comm.size - 1)
        assert run.comm.traffic.bytes == counted.bytes + run.comm.traffic["broadcast"].bytes
        assert run.comm.traffic["broadcast"].calls == 1


@pytest.mark.parametrize(
    "stop, optimizer, own",
    [
        (5, "momentum", {"sync_every": 2, "local_momentum": "average"}),
        (4, "adam", {"sync_every": 2, "local_momentum": "reset", "outer": "adam", "outer_lr": 0.01}),
        (7, "adam", {"sync_every": 3, "local_momentum": "reset"}),
        (6, "momentum", {"sync_every": 3, "local_from": 2, "outer": "nesterov", "outer_lr": 0.7}),  # at the switch
        (4, "adam", {"sync_every": 2, "local_from": 1, "local_momentum": "reset"}),  # no reset yet
    ],
    ids=str,
)
def test_resumed_is_never_stopped_to_the_bit(stop, optimizer, own, resumes):
    resumes(stop, local_sgd.train, own=own, optimizer=optimizer)
