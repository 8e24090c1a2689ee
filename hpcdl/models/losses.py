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
without gathering z. (Shoeybi et al., "Megatron-LM", 2019)

With class weights c, loss and dz of a row are multiplied by c[y] where backward follows; scores are not weighted."""

import copy
import math
from collections.abc import Callable, Sequence
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
    """Base of losses; forward returns ((sum of losses, score), dz). target: the element type of y. class_weights
    (classes,): None, all 1. watch(y, predictions): called with arrays of the host for each batch that is scored."""

    takes_batch = True
    class_weights: Array | None = None
    watch: Callable[[np.ndarray, np.ndarray], object] | None = None
    classes, per = 2, 1
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

    def within(self, context: Any) -> Self:
        """Return the loss of a rank of `context`, which has some tokens of each sequence, and their targets."""
        return self

    def forward(
        self, w: Sequence[Array], z: Array, group: LayerGroup, y: Array, batch: Any = None, keep: bool = True
    ) -> tuple[tuple[float, float], Any]:
        dz = self.pool.take(*z.shape)
        total, score = self.totals(z, y, dz, group)
        if score < 0:
            raise UsageError(f"a label of the data is outside of the classes 0 to {self.classes - 1}; check the data")
        if keep and self.class_weights is not None:
            factors = self.class_weights[y]
            dz *= factors[:, None]
            total = float((factors * self.row_losses(z, y)).sum(dtype=np.float64)) / self.per
        elif not keep and self.watch is not None:
            host = self.pool.device.host
            self.watch(host(y), host(self.scored(z)))
        return (total, score), dz

    def scored(self, z: Array) -> Array:
        """Return the predictions of the rows, all their columns, after `totals`."""
        prediction: Array = self.predict(z)
        return prediction

    def predict(self, z: Array) -> Array:
        """Return the predictions for z, all columns of it."""
        raise NotImplementedError

    def row_losses(self, z: Array, y: Array) -> Array:
        """Return the loss of each row, unweighted, after `totals`."""
        raise NotImplementedError

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
        self.shared: tuple[Any, Any] = None, None  # of the last rows, with `own`: their losses, their predictions

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
        losses, p = None, None
        if self.class_weights is not None:
            losses = self.xp.log(sums[:, 0]) - sums[:, 1]
        if self.watch is not None:
            p = self.pool.device.zeros((len(z), self.classes), z.dtype)
            p[:, own] = dz / sums[:, :1]
            group.all_reduce(p)
        self.shared = losses, p
        result = kernels.finish_softmax(dz, y, own.start, self.classes, sums)
        self.pool.give(tops)
        self.pool.give(sums)
        return result

    def scored(self, z: Array) -> Array:
        return super().scored(z) if self.own is None else self.shared[1]

    def row_losses(self, z: Array, y: Array) -> Array:
        if self.own is not None:
            return self.shared[0]
        with np.errstate(invalid="ignore"):
            z = z - z.max(axis=1, keepdims=True)
            return self.xp.log(self.xp.exp(z).sum(axis=1)) - z[self.xp.arange(len(z)), y]

    def predict(self, z: Array) -> Array:
        with np.errstate(invalid="ignore"):  # non-finite values become NaN, without a warning
            p = self.xp.exp(z - z.max(axis=1, keepdims=True))
            return p / p.sum(axis=1, keepdims=True)


class Logistic(Loss):
    """Binary cross-entropy of the logistic function of z; predicts the probability of class 1 (rows,)."""

    kernel = kernels.logistic

    def row_losses(self, z: Array, y: Array) -> Array:
        with np.errstate(invalid="ignore"):
            return self.xp.logaddexp(0, (1 - 2 * y) * z[:, 0])

    def predict(self, z: Array) -> Array:
        with np.errstate(invalid="ignore"):
            return self.xp.exp(-self.xp.logaddexp(0, -z[:, 0]))


class Hinge(Loss):
    """The hinge loss of a support vector machine; predicts the class 1 or 0 (rows,), as it has no probabilities."""

    kernel = kernels.hinge

    def row_losses(self, z: Array, y: Array) -> Array:
        return self.xp.maximum(0, 1 + (1 - 2 * y) * z[:, 0])

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
