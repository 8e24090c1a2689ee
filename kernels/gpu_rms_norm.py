"""CUDA twins of rms_norm.py: neighbouring threads share a row; column sums over the rows give dgain."""

import math

from hpcdl.kernels import gpu, rms_norm
from hpcdl.kernels.gpu import THREADS, cuda, cuda_kernel, cuda_sums, group_sum, rows_twin
from hpcdl.kernels.layer_norm import EPS


@rows_twin(rms_norm.rms_norm)
def scale_rows(x, gain, y, rstd, lanes):
    """Normalize each row, by `lanes` neighbouring threads."""
    thread, (rows, n) = cuda.threadIdx.x, x.shape
    lane, groups = thread % lanes, THREADS // lanes
    for start in range(cuda.blockIdx.x * groups, rows, cuda.gridDim.x * groups):
        i, squares = start + thread // lanes, T(0)  # noqa: F821 - see cuda_kernel
        if i < rows:
            for j in range(lane, n, lanes):
                squares += x[i, j] * x[i, j]
        factor = T(1.0 / math.sqrt(group_sum(float(squares), lanes) / n + EPS))  # noqa: F821
        if i < rows:
            for j in range(lane, n, lanes):
                y[i, j] = x[i, j] * factor * gain[j]
            if lane == 0:
                rstd[i] = factor


@cuda_kernel("T[:, ::1], T[:, ::1], T[::1], T[::1], T[:, ::1], int64")
def scale_rows_backward(dy, x, gain, rstd, dx, lanes):
    """Write dx of each row, by `lanes` neighbouring threads."""
    thread, (rows, n) = cuda.threadIdx.x, x.shape
    lane, groups = thread % lanes, THREADS // lanes
    for start in range(cuda.blockIdx.x * groups, rows, cuda.gridDim.x * groups):
        i, along = start + thread // lanes, T(0)  # noqa: F821
        if i < rows:
            for j in range(lane, n, lanes):
                along += dy[i, j] * gain[j] * (x[i, j] * rstd[i])
        along = T(group_sum(float(along), lanes) / n)  # noqa: F821
        if i < rows:
            for j in range(lane, n, lanes):
                dx[i, j] = rstd[i] * (dy[i, j] * gain[j] - x[i, j] * rstd[i] * along)


@cuda_sums("T[:, ::1], T[:, ::1], T[::1], T[::1]")
def along_rows(i, j, dy, x, rstd, dgain):
    """Return dy h; its sum over the rows is added to dgain."""
    return dy[i, j] * (x[i, j] * rstd[i])


@rms_norm.rms_norm_backward.device(along_rows, gpu.add_partial, scale_rows_backward)
def rms_norm_backward(dy, x, gain, rstd, dx, dgain):
    """Write dx, and add to dgain; dx is written last, since it may be the array dy itself."""
    gpu.add_column_sums(along_rows, dy, x, rstd, dgain)
    gpu.launch_rows(scale_rows_backward, dy, x, gain, rstd, dx)
