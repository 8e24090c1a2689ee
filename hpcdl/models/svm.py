"""The linear support vector machine: class 1 where x w + b > 0, with the hinge loss and, as a rule, an L2 penalty.

    1/n sum over i of max(0, 1 - (2 y_i - 1) (x_i w + b)) + weight_decay / 2 |(w, b)|^2

(Cortes and Vapnik, "Support-vector networks", Machine Learning 1995)
"""

from numpy.typing import DTypeLike

from hpcdl.kernels.device import CPU, Device
from hpcdl.models.layered import Layered
from hpcdl.models.layers import dense_layers
from hpcdl.models.losses import Hinge
from hpcdl.models.pool import Pool


class SVM(Layered):
    """A classifier of (rows, features) into two classes, with one weight per feature."""

    def __init__(self, features: int, dtype: DTypeLike, device: Device = CPU):
        pool = Pool(dtype, device)
        super().__init__(features, [*dense_layers([features, 1], "none", pool), Hinge(pool)], pool)
