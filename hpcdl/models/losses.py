"""Losses: the last layer of a model; its forward also takes the targets.

    (sum of losses, score), saved = loss.forward(w, z, group, y)         w is empty: a loss has no tensors
    dz = loss.backward(w, saved, None, g, group)                         computed together with the loss

                           outputs z          targets y                  loss of a row                score
    SoftmaxCrossEntropy    (rows, classes)    0 .. classes - 1, int64    log(sum_j exp z_j) - z_y     number correct
    Logistic               (rows, 1)          0 or 1, int64              log(1 + exp(-(2y - 1) z))    number correct
    Hinge                  (rows, 1)          0 or 1, int64              max(0, 1 - (2y - 1) z)       number correct
    Squared                (rows, outputs)    real                       sum of (z - y)^2 / 2         sum of (z - y)^2
    Huber                  (rows, outputs)    real                       sum of e^2 / 2 up to delta   sum of (z - y)^2

Losses are sums, not means, so that the sums of the parts of a batch add up. If an example has several rows of z (`per`
of them, the tokens of a sequence), its loss and its score are the means over them.

If ranks share the classes (`cut`), each has some columns of z. Two all-reduces of one and two numbers per row give the
maximum of z and the sum of exponentials, without gathering z. (Shoeybi et al., "Megatron-LM", 2019)
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.errors import UsageError, parse_spec
from hpcdl.kernels import loss as kernels
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import scale
from hpcdl.models.group import LayerGroup
from hpcdl.models.layers import Layer
from hpcdl.models.pool import Pool


class Loss(Layer):
    """Base of losses; `target`: the type of y."""

    outputs: tuple[int, ...] = ()  # shape of a row's targets
    kernel: Any  # (z, y, dz) -> (sum of losses, score); not a method

    def __init__(self, pool: Pool):
        super().__init__("loss", pool, {})
        self.target: np.dtype = np.dtype(np.int64)
        self.xp = pool.device.xp

    def cut(self, part: int, parts: int, divided: bool = False) -> Self:
        """Return this loss for ranks that share the model; divided: True if each has a part of the outputs z."""
        if divided and parts > 1:
            raise UsageError(f"{type(self).__name__} has outputs that ranks cannot share; add a hidden layer")
        return self

    def forward(self, w: Sequence[Array], z: Array, group: LayerGroup, y: Array) -> tuple[tuple[float, float], Array]:
        """Return (sum of losses, score) and the data for backward."""
        dz = self.pool.take(*z.shape)
        total, score = self.kernel(z, y, dz)
        if score < 0:
            raise UsageError(f"a label is outside of the classes 0 to {max(2, z.shape[1]) - 1}; check the data")
        return (total, score), dz

    def backward(
        self, w: Sequence[Array], saved: Array, dy: Array | None, g: Sequence[Array], group: LayerGroup
    ) -> Array:
        """Return dz, computed in forward."""
        return saved

    def release(self, saved: Array) -> None:
        """Release the buffers of forward."""
        self.pool.give(saved)


class SoftmaxCrossEntropy(Loss):
    """Cross-entropy of the softmax of z; predicts class probabilities (rows, classes)."""

    kernel = kernels.softmax_cross_entropy

    def __init__(self, pool: Pool, classes: int, per: int = 1):
        super().__init__(pool)
        self.classes, self.per = classes, per
        self.own: slice | None = None

    def cut(self, part: int, parts: int, divided: bool = False) -> Self:
        """Return the loss for this rank's classes, if the outputs are divided."""
        if not divided or parts == 1:
            return self
        other = copy.copy(self)
        other.own = chunk(self.classes, parts, part)
        return other

    def forward(self, w: Sequence[Array], z: Array, group: LayerGroup, y: Array) -> tuple[tuple[float, float], Array]:
        """Return (sum of losses, score) and the data for backward."""
        dz = self.pool.take(*z.shape)
        total, score = self.kernel(z, y, dz) if self.own is None else self._together(z, y, dz, group, self.own)
        if score < 0:
            raise UsageError(f"a label is outside of the classes 0 to {self.classes - 1}; check the data")
        if self.per > 1:
            scale(dz.reshape(-1), 1 / self.per)
            total, score = total / self.per, score / self.per
        return (total, score), dz

    def _together(self, z: Array, y: Array, dz: Array, group: LayerGroup, own: slice) -> tuple[float, float]:
        """Return loss and number correct if this rank of the group has the columns `own` of z."""
        tops, sums = self.pool.take(len(z)), self.pool.take(len(z), 2)
        kernels.row_max(z, tops)
        group.all_reduce(tops, "max")
        kernels.partial_softmax(z, y, own.start, tops, dz, sums)
        group.all_reduce(sums)
        result = kernels.finish_softmax(dz, y, own.start, self.classes, sums)
        self.pool.give(tops)
        self.pool.give(sums)
        return result

    def predict(self, z: Array) -> Array:
        """Return softmax(z)."""
        with np.errstate(invalid="ignore"):  # non-finite values become NaN, without a warning
            p = self.xp.exp(z - z.max(axis=1, keepdims=True))
            return p / p.sum(axis=1, keepdims=True)


