"""Bias and activation in one pass after a layer's matrix product, and their backward pass with the bias gradient.

                forward, in place of z           backward, in place of y         bias gradient
    none        y = z + b                        dz = dy                         gb += sum over rows of dz
    relu        y = max(z + b, 0)                dz = dy where y > 0, else 0     the same
    tanh        y = tanh(z + b)                  dz = dy (1 - y^2)               the same

z, y, dy are (rows, width), b and gb (width,). The forward tanh is numpy's, which is vectorized; it follows `add_bias`.
The comparisons are written so that NaN passes through (NaN < 0 and NaN <= 0 are false).
"""

from hpcdl.kernels.bind import rowwise


@rowwise("T[:, ::1], T[::1]")
def add_bias(i, j, z, b):
    """z <- z + b, for every row."""
    z[i, j] += b[j]


@rowwise("T[:, ::1], T[::1]")
def add_bias_relu(i, j, z, b):
    """z <- max(z + b, 0), for every row."""
    zero = z.dtype.type(0)
    y = z[i, j] + b[j]
    z[i, j] = zero if y < zero else y


@rowwise("T[:, ::1], T[::1]", sums=True)
def add_rows(i, j, dy, gb):
    """gb <- gb + the sum over rows of dy."""
    return dy[i, j]


@rowwise("T[:, ::1], T[:, ::1], T[::1]", sums=True)
def relu_backward(i, j, y, dy, gb):
    """y <- dy where y > 0, else 0; gb <- gb + the sum over rows of the new y."""
    zero = y.dtype.type(0)
    dz = zero if y[i, j] <= zero else dy[i, j]
    y[i, j] = dz
    return dz


@rowwise("T[:, ::1], T[:, ::1], T[::1]", sums=True)
def tanh_backward(i, j, y, dy, gb):
    """y <- dy (1 - y^2); gb <- gb + the sum over rows of the new y."""
    one = y.dtype.type(1)
    dz = dy[i, j] * (one - y[i, j] * y[i, j])
    y[i, j] = dz
    return dz
