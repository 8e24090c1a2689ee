"""PowerSGD: factors of full rank are the sum; what is sent and what is kept is what there was; the factors' bytes."""

import numpy as np
import pytest
from local_ranks import run_locally

from hpcdl.comm import Communicator
from hpcdl.comm.compression import compressed, plain_lengths
from hpcdl.errors import UsageError
from hpcdl.models.layout import Layout, Tensor

SHAPES = {"a": (6, 9), "b": (9,), "c": (7, 4), "d": (3, 2, 5), "e": (1,)}
FULL = "powersgd:rank=99,ratio=0"


def layout_of(shapes=SHAPES, dtype="float64"):
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensors.append(Tensor(name, shape, offset, name))
        offset += int(np.prod(shape))
    return Layout(tensors, dtype)


LAYOUT = layout_of()


def states_of(spec, ranks, dtype="float64", layout=LAYOUT):
    return [compressed(spec, layout.size, dtype, 3, layout) for _ in range(ranks)]


def reduce_all(states, rows):
    """Reduce a row of each rank, in place."""
    return run_locally(lambda comm, vector: states[comm.rank].steps(comm, vector), list(rows))


def vectors(ranks, seed=1, dtype="float64", size=LAYOUT.size):
    return np.random.default_rng(seed).standard_normal((ranks, size)).astype(dtype)


@pytest.mark.parametrize("ranks", range(1, 8))
def test_full_rank_is_the_sum(ranks):
    states = states_of(FULL, ranks)
    for step in range(3):
        rows = vectors(ranks, step)
        exact = rows.sum(0)
        reduce_all(states, rows)
        assert np.abs(rows - exact).max() < 1e-10
        assert ranks == 1 or all(row.tobytes() == rows[0].tobytes() for row in rows)


@pytest.mark.parametrize("dtype, eps", [("float32", 1e-6), ("float64", 1e-14)])
@pytest.mark.parametrize("ranks", range(2, 8))
def test_sent_and_kept_are_what_there_was_and_all_have_the_same_bits(ranks, dtype, eps):
    states = states_of("powersgd:rank=1,ratio=0", ranks, dtype)
    for step in range(4):
        rows = vectors(ranks, step, dtype)
        was = rows.astype("f8").sum(0) + sum(state.residual.astype("f8") for state in states)
        reduce_all(states, rows)
        assert all(row.tobytes() == rows[0].tobytes() for row in rows)
        left = sum(state.residual.astype("f8") for state in states)
        assert np.abs(rows[0] + left - was).max() < 40 * ranks * eps
        assert np.abs(left[:54]).max() > 0.1 and not left[54:63].any()  # of the matrix, and of the bias
        assert len({state.factors.tobytes() for state in states}) == 1


def test_without_feedback_nothing_is_kept():
    states, rows = states_of("powersgd:rank=1,ratio=0,feedback=no", 2), vectors(2)
    assert states[0].tracked == {} and states[0].common.keys() == {"factors"}
    again = rows.copy()
    reduce_all(states, rows)
    reduce_all(states_of("powersgd:rank=1,ratio=0", 2), again)
    assert np.array_equal(rows, again)  # the first step has nothing to feed back


def test_warm_start_finds_the_largest_singular_vectors():
    """Without feedback, the sum of the same matrices comes to its best approximation of rank 2."""
    states, rows = states_of("powersgd:rank=2,feedback=no,ratio=0", 3), vectors(3)
    u, s, v = np.linalg.svd(rows.sum(0)[:54].reshape(6, 9))
    best, errors = (u[:, :2] * s[:2]) @ v[:2], []
    for _ in range(300):
        again = rows.copy()
        reduce_all(states, again)
        errors.append(np.abs(again[0, :54].reshape(6, 9) - best).max())
    assert errors[-1] < 1e-8 < 1e-2 < errors[0]


def test_a_gradient_of_zeros_or_of_low_rank_does_not_end_the_compression():
    states = states_of(FULL, 2)
    for low in (np.zeros(LAYOUT.size), np.ones(LAYOUT.size)):
        reduce_all(states, np.stack([low, low]))
        rows = vectors(2)
        exact = rows.sum(0) + sum(state.residual for state in states)
        reduce_all(states, rows)
        reduce_all(states, np.stack([low, low]))
        rows = vectors(2)
        exact = rows.sum(0) + sum(state.residual for state in states)
        reduce_all(states, rows)
        assert np.abs(rows - exact).max() < 1e-10


def test_buckets_are_reduced_to_the_same_bits():
    """For whole layers; what is all-reduced has other chunks, which two ranks add alike."""
    whole, cut, rows = states_of("powersgd:rank=2", 2), states_of("powersgd:rank=2", 2), vectors(2)
    buckets = [slice(63, 122), slice(54, 63), slice(0, 54)]
    parts = [[state.part(bucket) for state in cut] for bucket in buckets]
    for step in range(3):
        rows, again = vectors(2, step), vectors(2, step)
        reduce_all(whole, rows)
        for bucket, states in zip(buckets, parts, strict=True):
            reduce_all(states, again[:, bucket])
        assert np.array_equal(rows, again)
    for name in ("residual", "factors"):
        assert np.array_equal(getattr(whole[1], name), getattr(cut[1], name))


def test_bytes(bare):
    """Two all-reduces: of P and of what is not compressed, and of Q."""
    counts = []
    for lengths in (None, [2 * (6 + 7 + 3) + 9 + 1, 2 * (9 + 4 + 10)]):
        comm = Communicator(bare, "ring")
        if lengths is None:
            comm.all_reduce_compressed(vectors(1)[0], states_of("powersgd", 1)[0])
        else:
            for length in lengths:
                comm.all_reduce(np.ones(length))
        counts.append((comm.traffic["all_reduce"].bytes, comm.traffic["all_reduce"].messages))
        comm.free()
    assert counts[0] == counts[1]
    assert plain_lengths("powersgd", LAYOUT, slice(0, LAYOUT.size)) == (2 * 16 + 10, 2 * 23)
    assert plain_lengths("powersgd", LAYOUT, slice(54, 91)) == (9 + 2 * 7, 2 * 4)


def test_what_it_cannot_do_is_one_line():
    from hpcdl.comm.compression import check_model

    for spec, words in [
        ("powersgd:0", "compression 'powersgd:0': rank is 1 or more, not 0"),
        ("powersgd:7", "rank is at most 6, that of the model's largest matrix, not 7"),
        ("powersgd:4", "no matrix of the model gets shorter by factors of rank 4; take a lower rank"),
        ("powersgd:2,ratio=-1", "ratio is 0 or more, not -1.0"),
    ]:
        with pytest.raises(UsageError, match=words):
            check_model(spec, LAYOUT)
    check_model("powersgd:3", LAYOUT)
    with pytest.raises(UsageError, match="give the layout"):
        compressed("powersgd", 10, "float32")
