"""The multi-layer perceptron; without hidden layers it is softmax or linear regression.

    x -> relu(x W1 + b1) -> ... -> h Wn + bn -> softmax -> cross-entropy
                                            -> values  -> half the squared error, or Huber's loss

(Rumelhart, Hinton and Williams, "Learning representations by back-propagating errors", Nature 1986.)
"""

import math

from numpy.typing import DTypeLike

from hpcdl.kernels.device import CPU, Device
from hpcdl.models.layered import Layered
from hpcdl.models.layers import dense_layers
from hpcdl.models.losses import SoftmaxCrossEntropy, regression_loss
from hpcdl.models.pool import Pool


class MLP(Layered):
    """A classifier of (rows, features) into `classes` classes with the given widths of its hidden layers."""

    def __init__(
        self,
        features: int,
        classes: int,
        dtype: DTypeLike,
        hidden: tuple[int, ...] = (),
        activation: str = "relu",
        device: Device = CPU,
    ):
        pool = Pool(dtype, device)
        layers = dense_layers([features, *hidden, classes], activation, pool)
        super().__init__(features, [*layers, SoftmaxCrossEntropy(pool, classes)], pool)


class Regression(Layered):
    """A regression of (rows, features) to one or several values per row (`outputs`: their shape).

    loss: squared or huber:delta=1.
    """

    def __init__(
        self,
        features: int,
        dtype: DTypeLike,
        hidden: tuple[int, ...] = (),
        activation: str = "relu",
        device: Device = CPU,
        outputs: tuple[int, ...] = (),
        loss: str = "squared",
    ):
        pool = Pool(dtype, device)
        layers = dense_layers([features, *hidden, math.prod(outputs)], activation, pool)
        super().__init__(features, [*layers, regression_loss(loss, pool, outputs)], pool)
