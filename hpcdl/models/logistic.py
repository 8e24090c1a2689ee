"""Logistic regression: the probability 1 / (1 + exp(-(x w + b))) of class 1 with its cross-entropy as loss; convex."""

from numpy.typing import DTypeLike

from hpcdl.kernels.device import CPU, Device
from hpcdl.models.layered import Layered
from hpcdl.models.layers import dense_layers
from hpcdl.models.losses import Logistic
from hpcdl.models.pool import Pool


class LogisticRegression(Layered):
    """A classifier of (rows, features) into two classes, with one weight per feature."""

    def __init__(self, features: int, dtype: DTypeLike, device: Device = CPU):
        pool = Pool(dtype, device)
        super().__init__(features, [*dense_layers([features, 1], "none", pool), Logistic(pool)], pool)
