"""A model that is a chain of layers with a loss at its end.

    forward     x -> layer 1 -> layer 2 -> ... -> loss          each keeps what its backward needs
    backward    x <- layer 1 <- layer 2 <- ... <- loss          after a layer's turn its slice of the gradient is final

Sums over the rows of a batch, never means: a batch cut into parts of any size, empty ones too, gives the same loss and
the same gradient.

Where a layer finds its tensors is the affair of `Weights`: `FlatWeights` has all of them, in flat vectors; others may
gather them layer by layer (hpcdl/parallel/sharded_weights.py).
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.csr import CSR
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Array, device_of
from hpcdl.models.group import IdentityGroup, LayerGroup
from hpcdl.models.layout import Layout
from hpcdl.models.losses import Loss
from hpcdl.models.pool import Pool
from hpcdl.random import Random


class Weights(Protocol):
    """Where layers find their tensors and put the gradient; it is told which layer comes next."""

    def open(self, i: int, following: int | None) -> tuple:
        """The tensors of layer i, for forward or backward; `following` is opened next."""

    def close(self, i: int) -> None:
        """Forward is through with them."""

    def gradient(self, i: int) -> tuple:
        """Where backward of layer i adds the gradient."""

    def ready(self, i: int) -> None:
        """Backward is through with both, and layer i adds nothing more to the gradient."""

    def finish(self) -> None:
        """No layer follows: what is under way arrives, what was lent is given up."""


class FlatWeights:
    """The weights of a model whose parameters, and gradient, are flat vectors here."""

    def __init__(
        self,
        model: "Layered",
        parameters: Array,
        gradient: Array | None = None,
        on_ready: Callable[[slice], None] | None = None,
    ):
        self.parameters, self.slices, self.on_ready = parameters, model.slices, on_ready
        self.w = model.views(parameters)
        self.g = [] if gradient is None else model.views(gradient)

    def open(self, i: int, following: int | None) -> tuple[Array, ...]:
        """Views of the parameters of layer i."""
        return self.w[i]

    def close(self, i: int) -> None:
        """They stay."""

    def gradient(self, i: int) -> tuple[Array, ...]:
        """Views of the gradient of layer i."""
        return self.g[i]

    def ready(self, i: int) -> None:
        """Tell whom it concerns that a slice is final."""
        part = self.slices[i]
        if self.on_ready and part:
            self.on_ready(part)

    def finish(self) -> None:
        """All is there already."""


class Layered:
    """A chain of layers, the last of them the loss, with its tensors in one flat vector (`layout`, `size`, `dtype`).

    It computes on its pool's `device`, where all arrays that it is given lie. group: of the ranks that share its
    layers. sequences: whether rows can be shared, too, by sequence parallelism.
    """

    sequences = False
    rows_at_once = 1024  # rows that are scored at once: bounds the memory that evaluation needs

    def __init__(self, features: int, layers: list[Any], pool: Pool, group: LayerGroup | None = None):
        self.features, self.layers, self.pool = features, layers, pool
        self.group: LayerGroup = group or IdentityGroup()
        self.device = pool.device
        self.layout = Layout.of_layers(layers, pool.dtype)
        self.size, self.dtype = self.layout.size, self.layout.dtype
        self.tensors = [self.layout.used_by(layer) for layer in layers]
        self.target = layers[-1].target if isinstance(layers[-1], Loss) else None
        self.outputs = layers[-1].outputs if isinstance(layers[-1], Loss) else ()
        slices = dict(self.layout.layer_slices)
        self.slices = [slices.get(layer.name) for layer in layers]

    def views(self, vector: Array) -> list[tuple[Array, ...]]:
        """Each layer's tensors in a flat vector."""
        return [tuple([tensor.view(vector) for tensor in tensors]) for tensors in self.tensors]

    def initialize(self, random: Random) -> Array:
        """A new parameter vector; each tensor's values depend on the seed, its name, and nothing else of the model.

        They are drawn on the host, so that they are the same bits on every device.
        """
        parameters = CPU.empty(self.size, self.dtype)
        for layer in self.layers:
            for name, values in initial(layer, random, self.dtype).items():
                self.layout.view(parameters, name)[...] = values
        return self.device.array(parameters)

    def loss_and_gradient(
        self, parameters: Array, batch: Any, gradient: Array, on_ready: Callable[[slice], None] | None = None
    ) -> float:
        """Add the gradient of the batch's losses, summed over its rows, to `gradient`; return the sum of the losses.

        parameters, gradient: (size,) in the model's type. batch: x (rows, features) in the model's type, y (rows,) or,
        of several outputs, (rows, outputs); zero rows are allowed; x may be sparse (hpcdl/csr.py) where the first
        layer is `Dense`. on_ready(slice): called as soon as that slice of the gradient is final, last layer first.
        Raises UsageError where an array does not fit the model or a label is not a class.
        """
        self.check_arrays(batch.x, batch.y, parameters, gradient)
        return self.forward_backward(FlatWeights(self, parameters, gradient, on_ready), batch)

    def evaluate(self, parameters: Array, batch: Any) -> tuple[float, float]:
        """(sum of losses, number of rows predicted correctly); for regression, sum of squared errors instead."""
        self.check_arrays(batch.x, batch.y, parameters)
        return self.score(FlatWeights(self, parameters), batch)

    def predict(self, parameters: Array, x: Array) -> Array:
        """What the loss predicts for x (rows, features): class probabilities, probability of class 1, or values."""
        self.check_arrays(x, None, parameters)
        z, kept = self.forward(FlatWeights(self, parameters), x, range(len(self.layers) - 1), keep=False)
        prediction = self.layers[-1].predict(self.last_rows(z))
        self.release(kept)
        return prediction

    # -- the same with weights that lie anywhere ----------------------------------------------------------------------

    def forward_backward(self, weights: Weights, batch: Any) -> float:
        """Forward and backward through all layers; returns the sum of losses."""
        layers = range(len(self.layers))
        (loss, _), kept = self.forward(weights, batch.x, layers, self.targets(batch), batch=batch)
        self.backward(weights, kept, None, layers)
        return loss

    def score(self, weights: Weights, batch: Any) -> tuple[float, float]:
        """(sum of losses, score), in one pass forward that keeps nothing."""
        layers = range(len(self.layers))
        result, kept = self.forward(weights, batch.x, layers, self.targets(batch), keep=False, batch=batch)
        self.release(kept)
        return result

    def forward(
        self,
        weights: Weights,
        x: Any,
        layers: range,
        targets: Array | None = None,
        keep: bool = True,
        batch: Any = None,
    ) -> tuple[Any, list[tuple[Any, Any]]]:
        """What the last of `layers` makes of x, and what the layers have kept for backward, as (layer, saved).

        Where the loss is among them, that is (sum of losses, score). keep: without it all is released but what the
        result lies in. batch: what x is made from, for layers with `takes_batch`.
        """
        kept: list[tuple[Any, Any]] = []
        for i in layers:
            layer = self.layers[i]
            w = weights.open(i, i + 1 if i + 1 < layers.stop else None)
            more: tuple = (targets,) if isinstance(layer, Loss) else ()
            if getattr(layer, "takes_batch", False):
                more += batch, keep
            x, saved = layer.forward(w, x, self.group, *more)
            weights.close(i)
            if not keep:
                self.release(kept)
                kept = []
            kept.append((layer, saved))
        return x, kept

    def backward(self, weights: Weights, kept: list[tuple[Any, Any]], dy: Array | None, layers: range) -> Array | None:
        """The gradient by the input of `layers`, from that by their output (None for the loss); uses `kept` and dy up.

        It is None where the first layer is that of the model.
        """
        for i in reversed(layers):
            layer, saved = kept.pop()
            w = weights.open(i, i - 1 if i > layers.start else None)
            dx = layer.backward(w, saved, dy, weights.gradient(i), self.group)
            if dy is not None:
                self.pool.give(dy)
            dy = dx
            weights.ready(i)
        return dy

    def release(self, kept: list[tuple[Any, Any]]) -> None:
        """Let the layers give back what they have kept."""
        for layer, saved in kept:
            layer.release(saved)

    def targets(self, batch: Any) -> Array:
        """What the loss compares its input with."""
        return batch.y

    def last_rows(self, z: Array) -> Array:
        """The rows of the loss's input that a prediction is made from."""
        return z

    def check_arrays(self, x: Array, y: Array | None, *vectors: Array) -> None:
        """Raise UsageError where an array does not fit the model: compiled loops would read past its end."""
        device = self.device
        for name, array in (("x", x), ("y", y), *(("a vector", vector) for vector in vectors)):
            array = array.data if isinstance(array, CSR) else array
            if array is not None and not device.holds(array):
                raise UsageError(f"{name} lies on {device_of(array)}; this model computes on {device}")
        whole = isinstance(x, CSR) or x.flags.c_contiguous
        if x.ndim != 2 or x.shape[1] != self.features or x.dtype != self.dtype or not whole:
            wanted = f"a C-contiguous {self.dtype} array of shape (rows, {self.features})"
            raise UsageError(f"x is a {x.dtype} array of shape {x.shape}; this model wants {wanted}")
        if y is not None and (y.shape != (len(x), *self.outputs) or y.dtype != self.target or not device.writable(y)):
            wanted = f"a writable, C-contiguous {self.target} array of shape {(len(x), *self.outputs)}"
            raise UsageError(f"y is a {y.dtype} array of shape {y.shape}; this model wants {wanted}")
        for vector in vectors:
            if vector.shape != (self.size,) or vector.dtype != self.dtype or not device.writable(vector):
                wanted = f"a writable, contiguous {self.dtype} vector of {self.size} elements"
                raise UsageError(f"a vector is {vector.dtype} of shape {vector.shape}; this model wants {wanted}")


def initial(layer: Any, random: Random, dtype: DTypeLike) -> dict[str, np.ndarray]:
    """Initial values of a layer's own tensors by their names in the layout, on the host, whole also where it is cut."""
    names = [f"{layer.name}.{name}" for name in layer.full_shapes]
    values = [CPU.empty(shape, dtype) for shape in layer.full_shapes.values()]
    if names:
        layer.initialize(values, [random("initialize", name) for name in names])
    return dict(zip(names, values, strict=True))
