"""Replicas that must agree and do not: the first step and the rank that departs are named."""

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.data import from_arrays
from hpcdl.errors import AgreedError, TrainingError, UsageError
from hpcdl.models import make_model
from hpcdl.runs import Options, Run
from hpcdl.runs.agreeing_replicas import departed
from hpcdl.runs.options import Checks
from hpcdl.strategies import all_reduce, local_sgd

ROWS = np.random.default_rng(0).standard_normal((24, 3))


def train(world, check, change, strategy=all_reduce.train, **options):
    """Ten steps; change(run) is called after each on every rank, before the replicas are compared."""
    comm = Communicator(world, "ring")
    data = from_arrays(ROWS, ROWS[:, 0], dtype="float64")
    model = make_model("linear", data.features, data.classes, "float64")
    with Run(comm, Options(steps=10, batch_size=12, check=check, progress="none", **options)) as run:
        run.observe(lambda run, loss, total: change(run))
        strategy(comm, model, data, run.make_optimizer(model, data), run)
    return run


def flipped(rank, step, of, bit=0):
    """A change: one bit of one number on one rank, as memory that fails would."""

    def change(run):
        if run.step == step and run.comm.rank == rank:
            vector = run.held.parameters if of == "parameters" else next(iter(run.held.optimizer.state.values()))
            vector.view(np.uint64)[1] ^= np.uint64(1 << bit)

    return change


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("of", ["parameters", "optimizer"])
@pytest.mark.parametrize("every, step, told, before", [(1, 7, 7, 6), (3, 4, 6, 3), (1, 1, 1, 0), (5, 10, 10, 5)])
def test_a_bit_of_one_rank_is_told_by_all(of, every, step, told, before, world):
    last = world.size - 1
    with pytest.raises(TrainingError) as error:
        train(world, f"replicas={every}", flipped(last, step, of, bit=40))
    words = str(error.value)
    assert words.startswith(f"after step {told} ") and f"after step {before} all ranks held the same" in words
    other = "optimizer state (" if of == "optimizer" and told == step else "parameters"  # a step later it is in these
    if world.size == 2:
        assert f"ranks 0 and 1 differ in {other}" in words
    else:
        assert f"rank {last} holds other {other}" in words, words
    assert world.allgather(words) == [words] * world.size


@pytest.mark.mpi(min_size=2)
def test_without_a_change_nothing_is_told_and_nothing_counted(world):
    runs = [train(world, check, lambda run: None) for check in ("", "replicas=1", "collectives,replicas=4")]
    assert len({run.parameters.tobytes() for run in runs}) == 1
    assert len({(run.comm.traffic["all_reduce"].bytes, run.comm.traffic["all_reduce"].calls) for run in runs}) == 1


@pytest.mark.mpi(min_size=2)
def test_a_difference_that_comes_back_is_seen_between(world):
    """Which the comparison at the end of a run does not see."""

    def change(run):
        run.held.parameters[0] += {5: 1.0, 6: -1.0}.get(run.step, 0.0) * (run.comm.rank == 1)

    with pytest.raises(TrainingError, match="after step 5 "):
        train(world, "replicas=1", change)


@pytest.mark.mpi(min_size=2)
def test_replicas_that_need_not_agree_are_refused(world):
    with pytest.raises(AgreedError, match=r"--check replicas compares equal replicas; under local sgd a rank holds"):
        train(world, "replicas=2", lambda run: None, local_sgd.train)


@pytest.mark.parametrize(
    "sums, words",
    [
        ([5, 5, 7, 5], "rank 2 holds other parameters than ranks 0, 1 and 3"),
        ([7, 5, 8, 5, 5], "ranks 0 and 2 hold other parameters than ranks 1, 3 and 4"),
        ([5, 7], "ranks 0 and 1 differ in parameters"),
        ([5, 7, 7, 5], "ranks 0 and 3 and ranks 1 and 2 differ in parameters"),
        ([1, 2, 3], "ranks 0, 1 and 2 differ in parameters"),
    ],
)
def test_who_departs(sums, words):
    assert departed(sums, "parameters") == words


def test_what_check_takes():
    assert Checks.read("") == Checks(False, 0) and Checks.read("collectives,replicas=10") == Checks(True, 10)
    for text, line in [
        ("replica=3", "unknown check 'replica=3' .did you mean 'replicas'.{2}; known: collectives, replicas=STEPS"),
        ("replicas", "takes a number of steps, as replicas=10, not ''"),
        ("replicas=0", "not '0'"),
        ("replicas=x", "not 'x'"),
        ("collectives=3", "unknown check 'collectives=3'"),
    ]:
        with pytest.raises(UsageError, match=line):
            Options(check=text)
    with pytest.raises(UsageError, match="--flight must not be negative"):
        Options(flight=-1)
    with pytest.raises(UsageError, match="--flight is 1,000,000 at most"):
        Options(flight=10_000_000)
