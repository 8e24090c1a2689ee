"""Kernels of sparse rows against dense products: empty rows, views, sources of any type; the order of a sum."""

import numpy as np
import pytest

from hpcdl.csr import CSR
from hpcdl.kernels import sparse
from hpcdl.kernels.gather import NEAR


def rows_of(rows, features, dtype="float64", density=0.3, seed=0):
    """A dense array of which most elements are zero, and the same as CSR; the third row is empty."""
    random = np.random.default_rng(seed)
    x = (random.standard_normal((rows, features)) * (random.random((rows, features)) < density)).astype(dtype)
    x[2:3] = 0
    return x, CSR.of(x)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float64", 1e-13)])
@pytest.mark.parametrize("outputs", [1, 2, 7])
@pytest.mark.parametrize("part", [slice(0, 9), slice(2, 3), slice(4, 9), slice(5, 5)], ids=str)
def test_products_of_a_view_are_those_of_the_dense_rows(part, outputs, dtype, tolerance):
    x, rows = rows_of(9, 23, dtype)
    random = np.random.default_rng(1)
    w, g = (random.standard_normal((23, outputs)).astype(dtype) for _ in range(2))
    x, rows, before = x[part], rows[part], g.copy()
    z = np.full((len(x), outputs), np.nan, dtype)
    sparse.sparse_dot(rows.data, rows.indices, rows.indptr, w, z)
    np.testing.assert_allclose(z, x @ w, rtol=tolerance, atol=tolerance)
    sparse.scatter_add(rows.data, rows.indices, rows.indptr, z, g)
    np.testing.assert_allclose(g, before + x.T @ z, rtol=tolerance, atol=tolerance)
    never = ~x.any(axis=0)
    np.testing.assert_array_equal(g[never], before[never])  # what no row has is not touched


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_dot_is_summed_over_four_accumulators_in_a_fixed_order(dtype):
    """To the bit: whoever inlines `row_dot` is promised the same."""
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
    """So large a source that rows are asked for ahead; the last, and an empty one, are among them."""
    x, source = rows_of(900, 800, density=0.3)
    assert source.data.nbytes > NEAR
    index = np.append(np.random.default_rng(4).integers(0, 900, 50), [2, 899, 0])
    picked = CSR.empty(len(index), 800, "float64", capacity=int(np.diff(source.indptr)[index].sum()))
    sparse.gather_sparse["float64"](
        source.data, source.indices, source.indptr, index, 1.0, picked.data, picked.indices, picked.indptr
    )
    np.testing.assert_array_equal(picked.dense(), x[index])
