"""CUDA twin of rotary.py: a thread rotates one pair of elements."""

from hpcdl.kernels import rotary
from hpcdl.kernels.gpu import THREADS, cuda, cuda_kernel


@cuda_kernel("T[:, ::1], T[:, ::1], int64, int64")
def rotate_pairs(x, table, columns, sign):
    """Rotate the pairs of the first `columns` columns."""
    length, size = table.shape
    pairs, turn = columns // 2, T(sign)  # noqa: F821 - see cuda_kernel
    for k in range(cuda.grid(1), x.shape[0] * pairs, cuda.gridsize(1)):
        i, at = k // pairs, k % pairs * 2
        a, b, j = x[i, at], x[i, at + 1], at % size
        cosine, sine = table[i % length, j], turn * table[i % length, j + 1]
        x[i, at] = a * cosine - b * sine
        x[i, at + 1] = a * sine + b * cosine


@rotary.rotate.device(rotate_pairs)
def rotate(x, table, columns, sign):
    """Rotate the heads in the first `columns` columns of x."""
    rotate_pairs(x.dtype, -(-len(x) * columns // 2 // THREADS), x, table, columns, sign)
