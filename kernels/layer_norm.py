"""Layer normalization (Ba, Kiros and Hinton, "Layer normalization", 2016): each row to mean 0 and variance 1.

    forward     mean = sum x / n        rstd = 1 / sqrt(sum (x - mean)^2 / n + 1e-5)        h = (x - mean) rstd
                y = h gain + bias
    backward    d = dy gain             dx = rstd (d - sum d / n - h sum (d h) / n)
                dgain += sum over rows of dy h        dbias += sum over rows of dy

x, y, dy, dx are (rows, n), gain, bias and their gradients (n,). forward writes mean and rstd (rows,) for backward,
which recomputes h. The variance takes a second pass over the row, in a cache: as a difference of two sums it would lose
all digits if the mean is large. Per element of b bytes forward moves 2b bytes, backward 3b."""

import math

from hpcdl.kernels.bind import block

EPS = 1e-5  # for rows of equal elements


@block("T[:, ::1], T[::1], T[::1], T[:, ::1], T[::1], T[::1]")
def layer_norm(x, gain, bias, y, mean, rstd):
    """y = (x - mean) rstd gain + bias; mean and rstd of each row are written too."""
    n, eps, one = x.dtype.type(x.shape[1]), x.dtype.type(EPS), x.dtype.type(1)
    for i in range(x.shape[0]):
        total = x.dtype.type(0)
        for j in range(x.shape[1]):
            total += x[i, j]
        center, squares = total / n, x.dtype.type(0)
        for j in range(x.shape[1]):
            squares += (x[i, j] - center) * (x[i, j] - center)
        factor = one / math.sqrt(squares / n + eps)
        for j in range(x.shape[1]):
            y[i, j] = (x[i, j] - center) * factor * gain[j] + bias[j]
        mean[i], rstd[i] = center, factor


@block("T[:, ::1], T[:, ::1], T[::1], T[::1], T[::1], T[:, ::1], T[::1], T[::1]")
def layer_norm_backward(dy, x, gain, mean, rstd, dx, dgain, dbias):
    """Write dx, which may be dy itself, and add to dgain and dbias."""
    n, apart = x.dtype.type(x.shape[1]), dx.ctypes.data != dy.ctypes.data
    for i in range(x.shape[0]):
        center, factor = mean[i], rstd[i]
        if apart:  # below only dx is used: a loop that reads and writes one array vectorizes
            for j in range(x.shape[1]):
                dx[i, j] = dy[i, j]
        along, across = x.dtype.type(0), x.dtype.type(0)
        for j in range(x.shape[1]):
            h = (x[i, j] - center) * factor
            d = dx[i, j] * gain[j]
            along += d * h
            across += d
        for j in range(x.shape[1]):
            dgain[j] += dx[i, j] * ((x[i, j] - center) * factor)
            dbias[j] += dx[i, j]
        along, across = along / n, across / n
        for j in range(x.shape[1]):
            dx[i, j] = factor * (dx[i, j] * gain[j] - across - (x[i, j] - center) * factor * along)
