"""CUDA twins of sparse.py: neighbouring threads share a row and read its neighbouring elements.

scatter_add alone has no fixed order of additions: rows that share a column add to it atomically, so bits may vary."""

from hpcdl.kernels import sparse
from hpcdl.kernels.gpu import THREADS, cuda, cuda_kernel, cuda_rowwise, group_sum, lanes_of, launch_over

_CSR = "T[::1], int32[::1], int64[::1]"


@cuda_rowwise(f"{_CSR}, T[:, ::1], T[:, ::1]", over="z")
def dots(i, k, data, indices, indptr, w, z):
    """z[i, k] = sum of data[e] w[indices[e], k] over the elements e of row i."""
    total = z.dtype.type(0)
    for e in range(indptr[i], indptr[i + 1]):
        total += data[e] * w[indices[e], k]
    z[i, k] = total


@cuda_kernel(f"{_CSR}, T[:, ::1], T[:, ::1], int64")
def dots_with_one(data, indices, indptr, w, z, lanes):
    """z[i, 0] = sum of data[e] w[indices[e], 0] over the elements e of row i, by `lanes` neighbouring threads."""
    thread, rows = cuda.threadIdx.x, z.shape[0]
    lane, groups = thread % lanes, THREADS // lanes
    for start in range(cuda.blockIdx.x * groups, rows, cuda.gridDim.x * groups):
        i, total = start + thread // lanes, 0.0
        if i < rows:
            for e in range(indptr[i] + lane, indptr[i + 1], lanes):
                total += data[e] * w[indices[e], 0]
        total = group_sum(total, lanes)
        if i < rows and lane == 0:
            z[i, 0] = total


@cuda_kernel(f"{_CSR}, T[:, ::1], T[:, ::1], int64")
def add_rows(data, indices, indptr, dz, g, lanes):
    """g <- g + x^T dz; each row belongs to `lanes` neighbouring threads, which share its elements and columns of dz."""
    thread, (rows, columns) = cuda.threadIdx.x, dz.shape
    lane, groups = thread % lanes, THREADS // lanes
    for i in range(cuda.blockIdx.x * groups + thread // lanes, rows, cuda.gridDim.x * groups):
        first = indptr[i]
        for place in range(lane, (indptr[i + 1] - first) * columns, lanes):
            e, k = first + place // columns, place % columns
            cuda.atomic.add(g, (indices[e], k), data[e] * dz[i, k])


@cuda_kernel("T[::1], int64[::1], int64[::1], int64[::1]")
def sum_lengths(source, indptr, index, starts):
    """starts[i + 1] = starts[i] + the length of row index[i]; computed by one thread."""
    if cuda.grid(1) == 0:
        to = starts[0]
        for i in range(index.size):
            to += indptr[index[i] + 1] - indptr[index[i]]
            starts[i + 1] = to


def copy_rows(source, indices, indptr, index, scale, data, columns, starts, lanes):
    """Copy rows `index` of the source, each by `lanes` neighbouring threads."""
    thread, factor = cuda.threadIdx.x, data.dtype.type(scale)
    lane, groups = thread % lanes, THREADS // lanes
    for i in range(cuda.blockIdx.x * groups + thread // lanes, index.size, cuda.gridDim.x * groups):
        first, to = indptr[index[i]], starts[i]
        for e in range(lane, starts[i + 1] - to, lanes):
            data[to + e] = data.dtype.type(source[first + e]) * factor
            columns[to + e] = indices[first + e]


def launch_shared(kernel, elements: int, rows: int, array, *rest):
    """Launch a kernel in which neighbouring threads share a row: at most 32, with 1 to 2 elements of a mean row each.
    The number of these threads, `lanes`, is the kernel's last argument."""
    lanes = min(32, lanes_of(4 * elements // max(1, rows)))
    kernel(array.dtype, -(-rows * lanes // THREADS), array, *rest, lanes)


@sparse.sparse_dot.device(dots, dots_with_one)
def sparse_dot(data, indices, indptr, w, z):
    if w.shape[1] > 1:
        launch_over(dots, z, data, indices, indptr, w, z)
    else:
        launch_shared(dots_with_one, data.size, z.shape[0], data, indices, indptr, w, z)


@sparse.scatter_add.device(add_rows)
def scatter_add(data, indices, indptr, dz, g):
    launch_shared(add_rows, data.size * dz.shape[1], dz.shape[0], data, indices, indptr, dz, g)


def register(kernel, kind: str):
    """Make sum_lengths and copy_rows the CUDA twin of `kernel`, from gather_sparse; kind: type of the gathered rows."""
    rows = cuda_kernel(f"{_CSR}, int64[::1], float64, {kind}[::1], int32[::1], int64[::1], int64")(copy_rows)

    @kernel.device(sum_lengths, rows)
    def launch(source, indices, indptr, index, scale, data, columns, starts):
        sum_lengths(source.dtype, 1, source, indptr, index, starts)
        launch_shared(rows, data.size, index.size, source, indices, indptr, index, scale, data, columns, starts)


for kind, kernel in sparse.gather_sparse.items():
    register(kernel, kind)
