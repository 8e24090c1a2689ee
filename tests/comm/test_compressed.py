"""All-reduce in 16 bits: within rounding, half of the bytes, the same bits everywhere, and nothing lost over many."""

from types import SimpleNamespace

import numpy as np
import pytest
from local_ranks import run_locally
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.collective_schedule import complete
from hpcdl.comm.compression import compressed, methods, parse
from hpcdl.comm.compression.terngrad import bits_of_sum
from hpcdl.errors import UsageError
from hpcdl.models.layout import Layout

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


# -- every method ----------------------------------------------------------------------------------------------------

SPECS = ["float16", "bfloat16", "int8", "qsgd:bits=1", "qsgd:bits=2", "qsgd", "qsgd:bits=8", "terngrad", "sign"]
SPECS += ["sign:vote", "sign:vote,feedback=yes", "topk:0.05", "topk:0.4,feedback=no", "randomk:0.1"]
SPECS += ["randomk:0.1,feedback=no", "terngrad:clip=2.5,feedback=yes"]


def reduced(spec, rows, calls=1, key=0):
    """Reduce the rows, one for each rank in this process; return (rows, states, communicators) after so many calls."""
    ranks, length = rows.shape
    states = [compressed(spec, length, rows.dtype, key) for _ in range(ranks)]

    def steps(comm, vector):
        return states[comm.Get_rank()].steps(comm, vector)

    for _ in range(calls):
        result = [row.copy() for row in rows]
        comms, _ = run_locally(steps, result)
    return result, states, comms


def left(states):
    """The sum of what the ranks have kept."""
    return sum((state.tracked["residual"] for state in states), start=0.0) if states[0].tracked else 0.0


def test_no_method_is_left_out():
    assert {spec.partition(":")[0] for spec in SPECS} == {
        name for name, each in methods().items() if each.codec and not each.optimizers
    }


@pytest.mark.parametrize("spec", SPECS)
def test_every_rank_ends_with_the_same_bits(spec):
    for ranks in range(1, 8):
        for length in (0, 1, 2, 3, 5, 7, 64, 333):
            result, states, _ = reduced(spec, vectors(ranks, length), calls=3)
            assert all(np.array_equal(each, result[0]) for each in result)
            assert [state.key.step for state in states] == [3] * ranks


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "vote" not in spec])
def test_nothing_is_lost(spec):
    """The sum of the vectors is the result and what the ranks have kept, to the rounding of additions."""
    if not parse(spec)[1]:
        return
    for ranks in (2, 3, 5):
        rows = vectors(ranks, 333, "float64")
        states, total = [compressed(spec, 333, "float64") for _ in range(ranks)], np.zeros(333)
        for call in range(4):
            result = list(vectors(ranks, 333, "float64", seed=call))
            rows = np.array(result)
            total += rows.sum(0)
            run_locally(lambda comm, vector: states[comm.Get_rank()].steps(comm, vector), result)  # noqa: B023
            total -= result[0]
            tolerance = 1e-12 if spec.startswith(("topk", "randomk")) else 1e-10
            np.testing.assert_allclose(left(states), total, rtol=0, atol=tolerance)


@pytest.mark.parametrize("spec", ["topk:1", "randomk:1", "randomk:1,feedback=no"])
def test_everything_is_no_compression(spec):
    for ranks in range(1, 8):
        for length in (1, 5, 64, 333):
            rows = vectors(ranks, length, "float64")
            result, states, _ = reduced(spec, rows)
            np.testing.assert_allclose(result[0], rows.sum(0), rtol=0, atol=1e-10)
            assert not np.any(left(states))


@pytest.mark.parametrize("spec", ["qsgd", "terngrad", "randomk:0.3,feedback=no"])
def test_the_sum_is_unbiased(spec):
    rows, draws = vectors(3, 8, "float64"), []
    states = [compressed(spec, 8, "float64") for _ in rows]
    for _ in range(2000):
        result = [row.copy() for row in rows]
        run_locally(lambda comm, vector: states[comm.Get_rank()].steps(comm, vector), result)
        draws.append(result[0])
    deviation = np.std(draws, axis=0) / np.sqrt(len(draws))
    assert (np.abs(np.mean(draws, axis=0) - rows.sum(0)) <= 5 * deviation + 1e-6).all()


