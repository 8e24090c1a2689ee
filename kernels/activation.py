"""Bias and activation in one pass after a layer's matrix product, and their backward pass with the bias gradient.

                forward, in place of z           backward, in place of y         bias gradient
    none        y = z + b                        dz = dy                         gb += sum over rows of dz
    relu        y = max(z + b, 0)                dz = dy where y > 0, else 0     the same
    tanh        y = tanh(z + b)                  dz = dy (1 - y^2)               the same

z, y, dy are (rows, width), b and gb (width,). The forward tanh is numpy's, which is vectorized; it follows `add_bias`.
The comparisons are written so that NaN passes through (NaN < 0 and NaN <= 0 are false).
"""

from hpcdl.kernels.bind import cpu


@cpu("T[:, ::1], T[::1]")
def add_bias(z, b):
    """z <- z + b, for every row."""
    for i in range(z.shape[0]):
        for j in range(z.shape[1]):
            z[i, j] += b[j]


@cpu("T[:, ::1], T[::1]")
def add_bias_relu(z, b):
    """z <- max(z + b, 0), for every row."""
    zero = z.dtype.type(0)
    for i in range(z.shape[0]):
        for j in range(z.shape[1]):
            y = z[i, j] + b[j]
            z[i, j] = zero if y < zero else y


@cpu("T[:, ::1], T[::1]")
def add_rows(dy, gb):
    """gb <- gb + the sum over rows of dy."""
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            gb[j] += dy[i, j]


@cpu("T[:, ::1], T[:, ::1], T[::1]")
def relu_backward(y, dy, gb):
    """y <- dy where y > 0, else 0; gb <- gb + the sum over rows of the new y."""
    zero = y.dtype.type(0)
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            dz = zero if y[i, j] <= zero else dy[i, j]
            y[i, j] = dz
            gb[j] += dz


@cpu("T[:, ::1], T[:, ::1], T[::1]")
def tanh_backward(y, dy, gb):
    """y <- dy (1 - y^2); gb <- gb + the sum over rows of the new y."""
    one = y.dtype.type(1)
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            dz = dy[i, j] * (one - y[i, j] * y[i, j])
            y[i, j] = dz
            gb[j] += dz
