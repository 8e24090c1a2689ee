"""Losses: the last layer of a model, whose forward also takes the targets.

    (sum of losses, score), saved = loss.forward(w, z, group, y)         w is empty: a loss has no tensors
    dz = loss.backward(w, saved, None, g, group)                         computed together with the loss

                           outputs z          targets y                  loss of a row                score
    SoftmaxCrossEntropy    (rows, classes)    0 .. classes - 1, int64    log(sum_j exp z_j) - z_y     number correct
    Logistic               (rows, 1)          0 or 1, int64              log(1 + exp(-(2y - 1) z))    number correct
    Squared                (rows, 1)          real                       (z - y)^2 / 2                sum of (z - y)^2

A sum, not a mean: the sums of the parts of a batch add up, however unevenly it is cut.
"""

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels import loss as kernels
from hpcdl.models.pool import Pool


class Loss:
    """What the three losses share; `target` is the type of y."""

    name = "loss"

    def __init__(self, pool: Pool):
        self.pool, self.shapes, self.target, self.xp = pool, {}, np.dtype(np.int64), pool.device.xp

    def forward(self, w, z, group, y):
        """(sum of losses, score) and what backward needs."""
        dz = self.pool.take(*z.shape)
        total, score = self.kernel(z, y, dz)
        if score < 0:
            raise UsageError(f"a label is outside of the classes 0 to {max(2, z.shape[1]) - 1}; check the data")
        return (total, score), dz

    def backward(self, w, saved, dy, g, group):
        """dz."""
        return saved

    def release(self, saved):
        """Give back what forward took."""
        self.pool.give(saved)


class SoftmaxCrossEntropy(Loss):
    """Cross-entropy of the softmax of z; predicts class probabilities (rows, classes)."""

    kernel = kernels.softmax_cross_entropy

    def predict(self, z):
        """softmax(z)."""
        with np.errstate(invalid="ignore"):  # what is not finite becomes NaN, and no warning
            p = self.xp.exp(z - z.max(axis=1, keepdims=True))
            return p / p.sum(axis=1, keepdims=True)


class Logistic(Loss):
    """Binary cross-entropy of the logistic function of z; predicts the probability of class 1 (rows,)."""

    kernel = kernels.logistic

    def predict(self, z):
        """1 / (1 + exp(-z)), without overflow."""
        with np.errstate(invalid="ignore"):
            return self.xp.exp(-self.xp.logaddexp(0, -z[:, 0]))


class Squared(Loss):
    """Half the squared error; predicts values (rows,)."""

    kernel = kernels.squared

    def __init__(self, pool: Pool):
        super().__init__(pool)
        self.target = pool.dtype

    def predict(self, z):
        """z itself."""
        return z[:, 0].copy()