class Logistic(Loss):
    """Binary cross-entropy of the logistic function of z; predicts the probability of class 1 (rows,)."""

    kernel = kernels.logistic

    def predict(self, z: Array) -> Array:
        """Return 1 / (1 + exp(-z)), without overflow."""
        with np.errstate(invalid="ignore"):
            return self.xp.exp(-self.xp.logaddexp(0, -z[:, 0]))


class Hinge(Loss):
    """The hinge loss of a support vector machine; predicts the class 1 or 0 (rows,), as it has no probabilities."""

    kernel = kernels.hinge

    def predict(self, z: Array) -> Array:
        """Return 1 where z > 0, else 0."""
        return (z[:, 0] > 0).astype(z.dtype)


class Squared(Loss):
    """Half the squared error, summed over the outputs; predicts values, (rows,) or, of several, (rows, outputs)."""

    kernel = kernels.squared

    def __init__(self, pool: Pool, outputs: tuple[int, ...] = ()):
        super().__init__(pool)
        self.target, self.outputs = pool.dtype, outputs

    def forward(self, w: Sequence[Array], z: Array, group: LayerGroup, y: Array) -> tuple[tuple[float, float], Array]:
        """Return (sum of losses, score) and the data for backward; the kernel takes each output as a row."""
        dz = self.pool.take(*z.shape)
        return self.kernel(z.reshape(-1, 1), y.reshape(-1), dz.reshape(-1, 1)), dz

    def predict(self, z: Array) -> Array:
        """Return z."""
        return z.copy() if self.outputs else z[:, 0].copy()


class Huber(Squared):
    """Huber's loss: the gradient of an outlier is limited to that of an error `delta`; predicts values, as Squared."""

    def __init__(self, pool: Pool, outputs: tuple[int, ...] = (), delta: float = 1.0):
        super().__init__(pool, outputs)
        self.kernel: Any = lambda z, y, dz: kernels.huber(z, y, delta, dz)


LOSSES: dict[str, dict[str, Any]] = {"squared": {}, "huber": {"delta": 1.0}}


def regression_loss(spec: str, pool: Pool, outputs: tuple[int, ...] = ()) -> Squared:
    """Return the regression loss `spec`: squared or huber:delta=1. Raises UsageError for another."""
    name, settings = parse_spec("loss", spec, LOSSES)
    if name == "squared":
        return Squared(pool, outputs)
    if not (settings["delta"] > 0 and math.isfinite(settings["delta"])):
        raise UsageError(f"loss {spec!r}: delta must be a number greater than 0")
    return Huber(pool, outputs, **settings)
