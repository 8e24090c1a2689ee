"""The loss of one example of a linear model, and its slope by the output: what the kernels of such models share.

loss         of an output z and a target y            slope by z
SQUARED      (z - y)^2 / 2                            z - y
LOGISTIC     log(1 + exp(-s z)),  s = 2y - 1          1 / (1 + exp(-z)) - y
HINGE        max(0, 1 - s z)                          -s where s z < 1, else 0
SOFTMAX      of all outputs together: whoever has them calls softmax_cross_entropy (loss.py)
"""

from hpcdl.kernels.bind import function
from hpcdl.kernels.loss import hinge_row, logistic_row

SQUARED, LOGISTIC, HINGE, SOFTMAX = range(4)


@function
def loss_and_slope(kind, z, y, one):
    """(loss, slope) of one output; y is a label, 0 or 1, in z's type, or the value to predict; one is 1 in z's type."""
    if kind == LOGISTIC:
        loss, slope, _ = logistic_row(z, y, one)
        return loss, slope
    if kind == HINGE:
        loss, slope, _ = hinge_row(z, y, one)
        return loss, slope
    error = z - y
    return error * error / (one + one), error
