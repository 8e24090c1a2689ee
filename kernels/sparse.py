"""Products of sparse rows (CSR) with a dense matrix, their gradient, and gathering of sparse rows.

    sparse_dot       z[i, k] = sum over e of row i: data[e] w[indices[e], k]
    scatter_add      g[indices[e], k] += data[e] dz[i, k]           for each element e of each row i
    gather_sparse    copy rows of a data set, converted to the model's type and scaled; for dense rows: gather.py

Row i has the elements indptr[i] ... indptr[i + 1] - 1. Memory latency bounds the products if w or g is in no cache. For
a w of one column, `row_dot` adds into four accumulators in a fixed order, so every kernel gets the same bits."""

import numpy as np

from hpcdl.kernels.bind import block, exact, function
from hpcdl.kernels.gather import AHEAD, LINE, NEAR, prefetch

_CSR = "T[::1], int32[::1], int64[::1]"


@exact
def row_dot(data, indices, first, last, w, zero):
    """Return the sum of data[e] w[indices[e]] for e from first to last - 1; zero: 0 in their type."""
    a, b, c, d = zero, zero, zero, zero
    e = first
    while e + 4 <= last:  # np.uintp: no check for a negative index
        a += data[np.uintp(e)] * w[np.uintp(indices[np.uintp(e)])]
        b += data[np.uintp(e + 1)] * w[np.uintp(indices[np.uintp(e + 1)])]
        c += data[np.uintp(e + 2)] * w[np.uintp(indices[np.uintp(e + 2)])]
        d += data[np.uintp(e + 3)] * w[np.uintp(indices[np.uintp(e + 3)])]
        e += 4
    while e < last:
        a += data[np.uintp(e)] * w[np.uintp(indices[np.uintp(e)])]
        e += 1
    return (a + b) + (c + d)


@block(f"{_CSR}, T[:, ::1], T[:, ::1]")
def sparse_dot(data, indices, indptr, w, z):
    """z <- x w, sparse x (rows, features), w (features, columns). Bytes per element of b bytes: b + 4, b per column."""
    zero = z.dtype.type(0)
    if w.shape[1] == 1:
        column = w.reshape(w.size)
        for i in range(z.shape[0]):
            z[i, 0] = row_dot(data, indices, indptr[i], indptr[i + 1], column, zero)
        return
    for i in range(z.shape[0]):
        for k in range(w.shape[1]):
            z[i, k] = zero
        for e in range(indptr[i], indptr[i + 1]):
            j, value = indices[e], data[e]
            for k in range(w.shape[1]):
                z[i, k] += value * w[j, k]


@block(f"{_CSR}, T[:, ::1], T[:, ::1]")
def scatter_add(data, indices, indptr, dz, g):
    """g <- g + x^T dz, sparse x (rows, features), dz (rows, columns). Bytes per b-byte element: b + 4, 2b a column."""
    for i in range(dz.shape[0]):
        for e in range(indptr[i], indptr[i + 1]):
            j, value = indices[e], data[e]
            for k in range(dz.shape[1]):
                g[j, k] += value * dz[i, k]


@function
def prefetch_slice(array, first, last):
    """Prefetch array[first:last]."""
    base = np.uintp(array.ctypes.data)
    for address in range(base + np.uintp(first * array.itemsize), base + np.uintp(last * array.itemsize), LINE):
        prefetch(np.uintp(address))


def _gather_sparse(source, indices, indptr, index, scale, data, columns, starts):
    """Copy the rows `index` of a source to data[starts[0] :], columns[starts[0] :]; starts[1:] <- the rows' ends.
    Memory bandwidth bounds it: source, data, two indices of each element. Rows of a large source are prefetched."""
    factor, to = data.dtype.type(scale), starts[0]
    prefetched = len(index) - AHEAD if source.size * source.itemsize > NEAR else 0
    for i in range(len(index)):
        if i < prefetched:
            row = index[i + AHEAD]
            prefetch_slice(source, indptr[row], indptr[row + 1])
            prefetch_slice(indices, indptr[row], indptr[row + 1])
        first = indptr[index[i]]
        length = indptr[index[i] + 1] - first
        for e in range(length):
            data[np.uintp(to + e)] = data.dtype.type(source[np.uintp(first + e)]) * factor
        for e in range(length):
            columns[np.uintp(to + e)] = indices[np.uintp(first + e)]
        to += length
        starts[i + 1] = to


_READ = "Array(T, 1, 'C', True), Array(int32, 1, 'C', True), Array(int64, 1, 'C', True)"
gather_sparse = {
    out: block(f"{_READ}, int64[::1], float64, {out}[::1], int32[::1], int64[::1]")(_gather_sparse)
    for out in ("float32", "float64")
}
