"""Losses: the last layer of a model. `forward` also takes the targets y, and computes dz together with the loss.

                           outputs z          targets y                  loss of a row                score
    SoftmaxCrossEntropy    (rows, classes)    0 .. classes - 1, int64    log(sum_j exp z_j) - z_y     number correct
    Logistic               (rows, 1)          0 or 1, int64              log(1 + exp(-(2y - 1) z))    number correct
    Hinge                  (rows, 1)          0 or 1, int64              max(0, 1 - (2y - 1) z)       number correct
    Squared                (rows, outputs)    real                       sum of (z - y)^2 / 2         sum of (z - y)^2
    Huber                  (rows, outputs)    real                       the same, linear from delta  sum of (z - y)^2

Losses are sums, not means, so that the sums of the parts of a batch add up. If an example has several rows of z (`per`,
the tokens of a sequence), its loss and its score are the means over them. If ranks share the classes (`cut`), each has
some columns of z. Two all-reduces of one and two numbers per row give the maximum of z and the sum of exponentials,
without gathering z. (Shoeybi et al., "Megatron-LM", 2019)"""

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
    """Base of losses; forward returns ((sum of losses, score), dz). target: the element type of y."""

    classes = 2
    outputs: tuple[int, ...] = ()  # shape of a row's targets
    kernel: Any  # (z, y, dz) -> (sum of losses, score); not a method

    def __init__(self, pool: Pool):
        super().__init__("loss", pool, {})
        self.target: np.dtype = np.dtype(np.int64)
        self.xp = pool.device.xp

    def cut(self, part: int, parts: int, divided: bool = False) -> Self:
        """Return the loss of rank `part` of `parts` that share a model; divided: True if each has some columns of z."""
        if divided and parts > 1:
            raise UsageError(f"ranks cannot share the outputs of the loss {type(self).__name__}; add a hidden layer")
        return self

    def forward(self, w: Sequence[Array], z: Array, group: LayerGroup, y: Array) -> tuple[tuple[float, float], Array]:
        dz = self.pool.take(*z.shape)
        total, score = self.totals(z, y, dz, group)
        if score < 0:
            raise UsageError(f"a label of the data is outside of the classes 0 to {self.classes - 1}; check the data")
        return (total, score), dz

    def totals(self, z: Array, y: Array, dz: Array, group: LayerGroup) -> tuple[float, float]:
        """Write dz; return (sum of losses, score). A score below 0 means that a label is no class."""
        result: tuple[float, float] = self.kernel(z, y, dz)
        return result

    def backward(self, w: Sequence[Array], saved: Array, dy: Any, g: Sequence[Array], group: LayerGroup) -> Array:
        return saved

    def release(self, saved: Array) -> None:
        self.pool.give(saved)


class SoftmaxCrossEntropy(Loss):
    """Cross-entropy of the softmax of z; predicts class probabilities (rows, classes)."""

    kernel = kernels.softmax_cross_entropy

    def __init__(self, pool: Pool, classes: int, per: int = 1):
        super().__init__(pool)
        self.classes, self.per = classes, per
        self.own: slice | None = None

    def cut(self, part: int, parts: int, divided: bool = False) -> Self:
        if not divided or parts == 1:
            return self
        other = copy.copy(self)
        other.own = chunk(self.classes, parts, part)
        return other

    def totals(self, z: Array, y: Array, dz: Array, group: LayerGroup) -> tuple[float, float]:
        total, score = self.kernel(z, y, dz) if self.own is None else self._together(z, y, dz, group, self.own)
        if self.per > 1:
            scale(dz.reshape(-1), 1 / self.per)
            total, score = total / self.per, score / self.per
        return total, score

    def _together(self, z: Array, y: Array, dz: Array, group: LayerGroup, own: slice) -> tuple[float, float]:
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
        with np.errstate(invalid="ignore"):  # non-finite values become NaN, without a warning
            p = self.xp.exp(z - z.max(axis=1, keepdims=True))
            return p / p.sum(axis=1, keepdims=True)


class Logistic(Loss):
    """Binary cross-entropy of the logistic function of z; predicts the probability of class 1 (rows,)."""

    kernel = kernels.logistic

    def predict(self, z: Array) -> Array:
        with np.errstate(invalid="ignore"):
            return self.xp.exp(-self.xp.logaddexp(0, -z[:, 0]))


class Hinge(Loss):
    """The hinge loss of a support vector machine; predicts the class 1 or 0 (rows,), as it has no probabilities."""

    kernel = kernels.hinge

    def predict(self, z: Array) -> Array:
        return (z[:, 0] > 0).astype(z.dtype)


class Squared(Loss):
    """Half the squared error, summed over the outputs; predicts values, (rows,) or, with `outputs`, (rows, outputs)."""

    kernel = kernels.squared

    def __init__(self, pool: Pool, outputs: tuple[int, ...] = ()):
        super().__init__(pool)
        self.target, self.outputs = pool.dtype, outputs

    def totals(self, z: Array, y: Array, dz: Array, group: LayerGroup) -> tuple[float, float]:
        return super().totals(z.reshape(-1, 1), y.reshape(-1), dz.reshape(-1, 1), group)  # each output as a row

    def predict(self, z: Array) -> Array:
        return z.copy() if self.outputs else z[:, 0].copy()


class Huber(Squared):
    """Huber's loss: the gradient of an outlier is limited to that of an error `delta`; predicts values like Squared."""

    def __init__(self, pool: Pool, outputs: tuple[int, ...] = (), delta: float = 1.0):
        super().__init__(pool, outputs)
        self.kernel: Any = lambda z, y, dz: kernels.huber(z, y, delta, dz)


LOSSES: dict[str, dict[str, Any]] = {"squared": {}, "huber": {"delta": 1.0}}


def regression_loss(spec: str, pool: Pool, outputs: tuple[int, ...] = ()) -> Squared:
    """Return the regression loss `spec`, squared or huber:delta=1; else UsageError. outputs: shape of one target."""
    name, settings = parse_spec("loss", spec, LOSSES)
    if name == "squared":
        return Squared(pool, outputs)
    if not (settings["delta"] > 0 and math.isfinite(settings["delta"])):
        raise UsageError(f"loss {spec!r}: delta must be a finite number greater than 0")
    return Huber(pool, outputs, **settings)