@pytest.mark.parametrize("ranks, bits", [(3, 4), (7, 4), (8, 8)])
def test_sums_of_ternary_codes_are_exact_multiples_of_the_scale_of_all_ranks(ranks, bits):
    rows = vectors(ranks, 8 * ranks)
    result, _, comms = reduced("terngrad", rows)
    times = result[0] / np.abs(rows).max()
    np.testing.assert_allclose(times, np.round(times), atol=1e-5)
    assert np.abs(times).max() > 1  # of several ranks
    assert [comm.values for comm in comms] == [(ranks - 1) * (4 + 8 * 2 // 8 + 8 * bits // 8)] * ranks


def test_sums_of_more_than_127_ternary_codes_travel_in_16_bits():
    state, sums = compressed("terngrad", 3, "float64"), np.array([0, 200, 400], np.uint16)
    assert bits_of_sum(127) == 8 and bits_of_sum(128) == 16
    into = np.ones(3)
    state.add(state.packed(sums, 16), np.array([0.5], "f4"), 200, into)
    assert into.tolist() == [-99, 1, 101]


def test_a_majority_decides_and_a_tie_goes_to_the_larger_scale():
    rows = np.ones((3, 8))
    rows[:2, 0] = -1  # two of three; 8 values are one block
    result, _, _ = reduced("sign:vote,block=8", rows)
    assert result[0].tolist() == [-3] + 7 * [3]
    tie = np.array([8 * [1.0], 8 * [-2.0]])
    assert reduced("sign:vote,block=8", tie)[0][0].tolist() == 8 * [-3]


def test_sparse_messages_turn_dense_where_that_is_shorter():
    """By the bytes of each rank: pairs of 8 bytes for float32, dense chunks of 4 bytes a value."""
    rows = np.zeros((3, 300), "float32")
    rows[:, ::100] = 1  # one value of each chunk, the same on all ranks
    result, _, comms = reduced("topk:0.01", rows)
    assert result[0].tolist() == rows.sum(0).tolist()
    counts, pairs = 2 * 2 * 1, 2 * 8 + 2 * 8  # LocalComm counts elements: int64 counts, bytes of messages
    assert [comm.values for comm in comms] == [counts + pairs] * 3
    assert [comm.messages for comm in comms] == [8] * 3
    result, _, comms = reduced("topk:0.9", vectors(3, 300))
    assert [comm.values for comm in comms] == [counts + 2 * 400 + 2 * 400] * 3


def test_not_a_number_arrives_on_all_ranks():
    for spec in [*SPECS, "topk:0.01"]:
        if spec.startswith("randomk"):
            spec = "randomk:1"  # which may draw it in any step
        rows = vectors(3, 100)
        rows[1, 40] = np.nan
        result, _, _ = reduced(spec, rows)
        assert not any(np.isfinite(each).all() for each in result), spec


@pytest.mark.parametrize("spec", ["qsgd", "topk:0.1", "randomk:0.1", "sign"])
def test_a_part_continues_the_residual_and_the_random_numbers_of_the_whole(spec):
    state = compressed(spec, 100, "float64", seed=4)
    state.begin(7)
    part = state.part(slice(40, 100))
    assert part.size == 60 and part.key.step == 7 and part.key.first == 40 and part.part(slice(10, 20)).key.first == 50
    for name, vector in part.tracked.items():
        assert np.shares_memory(vector, state.tracked[name][40:])
    assert not any(
        np.shares_memory(a, b) for a, b in zip(state.fresh().tracked.values(), state.tracked.values(), strict=True)
    )


@pytest.mark.parametrize("spec", SPECS)
def test_over_mpi_as_in_one_process_and_bytes_are_counted(spec, bare):
    comm, rows = Communicator(bare, "ring"), vectors(bare.size, 1009)
    state, mine = compressed(spec, 1009, "float32", 5), rows[comm.rank].copy()
    comm.all_reduce_compressed(mine, state)
    result, _, comms = reduced(spec, rows, key=5)
    assert np.array_equal(mine, result[comm.rank])
    counted = comm.traffic["all_reduce"]
    assert counted.messages == comms[comm.rank].messages
    if spec.startswith(("int8", "qsgd", "terngrad", "sign")):  # messages of bytes
        assert counted.bytes == comms[comm.rank].values


LAYOUT = Layout.of_layers(
    [
        SimpleNamespace(name="a", shapes={"weight": (4, 9), "bias": (9,)}, tied={}),
        SimpleNamespace(name="b", shapes={"weight": (9, 20), "bias": (20,)}, tied={}),
    ],
    "float64",
)


@pytest.mark.parametrize("cut", [[slice(0, 245)], [slice(45, 245), slice(0, 45)]], ids=["whole", "buckets"])
def test_small_tensors_travel_as_they_are(cut):
    """By buckets, too; on one rank; the residual has the values of the compressed tensors only."""
    for ranks in (1, 3):
        rows = vectors(ranks, LAYOUT.size, "float64")
        states = [compressed("sign", LAYOUT.size, "float64", 0, LAYOUT, smallest=8 * 100) for _ in rows]
        result = [row.copy() for row in rows]
        for place in cut:
            parts = [state.part(place) for state in states]
            run_locally(lambda comm, v: parts[comm.Get_rank()].steps(comm, v), [row[place] for row in result])  # noqa: B023
        exact, weight = rows.sum(0), LAYOUT.tensors["b.weight"].slice
        rest = np.ones(LAYOUT.size, bool)
        rest[weight] = False
        assert all(np.array_equal(each, result[0]) for each in result)
        np.testing.assert_allclose(result[0][rest], exact[rest], rtol=1e-13)
        kept = sum(state.tracked["residual"] for state in states)
        assert kept.size == 180 and (ranks == 1 or (np.abs(result[0] - exact)[weight] > 1e-3).any())
        np.testing.assert_allclose(result[0][weight] + kept, exact[weight], atol=1e-12)


def test_a_size_that_leaves_no_tensor_is_refused():
    with pytest.raises(UsageError, match="--compress-from 1441 leaves no tensor to compress"):
        compressed("sign", LAYOUT.size, "float64", 0, LAYOUT, smallest=1441)
