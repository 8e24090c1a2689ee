"""The loops of threads: updates and exchanges computed by hand, and the counts of sampled updates."""

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.csr import CSR
from hpcdl.data import from_arrays
from hpcdl.errors import UsageError
from hpcdl.kernels import hogwild as kernels
from hpcdl.memory import Memory
from hpcdl.models import make_model
from hpcdl.models.linear_form import linear_form
from hpcdl.optim import make_optimizer
from hpcdl.parallel.thread_team import ThreadTeam, words_for

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="has nothing to do with the number of ranks")


def team_of(data, model="softmax", rule="sgd", threads=1, w=None, **settings):
    """Return a team of threads and its vector; w: the vector, which several teams may share; None: a new one."""
    dtype = data.dtype.name
    made = make_model(model, data.features, data.classes, dtype, sparse=data.sparse)
    optimizer = make_optimizer(rule, made.layout.size, dtype, lambda step: 0.1)
    w = np.zeros(made.layout.size, dtype) if w is None else w
    settings = {"locking": "none", "batch": 1, "words": words_for(threads)} | settings
    return ThreadTeam(linear_form(made, "a test"), data, w, optimizer, threads=threads, **settings), w


def few(sparse=True, rows=6, dtype="float64"):
    """Return data whose row i has a 1 in column i % 3 and the class i % 3."""
    x = np.eye(3)[np.arange(rows) % 3]
    return from_arrays(CSR.of(x) if sparse else x, np.arange(rows) % 3, dtype=dtype)


@pytest.mark.parametrize("locking", list(kernels.LOCKINGS))
@pytest.mark.parametrize("sparse", [True, False])
def test_one_update_by_hand(sparse, locking):
    team, w = team_of(few(sparse), locking=locking)
    loss = team.round(np.array([1]), 0.5)
    slope = np.array([1 / 3, 1 / 3 - 1, 1 / 3])
    wanted = np.zeros((4, 3))
    wanted[1] = wanted[3] = -0.5 * slope  # column 1, and the bias
    assert w == pytest.approx(wanted.reshape(-1), abs=1e-15) and loss == pytest.approx(np.log(3))
    counts = team.take_counts()
    touched = 6 if sparse else 12
    assert counts[: kernels.HISTOGRAM + 1].tolist() == [1, 1, touched, 0, 0, 0, 1]
    assert not team.take_counts().any()
    team.close()


@pytest.mark.parametrize("sparse", [True, False])
def test_what_a_thread_writes_at_each_update_shares_no_cache_line(sparse):
    teams = [team_of(few(sparse), threads=2) for _ in range(4)]
    z = 8 if sparse else 7  # its place among a loop's last arguments; then comes dz, and at the end counts
    written = [each for team, _ in teams for _, last in team.arguments for each in (last[z], last[z + 1], last[-1])]
    assert {each.ctypes.data % kernels.BYTES for each in written} == {0}
    assert {each.shape for each in written} == {(1, 3), (kernels.COUNTS,)}
    for team, _ in teams:
        team.close()


@pytest.mark.parametrize("locking", list(kernels.LOCKINGS))
@pytest.mark.parametrize("sparse", [True, False])
def test_the_same_bits_under_every_locking(sparse, locking):
    random, data = np.random.default_rng(0), few(sparse, 50)
    order = random.permutation(50)
    found = []
    for each in ("none", locking):
        team, w = team_of(data, locking=each, batch=3)
        team.round(order, 0.3)
        team.close()
        found.append(w)
    assert found[0].any() and np.array_equal(*found)


def test_no_examples_and_fewer_than_threads():
    team, w = team_of(few(), threads=4, locking="round-robin")
    assert team.round(np.empty(0, np.int64), 0.1) == 0 and not w.any()
    team.round(np.arange(2), 0.1)
    assert team.take_counts()[kernels.UPDATES] == 2
    team.close()


