"""A model that is a chain of layers with a loss at its end.

    forward     x -> layer 1 -> layer 2 -> ... -> loss          each keeps what its backward needs
    backward    x <- layer 1 <- layer 2 <- ... <- loss          after a layer's turn its slice of the gradient is final

Sums over the rows of a batch, never means: a batch cut into parts of any size, empty ones too, gives the same loss and
the same gradient.
"""

from collections.abc import Callable

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, device_of
from hpcdl.models.group import Alone
from hpcdl.models.layout import Layout
from hpcdl.models.pool import Pool
from hpcdl.random import Random


class Layered:
    """A chain of layers, the last of them the loss, with its tensors in one flat vector (`layout`, `size`, `dtype`).

    It computes on its pool's `device`, where all arrays that it is given lie.
    """

    def __init__(self, features: int, layers: list, pool: Pool):
        self.features, self.layers, self.pool, self.group = features, layers, pool, Alone()
        self.device = pool.device
        self.layout = Layout.of_layers(layers, pool.dtype)
        self.size, self.dtype = self.layout.size, self.layout.dtype
        tensors = self.layout.tensors.values()
        self.tensors = [[tensor for tensor in tensors if tensor.layer == layer.name] for layer in layers]
        slices = dict(self.layout.layer_slices)
        self.slices = [slices.get(layer.name) for layer in layers]

    def views(self, vector: np.ndarray) -> list[tuple[np.ndarray, ...]]:
        """Each layer's own tensors in a flat vector."""
        return [tuple([tensor.view(vector) for tensor in tensors]) for tensors in self.tensors]

    def initialize(self, random: Random) -> np.ndarray:
        """A new parameter vector; each tensor's values depend on the seed, its name, and nothing else of the model.

        They are drawn on the host, so that they are the same bits on every device.
        """
        parameters = CPU.empty(self.size, self.dtype)
        for layer, tensors, w in zip(self.layers, self.tensors, self.views(parameters), strict=True):
            if tensors:
                layer.initialize(w, [random("initialize", tensor.name) for tensor in tensors])
        return self.device.array(parameters)

    def loss_and_gradient(
        self, parameters: np.ndarray, batch, gradient: np.ndarray, on_ready: Callable[[slice], None] | None = None
    ) -> float:
        """Add the gradient of the batch's losses, summed over its rows, to `gradient`; return the sum of the losses.

        parameters, gradient: (size,) in the model's type. batch: x (rows, features) in the model's type, y (rows,);
        zero rows are allowed. on_ready(slice): called as soon as that slice of the gradient is final, last layer first.
        Raises UsageError where an array does not fit the model or a label is not a class.
        """
        self.check(batch.x, batch.y, parameters, gradient)
        w, g, group = self.views(parameters), self.views(gradient), self.group
        z, kept = self.forward(w, batch.x)
        (loss, _), saved = self.layers[-1].forward(w[-1], z, group, batch.y)
        kept.append(saved)
        dy = None
        for i in reversed(range(len(self.layers))):
            dx = self.layers[i].backward(w[i], kept[i], dy, g[i], group)
            if dy is not None:
                self.pool.give(dy)
            dy = dx
            if on_ready and self.slices[i]:
                on_ready(self.slices[i])
        return loss

    def evaluate(self, parameters: np.ndarray, batch) -> tuple[float, float]:
        """(sum of losses, number of rows predicted correctly); for regression, sum of squared errors instead."""
        self.check(batch.x, batch.y, parameters)
        w = self.views(parameters)
        z, kept = self.forward(w, batch.x)
        result, saved = self.layers[-1].forward(w[-1], z, self.group, batch.y)
        self.release([*kept, saved])
        return result

    def predict(self, parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
        """What the loss predicts for x (rows, features): class probabilities, probability of class 1, or values."""
        self.check(x, None, parameters)
        z, kept = self.forward(self.views(parameters), x)
        prediction = self.layers[-1].predict(z)
        self.release(kept)
        return prediction

    def forward(self, w, x):
        """The input of the loss, and what each layer before it has kept."""
        kept = []
        for layer, tensors in zip(self.layers[:-1], w, strict=False):
            x, saved = layer.forward(tensors, x, self.group)
            kept.append(saved)
        return x, kept

    def release(self, kept):
        """Let the layers give back what they have kept."""
        for layer, saved in zip(self.layers, kept, strict=False):
            layer.release(saved)

    def check(self, x, y, *vectors):
        """Raise UsageError where an array does not fit the model: compiled loops would read past its end."""
        device = self.device
        for name, array in (("x", x), ("y", y), *(("a vector", vector) for vector in vectors)):
            if array is not None and not device.holds(array):
                raise UsageError(f"{name} lies on {device_of(array)}; this model computes on {device}")
        if x.ndim != 2 or x.shape[1] != self.features or x.dtype != self.dtype or not x.flags.c_contiguous:
            wanted = f"a C-contiguous {self.dtype} array of shape (rows, {self.features})"
            raise UsageError(f"x is a {x.dtype} array of shape {x.shape}; this model wants {wanted}")
        if y is not None and (y.shape != x.shape[:1] or y.dtype != self.layers[-1].target or not device.writable(y)):
            wanted = f"a writable, C-contiguous {self.layers[-1].target} array of shape ({x.shape[0]},)"
            raise UsageError(f"y is a {y.dtype} array of shape {y.shape}; this model wants {wanted}")
        for vector in vectors:
            if vector.shape != (self.size,) or vector.dtype != self.dtype or not device.writable(vector):
                wanted = f"a writable, contiguous {self.dtype} vector of {self.size} elements"
                raise UsageError(f"a vector is {vector.dtype} of shape {vector.shape}; this model wants {wanted}")
