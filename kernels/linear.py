"""Losses of linear models and their derivatives by the output, for one example.

loss         of an output z and a target y            slope: its derivative by z
SQUARED      (z - y)^2 / 2                            z - y
LOGISTIC     log(1 + exp(-s z)),  s = 2y - 1          1 / (1 + exp(-z)) - y
HINGE        max(0, 1 - s z)                          -s where s z < 1, else 0
SOFTMAX      of all outputs together: callers use softmax_cross_entropy (loss.py)"""

from hpcdl.kernels.bind import function
from hpcdl.kernels.loss import hinge_row, logistic_row

SQUARED, LOGISTIC, HINGE, SOFTMAX = range(4)


@function
def loss_and_slope(kind, z, y, one):
    """Return (loss, slope) of an output z; y: a label 0 or 1, or the value to predict; one: 1 in z's type."""
    if kind == LOGISTIC:
        loss, slope, _ = logistic_row(z, y, one)
        return loss, slope
    if kind == HINGE:
        loss, slope, _ = hinge_row(z, y, one)
        return loss, slope
    error = z - y
    return error * error / (one + one), error
