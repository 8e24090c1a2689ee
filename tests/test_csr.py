"""Sparse rows against the dense array of the same: views, room, copies, scipy's matrices, other devices."""

import numpy as np
import pytest

from hpcdl.csr import CSR, on
from hpcdl.data import from_arrays
from hpcdl.kernels.device import CPU


@pytest.fixture
def dense():
    """20 rows of 7 features, most of them zero; the first, the last and the sixth row have no other."""
    random = np.random.default_rng(0)
    x = random.standard_normal((20, 7)) * (random.random((20, 7)) < 0.3)
    x[[0, 5, 19]] = 0
    return x


def test_from_dense_rows_and_back(dense):
    rows = CSR.of(dense)
    assert (rows.indices.dtype, rows.indptr.dtype, rows.dtype) == ("int32", "int64", "float64")
    assert len(rows) == 20 and rows.nnz == np.count_nonzero(dense)
    np.testing.assert_array_equal(rows.dense(), dense)
    assert CSR.of(rows) is rows


def test_from_scipy_with_elements_given_twice(dense):
    sparse = pytest.importorskip("scipy.sparse")
    np.testing.assert_array_equal(CSR.of(sparse.csc_matrix(dense)).dense(), dense)
    twice = sparse.csr_matrix((np.ones(3), np.array([4, 1, 4]), np.array([0, 3])), shape=(1, 6))
    rows = CSR.of(twice)
    assert list(rows.indices) == [1, 4] and list(rows.data) == [1, 2]
    assert twice.nnz == 3  # what was given is as it was
    mixed = sparse.csr_matrix((np.array([1.0, 2.0]), np.array([3, 1]), np.array([0, 2])), shape=(1, 4))
    assert CSR.of(mixed).indices.tolist() == [1, 3] and mixed.indices.tolist() == [3, 1]


@pytest.mark.parametrize("part", [slice(0, 20), slice(3, 9), slice(5, 6), slice(4, 4), slice(9, 4), slice(-3, None)])
def test_a_view_has_the_elements_of_the_whole(dense, part):
    rows = CSR.of(dense)
    view = rows[2:][part]
    np.testing.assert_array_equal(view.dense(), dense[2:][part])
    assert view.elements is rows.elements and view.nnz == np.count_nonzero(dense[2:][part])
    apart = view.copy()
    assert apart.indptr[0] == 0 and len(apart.data) == apart.nnz and apart.elements is not rows.elements
    np.testing.assert_array_equal(apart.dense(), view.dense())
    with pytest.raises(IndexError, match="only be sliced in steps of 1"):
        rows[::2]


def test_room_is_made_for_all_views_of_the_same_rows(dense):
    rows = CSR.of(dense)
    view, before = rows[3:9], rows.nnz
    view.reserve(before)
    assert len(rows.data) == before
    view.reserve(before + 1)
    assert len(rows.data) == len(rows.indices) == before * 3 // 2 and view.data is rows.data
    np.testing.assert_array_equal(rows.dense(), dense)


def test_as_it_is_written_in_the_docstring():
    rows = CSR.of(np.array([[0, 5, 0, 7], [0, 0, 0, 0], [1, 0, 0, 0]]))
    assert rows.data.tolist() == [5, 7, 1] and rows.indices.tolist() == [1, 3, 0]
    assert rows.indptr.tolist() == [0, 2, 2, 3] and rows.shape == (3, 4) and len(rows) == 3
    assert (rows.nnz, rows.ndim) == (3, 2) and rows.indices.dtype == np.int32


def test_rows_are_put_where_they_belong(dense):
    rows = CSR.empty(20, 7, "f8")
    first, second = rows[:4], rows[4:]
    first.put(CSR.of(dense)[:4])
    second.put(CSR.of(dense)[4:])
    np.testing.assert_array_equal(rows.dense(), dense)
    assert first.data is rows.data


def test_rows_are_taken_and_joined(dense):
    rows = CSR.of(dense)
    for index in ([3, 0, 8, 4, 3], [], [4]):
        taken = rows.take(np.array(index, np.int64))
        np.testing.assert_array_equal(taken.dense(), dense[index])
        np.testing.assert_array_equal(rows[2:].take(np.array([1, 0])).dense(), dense[[3, 2]])
    joined = CSR.joined([rows[7:9], rows[:0], rows[1:3]])
    np.testing.assert_array_equal(joined.dense(), dense[[7, 8, 1, 2]])
    assert joined.indptr[0] == 0


def test_on_a_device_all_three_arrays_lie_there(dense, gpu):
    there = on(gpu, CSR.of(dense))
    assert all(gpu.holds(array) for array in (there.data, there.indices, there.indptr))
    assert on(gpu, dense).shape == dense.shape and there.shape == dense.shape


def host(gpu, rows):
    """The rows of a device on the host."""
    return CSR(*(gpu.host(array) for array in (rows.data, rows.indices, rows.indptr)), rows.shape).dense()


def test_batches_on_a_gpu_are_the_same(dense, gpu):
    """Each is valid until the next but one; the host's arrays are pinned, those that were made for more elements, too.
    Rows become denser, so that each batch needs more room than the one before."""
    x = np.where(np.arange(20)[:, None] > 3 * np.arange(7), 1 + np.arange(140.0).reshape(20, 7), dense)
    data = from_arrays(CSR.of(x), np.arange(20) % 2, dtype="float64")
    for epoch in (0, 1):
        wanted = [batch.x.dense() for batch in data.batches(epoch, 6, (1, 2))]
        data.to(gpu)
        before, pinned = None, gpu.xp.counts["pinned"]
        for k, batch in enumerate(data.batches(epoch, 6, (1, 2))):
            assert all(gpu.holds(array) for array in (batch.x.data, batch.x.indices, batch.x.indptr, batch.y))
            np.testing.assert_array_equal(host(gpu, batch.x), wanted[k])
            if before is not None:
                np.testing.assert_array_equal(host(gpu, before.x), wanted[k - 1])
            before = batch
            first, second = batch.split(2)
            both = np.concatenate([host(gpu, first.x.copy()), host(gpu, second.x.copy())])
            np.testing.assert_array_equal(both, wanted[k])
        assert k == 3 and gpu.xp.counts["pinned"] >= pinned + 4
        data.to(CPU)
