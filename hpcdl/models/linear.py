"""Linear regression: values x w + b with half the squared error, or Huber's loss; convex."""

from numpy.typing import DTypeLike

from hpcdl.kernels.device import CPU, Device
from hpcdl.models.mlp import Regression


class LinearRegression(Regression):
    """A regression of (rows, features) to one value per row, or several."""

    def __init__(
        self,
        features: int,
        dtype: DTypeLike,
        device: Device = CPU,
        outputs: tuple[int, ...] = (),
        loss: str = "squared",
    ):
        super().__init__(features, dtype, (), "none", device, outputs, loss)
