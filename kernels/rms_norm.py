"""Root mean square normalization (Zhang and Sennrich, "Root mean square layer normalization", NeurIPS 2019).

    forward     rstd = 1 / sqrt(sum x^2 / n + 1e-5)        h = x rstd        y = h gain
    backward    d = dy gain        dx = rstd (d - h sum (d h) / n)           dgain += sum over rows of dy h

Unlike layer normalization (layer_norm.py) it subtracts no mean and has no bias. x, y, dy, dx are (rows, n), gain and
its gradient (n,). forward writes rstd (rows,) for backward, which recomputes h. Per element of b bytes forward moves 2b
bytes, backward 3b."""

import math

import numpy as np

from hpcdl.kernels.bind import block
from hpcdl.kernels.layer_norm import EPS


@block("T[:, ::1], T[::1], T[:, ::1], T[::1]")
def rms_norm(x, gain, y, rstd):
    """y = x rstd gain; rstd of each row is written too."""
    n, eps = x.dtype.type(x.shape[1]), x.dtype.type(EPS)
    for i in range(x.shape[0]):
        squares = x.dtype.type(0)
        for j in range(x.shape[1]):
            squares += x[i, j] * x[i, j]
        # In float64: the processor's estimate of a float32 reciprocal root makes NaN of infinite squares.
        factor = x.dtype.type(1.0 / math.sqrt(np.float64(squares / n + eps)))
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * factor * gain[j]
        rstd[i] = factor


@block("T[:, ::1], T[:, ::1], T[::1], T[::1], T[:, ::1], T[::1]")
def rms_norm_backward(dy, x, gain, rstd, dx, dgain):
    """Write dx, which may be dy itself, and add to dgain."""
    n, apart = x.dtype.type(x.shape[1]), dx.ctypes.data != dy.ctypes.data
    for i in range(x.shape[0]):
        factor = rstd[i]
        if apart:  # below only dx is used: a loop that reads and writes one array vectorizes
            for j in range(x.shape[1]):
                dx[i, j] = dy[i, j]
        along = x.dtype.type(0)
        for j in range(x.shape[1]):
            along += dx[i, j] * gain[j] * (x[i, j] * factor)
        for j in range(x.shape[1]):
            dgain[j] += dx[i, j] * (x[i, j] * factor)
        along = along / n
        for j in range(x.shape[1]):
            dx[i, j] = factor * (dx[i, j] * gain[j] - x[i, j] * factor * along)
