"""CUDA twins of layer_norm.py: a group of neighbouring threads for each row; sums over rows by columns."""

import math

from hpcdl.kernels import activation, layer_norm
from hpcdl.kernels.gpu import (
    THREADS,
    add_column_sums,
    add_partial,
    cuda,
    cuda_kernel,
    cuda_sums,
    group_sum,
    lanes_of,
)
from hpcdl.kernels.layer_norm import EPS


@cuda_kernel("T[:, ::1], T[::1], T[::1], T[:, ::1], T[::1], T[::1], int64")
def normalize_rows(x, gain, bias, y, mean, rstd, lanes):
    """Normalize each row, by `lanes` neighbouring threads."""
    thread, (rows, n) = cuda.threadIdx.x, x.shape
    lane, groups = thread % lanes, THREADS // lanes
    for start in range(cuda.blockIdx.x * groups, rows, cuda.gridDim.x * groups):
        i, total, squares = start + thread // lanes, T(0), T(0)  # noqa: F821 - see cuda_kernel
        if i < rows:
            for j in range(lane, n, lanes):
                total += x[i, j]
        center = T(group_sum(float(total), lanes) / n)  # noqa: F821
        if i < rows:
            for j in range(lane, n, lanes):
                squares += (x[i, j] - center) * (x[i, j] - center)
        factor = T(1.0 / math.sqrt(group_sum(float(squares), lanes) / n + EPS))  # noqa: F821
        if i < rows:
            for j in range(lane, n, lanes):
                y[i, j] = (x[i, j] - center) * factor * gain[j] + bias[j]
            if lane == 0:
                mean[i] = center
                rstd[i] = factor


@cuda_kernel("T[:, ::1], T[:, ::1], T[::1], T[::1], T[::1], T[:, ::1], int64")
def backward_rows(dy, x, gain, mean, rstd, dx, lanes):
    """dx of each row, by `lanes` neighbouring threads."""
    thread, (rows, n) = cuda.threadIdx.x, x.shape
    lane, groups = thread % lanes, THREADS // lanes
    for start in range(cuda.blockIdx.x * groups, rows, cuda.gridDim.x * groups):
        i, along, across = start + thread // lanes, T(0), T(0)  # noqa: F821
        if i < rows:
            for j in range(lane, n, lanes):
                d = dy[i, j] * gain[j]
                along += d * ((x[i, j] - mean[i]) * rstd[i])
                across += d
        along = T(group_sum(float(along), lanes) / n)  # noqa: F821
        across = T(group_sum(float(across), lanes) / n)  # noqa: F821
        if i < rows:
            for j in range(lane, n, lanes):
                h = (x[i, j] - mean[i]) * rstd[i]
                dx[i, j] = rstd[i] * (dy[i, j] * gain[j] - across - h * along)


@cuda_sums("T[:, ::1], T[:, ::1], T[::1], T[::1], T[::1]")
def along_h(i, j, dy, x, mean, rstd, dgain):
    """Return dy h; its sums over the rows are added to dgain."""
    return dy[i, j] * ((x[i, j] - mean[i]) * rstd[i])


@layer_norm.layer_norm.device(normalize_rows)
def normalize(x, gain, bias, y, mean, rstd):
    """y = (x - mean) rstd gain + bias; mean and rstd of each row are written too."""
    lanes = lanes_of(x.shape[1])
    normalize_rows(x.dtype, -(-x.shape[0] * lanes // THREADS), x, gain, bias, y, mean, rstd, lanes)


@layer_norm.layer_norm_backward.device(along_h, add_partial, backward_rows)
def normalize_backward(dy, x, gain, mean, rstd, dx, dgain, dbias):
    """Write dx, add to dgain and dbias; dx comes last, for it may be dy itself."""
    add_column_sums(along_h, dy, x, mean, rstd, dgain)
    activation.add_rows(dy, dbias)
    lanes = lanes_of(x.shape[1])
    backward_rows(x.dtype, -(-x.shape[0] * lanes // THREADS), dy, x, gain, mean, rstd, dx, lanes)
