"""CUDA twin of low_rank.py's orthogonalize: one block, whose threads share the rows."""

import math

from hpcdl.kernels import low_rank
from hpcdl.kernels.gpu import THREADS, block_sum, cuda, cuda_kernel


@cuda_kernel("T[:, ::1]")
def orthonormal_columns(p):
    """Make the columns of p orthonormal, in place; launched with one block."""
    first, n = cuda.threadIdx.x, p.shape[0]
    for k in range(p.shape[1]):
        before, after = 0.0, 0.0
        for _ in range(2):
            for j in range(k):
                along = 0.0
                for i in range(first, n, THREADS):
                    along += float(p[i, j]) * float(p[i, k])
                along = block_sum(along)
                for i in range(first, n, THREADS):
                    p[i, k] -= along * p[i, j]
            before, after = after, 0.0
            for i in range(first, n, THREADS):
                after += float(p[i, k]) * float(p[i, k])
            after = block_sum(after)
        factor = 0.0 if after <= 0.25 * before else 1.0 / math.sqrt(after)
        for i in range(first, n, THREADS):
            p[i, k] *= factor


@low_rank.orthogonalize.device(orthonormal_columns)
def orthogonalize(p):
    """Make the columns of p orthonormal, in place; a column that depends on those before becomes zero."""
    orthonormal_columns(p.dtype, 1, p)
