"""Bias and activation in one pass after a layer's matrix product, and their backward pass with the bias gradient.

                forward                          backward                              bias gradient
    none        y = z + b                        dz = dy                               gb += sum over rows of dz
    residual    y = z + b + x                    the same, and dx = dy                 the same
    relu        y = max(z + b, 0)                dz = dy where y > 0, else 0           the same
    tanh        y = tanh(z + b)                  dz = dy (1 - y^2)                     the same
    gelu        y = x s(x),  x = z + b           dz = dy s (1 + x (1 - s) u'(x))       the same

z, y, dy are (rows, width), b and gb (width,). The output overwrites z, and dz overwrites y; only gelu writes y beside
z: its backward pass needs z and overwrites it with dz. gelu is the tanh form of Hendrycks and Gimpel ("Gaussian error
linear units", 2016), x (1 + tanh(u / 2)) / 2 = x s with s(x) = 1 / (1 + exp(-u)), u(x) = sqrt(8 / pi) (x + 0.044715
x^3). NaN passes through all comparisons. Bytes moved per element of k bytes: forward 2k, add_rows k, backward 3k.
Memory bandwidth bounds all but tanh and gelu (about 20 operations and a division, 30 in gelu's backward pass)."""

import math

from hpcdl.kernels.bind import rowwise
from hpcdl.kernels.elementary import exp, tanh

LINEAR = math.sqrt(8 / math.pi)  # u(x) = LINEAR x + CUBIC x^3
CUBIC = 0.044715 * LINEAR


@rowwise("T[:, ::1], T[::1]")
def add_bias(i, j, z, b):
    """z <- z + b, for every row."""
    z[i, j] += b[j]


@rowwise("T[:, ::1], T[::1], T[:, ::1]")
def add_bias_residual(i, j, z, b, x):
    """z <- z + b + x, for every row: the end of a residual block whose input is x."""
    z[i, j] += b[j] + x[i, j]


@rowwise("T[:, ::1], T[::1]")
def add_bias_relu(i, j, z, b):
    """z <- max(z + b, 0), for every row."""
    zero = z.dtype.type(0)
    y = z[i, j] + b[j]
    z[i, j] = zero if y < zero else y


@rowwise("T[:, ::1], T[::1]")
def add_bias_tanh(i, j, z, b):
    """z <- tanh(z + b), for every row."""
    z[i, j] = tanh(z[i, j] + b[j])


@rowwise("T[:, ::1], T[::1], T[:, ::1]")
def add_bias_gelu(i, j, z, b, y):
    """y <- gelu(z + b), for every row; z stays."""
    one, linear, cubic = z.dtype.type(1), z.dtype.type(LINEAR), z.dtype.type(CUBIC)
    x = z[i, j] + b[j]
    y[i, j] = x / (one + exp(-x * (linear + cubic * (x * x))))


@rowwise("T[:, ::1], T[::1]", sums="only")
def add_rows(i, j, dy, gb):
    """gb <- gb + the sum over rows of dy."""
    return dy[i, j]


@rowwise("T[:, ::1], T[:, ::1], T[::1]", sums=True)
def relu_backward(i, j, y, dy, gb):
    """y <- dy where y > 0, else 0; gb <- gb + the sum over rows of the new y."""
    zero, one = y.dtype.type(0), y.dtype.type(1)
    # A product: to choose dy or 0, the compiler would read dy under a mask: twice the time, beyond the caches.
    dz = dy[i, j] * (zero if y[i, j] <= zero else one)
    y[i, j] = dz
    return dz


@rowwise("T[:, ::1], T[:, ::1], T[::1]", sums=True)
def tanh_backward(i, j, y, dy, gb):
    """y <- dy (1 - y^2); gb <- gb + the sum over rows of the new y."""
    one = y.dtype.type(1)
    dz = dy[i, j] * (one - y[i, j] * y[i, j])
    y[i, j] = dz
    return dz


@rowwise("T[:, ::1], T[::1], T[:, ::1], T[::1]", sums=True)
def gelu_backward(i, j, z, b, dy, gb):
    """z <- dy gelu'(z + b); gb <- gb + the sum over rows of the new z."""
    one, linear, cubic, cubic3 = z.dtype.type(1), z.dtype.type(LINEAR), z.dtype.type(CUBIC), z.dtype.type(3 * CUBIC)
    x = z[i, j] + b[j]
    square = x * x
    s = one / (one + exp(-x * (linear + cubic * square)))
    dz = dy[i, j] * s * (one + x * (one - s) * (linear + cubic3 * square))
    z[i, j] = dz
    return dz
