"""All-reduce in 16 bits: within rounding, half of the bytes, the same bits everywhere, and nothing lost over many."""

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.collective_schedule import complete
from hpcdl.comm.compression import compressed
from hpcdl.errors import UsageError

KINDS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # the largest relative error of one rounding
LENGTHS = [0, 1, 2, 3, 5, 7, 64, 1009, 100_003]


@pytest.fixture(params=sorted(KINDS))
def kind(request):
    return request.param


def vectors(ranks, length, dtype="float32", seed=1):
    """The vector of each rank; all ranks know all."""
    return np.random.default_rng(seed).standard_normal((ranks, length)).astype(dtype)


def reduce_alone(bare, vector, state):
    """Reduce on the bare communicator."""
    for step in state.steps(bare, vector):
        complete(step)


def own(comm, length):
    return chunks(length, comm.Get_size())[comm.Get_rank()]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_sum_is_within_the_rounding_bound(kind, dtype, bare):
    for length in LENGTHS:
        rows = vectors(bare.size, length, dtype)
        mine = rows[bare.rank].copy()
        reduce_alone(bare, mine, compressed(kind, length, dtype))  # on the bare communicator
        exact, size = rows.astype("f8").sum(0), np.abs(rows).astype("f8").sum(0)
        unit = KINDS[kind] * (1 + 2.0**-7) if bare.size > 1 else 0  # two roundings: of the parts, and of their sum
        tiny = bare.size * 2.0**-25 if kind == "float16" else 0  # below 2^-14 the error is no longer relative
        added = bare.size * np.finfo(dtype).eps * size
        assert (np.abs(mine - exact) <= unit * (size + np.abs(exact)) + added + tiny).all()


def test_one_rank_rounds_nothing(kind):
    mine = vectors(1, 50)[0]
    before, state = mine.copy(), compressed(kind, 50, "float32")
    reduce_alone(MPI.COMM_SELF, mine, state)
    assert np.array_equal(mine, before) and not state.residual.any()


@pytest.mark.parametrize("length", [0, 1, 3, 12, 1009])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_counts(kind, dtype, length, bare):
    comm = Communicator(bare)
    comm.all_reduce_compressed(np.ones(length, dtype), compressed(kind, length, dtype))
    counted, k = comm.traffic["all_reduce"], own(bare, length)
    k = k.stop - k.start
    assert counted.calls == 1 and counted.messages == 2 * (comm.size - 1)
    assert counted.bytes == 2 * ((length - k) + (comm.size - 1) * k)
    halves = Communicator(bare)
    vector = np.ones(length, "float32")
    halves.reduce_scatter(vector)
    halves.all_gather(vector)
    assert 2 * bare.allreduce(counted.bytes) == bare.allreduce(halves.traffic.bytes)  # half of float32's
    if length % comm.size == 0:
        assert 2 * counted.bytes == halves.traffic.bytes == 4 * 2 * (comm.size - 1) * length // comm.size


def test_asynchronous_and_blocking_give_the_same_bits(kind, bare):
    comm = Communicator(bare)
    states = [compressed(kind, size, "float32") for size in (1009, 500, 1009, 500)]
    rows = [vectors(comm.size, state.residual.size, seed=7)[comm.rank] for state in states]
    for _ in range(3):
        requests = [comm.iall_reduce_compressed(row, state) for row, state in zip(rows[:2], states[:2], strict=True)]
        while not all([request.test() for request in requests]):
            pass
        for row, state in zip(rows[2:], states[2:], strict=True):
            comm.all_reduce_compressed(row, state)
    for i in (0, 1):
        assert np.array_equal(rows[i], rows[i + 2])
        assert np.array_equal(states[i].residual, states[i + 2].residual)


def test_the_mean(kind, bare):
    comm = Communicator(bare)
    total, mean = (vectors(comm.size, 64)[comm.rank].copy() for _ in range(2))
    comm.all_reduce_compressed(total, compressed(kind, 64, "float32"))
    comm.all_reduce_compressed(mean, compressed(kind, 64, "float32"), op="mean")
    assert np.allclose(mean, total / comm.size, rtol=1e-6, atol=0)


@pytest.mark.mpi(min_size=2)
def test_error_feedback_makes_the_mean_converge_and_without_it_a_bias_stays(kind, bare):
    if bare.size == 1:
        return
    rows, state = vectors(bare.size, 200), compressed(kind, 200, "float32")
    exact, means, biased, total = rows.astype("f8").sum(0), {}, {}, np.zeros(200)
    for count in range(1, 257):
        mine = rows[bare.rank].copy()
        reduce_alone(bare, mine, state)
        total += mine
        means[count] = np.abs(total / count - exact).max()
    for count in (1, 256):
        mine = rows[bare.rank].copy()
        reduce_alone(bare, mine, compressed(kind, 200, "float32"))  # a fresh residual: no feedback
        biased[count] = np.abs(mine - exact).max()
    left = np.abs(bare.allreduce(state.residual.astype("f8"))).max()
    assert means[256] <= 1.01 * left / 256 + 1e-5  # all that is missing is what the residuals hold
    assert means[256] < means[1] / 50
    assert biased[1] == biased[256] > 50 * means[256]


def test_what_it_cannot_do_is_refused_in_one_line(world):
    comm = Communicator(world)
    state = compressed("bfloat16", 8, "float32")
    refusals = [
        (lambda: compressed("float61", 8, "float32"), "unknown compression 'float61' .did you mean 'float16'"),
        (lambda: compressed("float16", 8, "int64"), "float32 or float64 values, not int64"),
        (lambda: comm.all_reduce_compressed(np.zeros(9, "f4"), state), "for 8 elements of float32, not for 9"),
        (lambda: comm.all_reduce_compressed(np.zeros(8), state), "not for 8 of float64"),
        (lambda: comm.all_reduce_compressed(np.zeros(8, "f4"), state, op="max"), "sum and mean"),
    ]
    for call, words in refusals:
        with pytest.raises(UsageError, match=words):
            call()
    if world.size > 1:
        vector = np.ones(8, "f4")
        request = comm.iall_reduce_compressed(vector, state)
        if not request.done and comm.checker is None:  # on some ranks it may be; a checked one has not begun
            with pytest.raises(UsageError, match="in flight"):
                comm.iall_reduce_compressed(vector, state)
        request.wait()
    comm.all_reduce_compressed(np.ones(8, "f4"), state)  # and goes on to work
