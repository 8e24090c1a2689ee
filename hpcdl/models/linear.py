"""Linear regression: the value x w + b with half the squared error as loss; convex."""

from numpy.typing import DTypeLike

from hpcdl.kernels.device import CPU, Device
from hpcdl.models.layered import Layered
from hpcdl.models.layers import dense_layers
from hpcdl.models.losses import Squared
from hpcdl.models.pool import Pool


class LinearRegression(Layered):
    """A regression of (rows, features) to one value per row."""

    def __init__(self, features: int, dtype: DTypeLike, device: Device = CPU):
        pool = Pool(dtype, device)
        super().__init__(features, [*dense_layers([features, 1], "none", pool), Squared(pool)], pool)
