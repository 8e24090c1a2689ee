"""Loss kernels against plain numpy in float64."""

import itertools

import numpy as np
import pytest

from hpcdl.kernels import loss

ROWS = [0, 1, 3, 1000]
TOLERANCE = {"float32": 2e-6, "float64": 1e-13}


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def naive_softmax(z, labels):
    """Sum of losses, number correct and gradient, row by row from the definition."""
    losses, gradient = [], np.zeros_like(z)
    for row, (values, label) in enumerate(zip(z, labels, strict=True)):
        p = np.exp(values) / np.exp(values).sum()
        losses.append(-np.log(p[label]))
        gradient[row] = p - np.eye(len(values))[label]
    return sum(losses), int((z.argmax(axis=1) == labels).sum()), gradient


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_large_outputs_do_not_overflow(size, dtype):
    z = np.array([[size, 0, -size], [-size, 0, size]], dtype)
    dz = np.empty_like(z)
    total, correct = loss.softmax_cross_entropy(z, np.array([0, 0]), dz)
    assert total == pytest.approx(2 * size) and correct == 1
    np.testing.assert_array_equal(dz, [[0, 0, 0], [-1, 0, 1]])
    dz = np.empty((4, 1), dtype)
    total, correct = loss.logistic(np.array([[size], [-size]] * 2, dtype), np.array([1, 0, 0, 1]), dz)
    assert total == pytest.approx(2 * size) and correct == 2
    np.testing.assert_array_equal(dz[:, 0], [0, 0, 1, -1])


@pytest.mark.parametrize("label", [-1, 3, 2**40])
def test_label_outside_of_the_classes_scores_minus_one(label, dtype):
    z = np.zeros((2, 3), dtype)
    assert loss.softmax_cross_entropy(z, np.array([0, label]), np.empty_like(z))[1] == -1
    z = np.zeros((2, 1), dtype)
    assert loss.logistic(z, np.array([0, label]), np.empty_like(z))[1] == -1


def in_parts(z, labels, cuts):
    """(sum of losses, number correct) of each part and the whole gradient; what ranks sum is summed here."""
    classes, dtype = z.shape[1], z.dtype
    parts = [(np.ascontiguousarray(z[:, a:b]), a) for a, b in itertools.pairwise(cuts)]
    tops, sums = np.empty((len(parts), len(z)), dtype), np.empty((len(parts), len(z), 2), dtype)
    gradients = [np.full_like(part, np.nan) for part, _ in parts]
    for (part, _), top in zip(parts, tops, strict=True):
        loss.row_max(part, top)
    top = tops.max(axis=0)
    for (part, first), dz, each in zip(parts, gradients, sums, strict=True):
        loss.partial_softmax(part, labels, first, top, dz, each)
    total = sums.sum(axis=0)
    results = [
        loss.finish_softmax(dz, labels, first, classes, total) for (_, first), dz in zip(parts, gradients, strict=True)
    ]
    assert len({str(result) for result in results}) == 1  # to the bit, and NaN like NaN
    return results[0], np.concatenate(gradients, axis=1)


CUTS = {2: [[0, 2], [0, 1, 2], [0, 0, 2]], 37: [[0, 37], [0, 19, 37], [0, 5, 5, 36, 37, 37]]}


@pytest.mark.parametrize("classes, cuts", [(classes, cuts) for classes, each in CUTS.items() for cuts in each])
@pytest.mark.parametrize("rows", ROWS)
def test_softmax_in_parts(rows, classes, cuts, dtype):
    random = np.random.default_rng(rows + classes)
    z = (3 * random.standard_normal((rows, classes))).astype(dtype)
    labels = random.integers(0, classes, rows)
    (total, correct), dz = in_parts(z, labels, cuts)
    expected, hits, gradient = naive_softmax(z.astype("float64"), labels)
    np.testing.assert_allclose(total, expected, rtol=TOLERANCE[dtype], atol=1e-6 if dtype == "float32" else 1e-13)
    np.testing.assert_allclose(dz, gradient, rtol=0, atol=TOLERANCE[dtype])
    assert correct == hits


@pytest.mark.parametrize("cuts", [[0, 3], [0, 1, 3], [0, 2, 2, 3]])
def test_softmax_in_parts_of_what_is_not_ordinary(cuts, dtype):
    big = np.array([[1e30, 0, -1e30], [-1e30, 0, 1e30]], dtype)
    (total, correct), dz = in_parts(big, np.array([0, 0]), cuts)
    assert total == pytest.approx(2e30) and correct == 1
    np.testing.assert_array_equal(dz, [[0, 0, 0], [-1, 0, 1]])
    for bad in (np.nan, np.inf):
        for column in range(3):
            for label in range(3):
                z = np.zeros((2, 3), dtype)
                z[1, column] = bad
                (total, correct), dz = in_parts(z, np.array([0, label]), cuts)
                assert np.isnan(total) and correct == 1
                assert np.isfinite(dz[0]).all() and np.isnan(dz[1]).any()
    (total, correct), _ = in_parts(np.full((1, 3), np.nan, dtype), np.array([0]), cuts)
    assert np.isnan(total) and correct == 0
    for label in (-1, 3, 2**40, -(2**40)):
        assert in_parts(np.zeros((2, 3), dtype), np.array([0, label]), cuts)[0][1] == -1


def test_several_largest_count_for_each_part(dtype):
    (_, correct), _ = in_parts(np.zeros((3, 4), dtype), np.array([0, 1, 3]), [0, 2, 4])
    assert correct == 3
