"""CUDA twins of layer_norm.py: neighbouring threads share a row; column sums over the rows give dgain and dbias."""

import math

from hpcdl.kernels import activation, gpu, layer_norm
from hpcdl.kernels.gpu import THREADS, cuda, cuda_kernel, cuda_sums, group_sum, rows_twin
from hpcdl.kernels.layer_norm import EPS


@rows_twin(layer_norm.layer_norm)
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
    """Write dx of each row, by `lanes` neighbouring threads."""
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
    """Return dy h; its sum over the rows is added to dgain."""
    return dy[i, j] * ((x[i, j] - mean[i]) * rstd[i])


@layer_norm.layer_norm_backward.device(along_h, gpu.add_partial, backward_rows)
def normalize_backward(dy, x, gain, mean, rstd, dx, dgain, dbias):
    """Write dx, and add to dgain and dbias; dx is written last, since it may be the array dy itself."""
    gpu.add_column_sums(along_h, dy, x, mean, rstd, dgain)
    activation.add_rows(dy, dbias)
    gpu.launch_rows(backward_rows, dy, x, gain, mean, rstd, dx)
