"""Softmax and cross-entropy in parts, as ranks share the classes (test_cases.py: every loss equal to numpy)."""

import itertools

import numpy as np
import pytest

from hpcdl.kernels import loss


def in_parts(z, labels, cuts):
    """Return ((sum of losses, number correct), the whole gradient); the all-reduces of ranks are sums over parts."""
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
