"""Kernels of sparse rows: the order of a sum; gathering from sources of any type and from far rows."""

import numpy as np
import pytest

from hpcdl.csr import CSR
from hpcdl.kernels import sparse
from hpcdl.kernels.gather import NEAR


def rows_of(rows, features, dtype="float64", density=0.3, seed=0):
    """Return a dense array whose elements are mostly zero, and the same rows as CSR; the third row is empty."""
    random = np.random.default_rng(seed)
    x = (random.standard_normal((rows, features)) * (random.random((rows, features)) < density)).astype(dtype)
    x[2:3] = 0
    return x, CSR.of(x)


def test_a_dot_is_summed_over_four_accumulators_in_a_fixed_order(dtype):
    """Equal to the bit: all kernels that inline `row_dot` rely on this order."""
    x, rows = rows_of(6, 40, dtype, density=0.6)
    w = np.random.default_rng(2).standard_normal(40).astype(dtype)
    z = np.empty((6, 1), dtype)
    sparse.sparse_dot(rows.data, rows.indices, rows.indptr, w[:, None], z)
    for i in range(6):
        products = x[i][x[i] != 0] * w[x[i] != 0]
        fours = len(products) // 4 * 4
        sums = np.zeros(4, dtype)
        for e in range(fours):
            sums[e % 4] += products[e]
        for product in products[fours:]:
            sums[0] += product
        assert z[i, 0] == (sums[0] + sums[1]) + (sums[2] + sums[3])


@pytest.mark.in_turn("out", "start")
@pytest.mark.parametrize("out", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["u1", "i2", "i8", "f4", "f8"])
@pytest.mark.parametrize("start", [0, 5])
def test_gather_picks_converts_and_scales(start, kind, out):
    random = np.random.default_rng(3)
    x = random.integers(0, 100, (30, 17)) * (random.random((30, 17)) < 0.3)
    source, index = CSR.of(x.astype(kind)), random.integers(0, 30, 12)
    picked = CSR.empty(12, 17, out, capacity=start)
    picked.indptr[0] = start
    picked.reserve(start + int(np.diff(source.indptr)[index].sum()))
    arrays = [picked.data, picked.indices, picked.indptr]
    sparse.gather_sparse[out](source.data, source.indices, source.indptr, index, 1 / 16, *arrays)
    assert picked.indptr[0] == start and picked.nnz == np.count_nonzero(x[index])
    np.testing.assert_array_equal(picked.dense(), x[index].astype(out) / 16)


def test_gather_of_rows_far_away():
    """The source is so large that rows are prefetched; the last row and an empty one are among the gathered rows."""
    x, source = rows_of(900, 800, density=0.3)
    assert source.data.nbytes > NEAR
    index = np.append(np.random.default_rng(4).integers(0, 900, 50), [2, 899, 0])
    picked = CSR.empty(len(index), 800, "float64", capacity=int(np.diff(source.indptr)[index].sum()))
    sparse.gather_sparse["float64"](
        source.data, source.indices, source.indptr, index, 1.0, picked.data, picked.indices, picked.indptr
    )
    np.testing.assert_array_equal(picked.dense(), x[index])
