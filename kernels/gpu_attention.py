"""CUDA twins of attention.py; each row belongs to a group of neighbouring threads."""

import math

from hpcdl.kernels import attention
from hpcdl.kernels.elementary import exp
from hpcdl.kernels.gpu import THREADS, cuda, group_max, group_sum, rows_twin


@rows_twin(attention.causal_softmax)
def softmax_rows(scores, length, scale, lanes):
    """Compute the causal softmax of each row by `lanes` neighbouring threads."""
    thread, rows = cuda.threadIdx.x, scores.shape[0]
    lane, groups = thread % lanes, THREADS // lanes
    for start in range(cuda.blockIdx.x * groups, rows, cuda.gridDim.x * groups):
        i, top, total = start + thread // lanes, -math.inf, T(0)  # noqa: F821 - see cuda_kernel
        count = i % length + 1 if i < rows else 0
        for j in range(lane, count, lanes):
            value = float(scale * scores[i, j])
            if value > top:
                top = value
        top = T(group_max(top, lanes))  # noqa: F821
        for j in range(lane, count, lanes):
            power = exp(scale * scores[i, j] - top)
            scores[i, j] = power
            total += power
        inverse = T(1.0 / group_sum(float(total), lanes))  # noqa: F821
        if i < rows:
            for j in range(lane, length, lanes):
                scores[i, j] = scores[i, j] * inverse if j < count else T(0)  # noqa: F821


@rows_twin(attention.causal_softmax_backward)
def backward_rows(p, dp, length, scale, lanes):
    """Compute the gradient by the scores of each row, with `lanes` neighbouring threads for a row."""
    thread, rows = cuda.threadIdx.x, p.shape[0]
    lane, groups = thread % lanes, THREADS // lanes
    for start in range(cuda.blockIdx.x * groups, rows, cuda.gridDim.x * groups):
        i, total = start + thread // lanes, T(0)  # noqa: F821
        count = i % length + 1 if i < rows else 0
        for j in range(lane, count, lanes):
            total += p[i, j] * dp[i, j]
        total = T(group_sum(float(total), lanes))  # noqa: F821
        if i < rows:
            for j in range(lane, length, lanes):
                dp[i, j] = scale * p[i, j] * (dp[i, j] - total) if j < count else T(0)  # noqa: F821