def test_one_in_so_many_updates_is_looked_at_whatever_the_rounds():
    team, _ = team_of(few(rows=6))
    for _ in range(40):
        team.round(np.arange(6), 0.1)
    assert team.take_counts()[: kernels.TOUCHED].tolist() == [240, 1 + 240 // kernels.SAMPLE]
    team.close()


@pytest.mark.parametrize("features", [1, 1023, 1024, 1025, 47_236, 2_000_000])
def test_stripes_are_never_too_many(features):
    shift = kernels.shift_for(features)
    assert (features >> shift) + 1 <= kernels.STRIPES  # the bias has the number `features`
    assert shift == 0 or (features >> (shift - 1)) + 1 > kernels.STRIPES // 2


def replicas(data, rule="sgd", **settings):
    """Return a team of one thread, the first of two, which works on a replica; and the common vector."""
    return team_of(data, "linear", rule, **{"words": words_for(2), "count": 2} | settings)


def numbers(sparse=True, rows=23):
    random = np.random.default_rng(4)
    x = random.standard_normal((rows, 9)) * (random.random((rows, 9)) < 0.5)
    return from_arrays(CSR.of(x) if sparse else x, random.standard_normal(rows), dtype="float32")


@pytest.mark.parametrize("every", [1, 10, 100])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
@pytest.mark.parametrize("sparse", [True, False])
def test_exchanges_by_hand(sparse, rule, every):
    """Equal to the bit: as b + (w - b) is not w to the bit, this shows after which updates the exchanges are."""
    data, random = numbers(sparse), np.random.default_rng(5)
    team, w = replicas(data, rule, exchange_every=every)
    alone, own = team_of(data, "linear", rule)
    w[:] = 1 / 3
    common = [w.copy(), np.zeros_like(w)][: 2 if rule == "adagrad" else 1]
    mine = [own, alone.vectors[0][0][1]][: len(common)]
    for _ in range(3):
        order = random.permutation(23)
        team.round(order, 0.1)
        bases = [vector.copy() for vector in common]
        for vector, taken in zip(mine, common, strict=True):
            vector[:] = taken
        for start in range(0, 23, every):
            alone.round(order[start : start + every], 0.1)
            for vector, base, sum in zip(mine, bases, common, strict=True):
                sum += vector - base
                vector[:] = base[:] = sum
        assert w.any() and np.array_equal(w, common[0])
        if rule == "adagrad":
            assert np.array_equal(team.vectors[0][1][2], common[1])
        added = random.standard_normal(w.shape).astype(w.dtype)  # by other threads
        w += added
        common[0] += added
    assert team.take_counts()[kernels.UPDATES] == 69
    team.close()
    alone.close()


def test_only_updates_since_the_last_exchange_make_stale():
    """The second thread starts after 64 updates of the first, but has copied all of them; nothing collides."""
    data, words, w = few(rows=64), words_for(2), None
    for first in range(2):
        team, w = team_of(data, w=w, words=words, count=2, first=first, exchange_every=100)
        team.round(np.arange(64), 0.1)
        counts = team.take_counts()
        assert counts[: kernels.HISTOGRAM + 1].tolist() == [64, 1, 0, 0, 0, 0, 1]
        team.close()


def test_replicas_are_counted():
    data = few()
    for every, threads, wanted in [(5, 1, 0), (0, 3, 0), (5, 3, 2 * 3 * 12 * 8)]:
        for rule in ("sgd", "adagrad"):
            team, _ = team_of(data, rule=rule, threads=threads, exchange_every=every)
            memory = Memory()
            team.weigh(memory)
            assert (memory.peak["parameters"], memory.peak["optimizer"]) == (wanted, wanted * (rule == "adagrad"))
            team.close()


@pytest.mark.parametrize(
    "every, locking", [(1, "striped"), (2, "global"), (3, "round-robin"), (4, "atomic"), (-1, "none")]
)
def test_exchanges_under_locks_are_refused(every, locking):
    with pytest.raises(UsageError, match="--exchange-every"):
        team_of(few(), locking=locking, exchange_every=every)


def test_a_thread_that_fails_does_not_hold_up_the_others():
    team, _ = team_of(few(), threads=2, locking="round-robin")
    team.arguments[1] = ((), team.arguments[1][1])  # no call that could be made
    with pytest.raises(TypeError):
        team.round(np.arange(6), 0.1)
    team.close()
