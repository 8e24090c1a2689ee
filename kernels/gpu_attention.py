"""CUDA twins of attention.py; each row belongs to a group of neighbouring threads."""

import math

from hpcdl.kernels import attention
from hpcdl.kernels.elementary import exp
from hpcdl.kernels.gpu import THREADS, cuda, cuda_kernel, group_max, group_sum, lanes_of


@cuda_kernel("T[:, ::1], int64, T, int64")
def softmax_rows(scores, length, scale, lanes):
    """Softmax of each row, by `lanes` neighbouring threads."""
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


@cuda_kernel("T[:, ::1], T[:, ::1], int64, T, int64")
def backward_rows(p, dp, length, scale, lanes):
    """Gradient of each row, by `lanes` neighbouring threads."""
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


@attention.causal_softmax.device(softmax_rows)
def causal_softmax(scores, length, scale):
    """scores <- the softmax over the keys up to each query's position, zeros beyond."""
    lanes = lanes_of(length)
    softmax_rows(scores.dtype, -(-scores.shape[0] * lanes // THREADS), scores, length, scale, lanes)


@attention.causal_softmax_backward.device(backward_rows)
def causal_softmax_backward(p, dp, length, scale):
    """dp <- scale p (dp - sum p dp), zeros beyond each query's position."""
    lanes = lanes_of(length)
    backward_rows(p.dtype, -(-p.shape[0] * lanes // THREADS), p, dp, length, scale, lanes)
