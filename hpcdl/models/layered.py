"""A model that is a chain of layers with a loss at its end.

    forward     x -> layer 1 -> layer 2 -> ... -> loss          each saves data for its backward
    backward    x <- layer 1 <- layer 2 <- ... <- loss          then the layer's slice of the gradient is final

Losses and gradients are sums over the rows of a batch, not means: a batch cut into parts of any size, also empty ones,
gives the same sums.

`Weights` provides each layer's tensors: `FlatWeights` from flat vectors; others may gather them layer by layer
(hpcdl/parallel/sharded_weights.py).
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
from hpcdl.models.model import ROWS
from hpcdl.models.pool import Pool
from hpcdl.random import Random


class Weights(Protocol):
    """Provides the layers' tensors and the places of their gradients."""

    def open(self, i: int, following: int | None) -> tuple:
        """Return the tensors of layer i, for forward or backward; `following`: the layer opened next."""

    def close(self, i: int) -> None:
        """End the use of layer i in forward."""

    def gradient(self, i: int) -> tuple:
        """Return the arrays to which backward of layer i adds the gradient."""

    def ready(self, i: int) -> None:
        """End the use of layer i in backward: its gradient is final."""

    def finish(self) -> None:
        """End the pass: complete operations in flight, and release buffers."""


class FlatWeights:
    """Weights of a model with flat vectors of parameters and gradient."""

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
        """Return views of the parameters of layer i."""
        return self.w[i]

    def close(self, i: int) -> None:
        """No effect: parameters stay in memory."""

    def gradient(self, i: int) -> tuple[Array, ...]:
        """Return views of the gradient of layer i."""
        return self.g[i]

    def ready(self, i: int) -> None:
        """Report the final slice of layer i by `on_ready`."""
        part = self.slices[i]
        if self.on_ready and part:
            self.on_ready(part)

    def finish(self) -> None:
        """No effect: nothing is in flight."""


class Layered:
    """A chain of layers, the last of them the loss, with its tensors in one flat vector (`layout`, `size`, `dtype`).

    It computes on its pool's `device`, where all its arrays must lie. group: the ranks that share its layers.
    sequences: True if it supports sequence parallelism.
    """

    sequences = False
    rows_at_once = ROWS
    initial_values: Callable[[Random], dict[str, np.ndarray]] | None = None  # if all are drawn or read together

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
        """Return each layer's tensors as views of a flat vector."""
        return [tuple([tensor.view(vector) for tensor in tensors]) for tensors in self.tensors]

    def initialize(self, random: Random) -> Array:
        """Return a new parameter vector; each tensor's values depend only on the seed and its name.

        They are drawn on the host, so that all devices get the same bits.
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
        Raises UsageError if an array does not fit the model or a label is not a class.
        """
        self.check_arrays(batch.x, batch.y, parameters, gradient)
        return self.forward_backward(FlatWeights(self, parameters, gradient, on_ready), batch)

    def evaluate(self, parameters: Array, batch: Any) -> tuple[float, float]:
        """Return (sum of losses, number of correct rows); for regression (sum of losses, sum of squared errors)."""
        self.check_arrays(batch.x, batch.y, parameters)
        return self.score(FlatWeights(self, parameters), batch)

    def predict(self, parameters: Array, x: Array) -> Array:
        """Return the predictions for x (rows, features): class probabilities, probability of class 1, or values."""
        self.check_arrays(x, None, parameters)
        z, tape = self.forward(FlatWeights(self, parameters), x, range(len(self.layers) - 1), keep=False)
        prediction = self.layers[-1].predict(self.last_rows(z))
        self.release(tape)
        return prediction

    # -- the same with any `Weights` ----------------------------------------------------------------------------------

    def forward_backward(self, weights: Weights, batch: Any) -> float:
        """Run forward and backward through all layers; return the sum of losses."""
        layers = range(len(self.layers))
        (loss, _), tape = self.forward(weights, batch.x, layers, self.targets(batch), batch=batch)
        self.backward(weights, tape, None, layers)
        return loss

    def score(self, weights: Weights, batch: Any) -> tuple[float, float]:
        """Return (sum of losses, score) of one forward pass that saves nothing."""
        layers = range(len(self.layers))
        result, tape = self.forward(weights, batch.x, layers, self.targets(batch), keep=False, batch=batch)
        self.release(tape)
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
        """Return the output of the last of `layers` for x, and a list of (layer, saved data for backward).

        If the loss is among them, the output is (sum of losses, score). keep: False releases all saved data that the
        output does not need. batch: the batch of x, for layers with `takes_batch`.
        """
        tape: list[tuple[Any, Any]] = []
        for i in layers:
            layer = self.layers[i]
            w = weights.open(i, i + 1 if i + 1 < layers.stop else None)
            more: tuple = (targets,) if isinstance(layer, Loss) else ()
            if layer.takes_batch:
                more += batch, keep
            x, saved = layer.forward(w, x, self.group, *more)
            weights.close(i)
            if not keep:
                self.release(tape)
                tape = []
            tape.append((layer, saved))
        return x, tape

    def backward(self, weights: Weights, tape: list[tuple[Any, Any]], dy: Array | None, layers: range) -> Array | None:
        """Return the gradient by the input of `layers`, from dy by their output (None for the loss).

        It consumes tape and dy. The result is None if the first layer is that of the model.
        """
        for i in reversed(layers):
            layer, saved = tape.pop()
            w = weights.open(i, i - 1 if i > layers.start else None)
            dx = layer.backward(w, saved, dy, weights.gradient(i), self.group)
            if dy is not None:
                self.pool.give(dy)
            dy = dx
            weights.ready(i)
        return dy

    def release(self, tape: list[tuple[Any, Any]]) -> None:
        """Release the saved data of the layers."""
        for layer, saved in tape:
            layer.release(saved)

    def targets(self, batch: Any) -> Array:
        """Return the targets of the loss."""
        return batch.y

    def last_rows(self, z: Array) -> Array:
        """Return the rows of the loss's input that predictions use."""
        return z

    def check_arrays(self, x: Array, y: Array | None, *vectors: Array) -> None:
        """Raise UsageError if an array does not fit the model: compiled loops do not check bounds."""
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
    """Return the initial values of a layer's tensors by layout name, on the host; of a cut layer the full tensors."""
    names = [f"{layer.name}.{name}" for name in layer.full_shapes]
    values = [CPU.empty(shape, dtype) for shape in layer.full_shapes.values()]
    if names:
        layer.initialize(values, [random("initialize", name) for name in names])
    return dict(zip(names, values, strict=True))
