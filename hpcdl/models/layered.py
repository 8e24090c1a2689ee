"""A model that is a chain of layers with a loss at its end.

    forward     x -> layer 1 -> layer 2 -> ... -> loss          each saves data for its backward
    backward    x <- layer 1 <- layer 2 <- ... <- loss          then the layer's slice of the gradient is final

The products that are the gradients of weights can be left for later: backward then returns dx early, and
`weight_gradients` computes them. All else, as gradients of biases and norms, is small, and backward does it.

Losses and gradients are sums over the rows of a batch, not means: a batch cut into parts of any size, also empty ones,
gives the same sums. hpcdl/parallel/sharded_weights.py has `Weights` that gather tensors layer by layer."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.csr import CSR
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Array, device_of
from hpcdl.models.group import IdentityGroup, LayerGroup
from hpcdl.models.layout import Layout
from hpcdl.models.losses import Loss
from hpcdl.models.model import ROWS, OnReady
from hpcdl.models.pool import Pool
from hpcdl.random import Random


class Weights(Protocol):
    """Provides the tensors of each layer, and the arrays for their gradients."""

    def open(self, i: int, following: int | None) -> tuple:
        """Return the tensors of layer i, for forward or backward. following: the next layer; None: i is last."""

    def close(self, i: int) -> None:
        """End the use of layer i in forward."""

    def gradient(self, i: int) -> tuple:
        """Return the arrays to which backward of layer i adds the gradient."""

    def ready(self, i: int) -> None:
        """End the use of layer i in backward: its gradient is final."""

    def reduce(self, i: int) -> None:
        """End the use of the gradient of layer i, which is final. `ready` is `close` and `reduce`."""

    def finish(self) -> None:
        """End the pass: complete operations in flight, and release buffers."""


class FlatWeights:
    """Weights of a model in flat vectors; on_ready is called with each slice of the gradient that is final."""

    def __init__(self, model: "Layered", parameters: Array, gradient: Array | None = None, on_ready: OnReady = None):
        self.parameters, self.slices, self.on_ready = parameters, model.slices, on_ready
        self.w = model.views(parameters)
        self.g = [] if gradient is None else model.views(gradient)

    def open(self, i: int, following: int | None) -> tuple[Array, ...]:
        return self.w[i]

    def close(self, i: int) -> None:
        """No effect."""

    def gradient(self, i: int) -> tuple[Array, ...]:
        return self.g[i]

    def ready(self, i: int) -> None:
        part = self.slices[i]
        if self.on_ready and part:
            self.on_ready(part)

    def reduce(self, i: int) -> None:
        """No effect."""

    def finish(self) -> None:
        """No effect."""


class Layered:
    """A chain of layers, the last of them the loss, with its tensors in one flat vector (`layout`, `size`, `dtype`).
    Arrays lie on the pool's `device`. group: ranks that share layers. sequences: True if sequence parallelism works."""

    sequences = False
    rows_at_once = ROWS
    initial_values: Callable[[Random], dict[str, np.ndarray]] | None = None  # of all tensors; None: each layer draws

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
        The values are drawn on the host, so that all devices get the same bits."""
        parameters = CPU.empty(self.size, self.dtype)
        for where, values in self.initial(random):
            parameters[where] = values
        return self.device.array(parameters)

    def initial(self, random: Random) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield, for each tensor, (its slice of the vector, its initial values, flat); one layer is made at a time."""
        for layer in self.layers:
            for name, values in initial(layer, random, self.dtype).items():
                yield self.layout.tensors[name].slice, values.reshape(-1)

    def loss_and_gradient(self, parameters: Array, batch: Any, gradient: Array, on_ready: OnReady = None) -> float:
        """Add the gradient of the batch's losses, summed over its rows, to `gradient`; return the sum of the losses.
        parameters, gradient: (size,) in the model's type. batch: x (rows, features) in the model's type, or sparse
        (CSR) if the first layer is `Dense`; y (rows,) or (rows, outputs); rows may be 0. on_ready(slice): called when
        that slice of the gradient is final, last layer first. Raises UsageError for unfit arrays and invalid labels."""
        self.check_arrays(batch.x, batch.y, parameters, gradient)
        return self.forward_backward(FlatWeights(self, parameters, gradient, on_ready), batch)

    def evaluate(self, parameters: Array, batch: Any) -> tuple[float, float]:
        """Return (sum of losses, number of correct rows); for regression (sum of losses, sum of squared errors)."""
        self.check_arrays(batch.x, batch.y, parameters)
        return self.score(FlatWeights(self, parameters), batch)

    def predict(self, parameters: Array, x: Array) -> Array:
        """Return the predictions for x (rows, features): probabilities of classes or of class 1, classes, or values."""
        self.check_arrays(x, None, parameters)
        z, tape = self.forward(FlatWeights(self, parameters), x, range(len(self.layers) - 1), keep=False)
        prediction = self.layers[-1].predict(self.last_rows(z))
        self.release(tape)
        return prediction

    def forward_backward(self, weights: Weights, batch: Any) -> float:
        """Run forward and backward through all layers; return the sum of losses."""
        layers = range(len(self.layers))
        (loss, _), tape = self.forward(weights, self.inputs(batch), layers, self.targets(batch), batch=batch)
        self.backward(weights, tape, None, layers)
        return loss

    def score(self, weights: Weights, batch: Any) -> tuple[float, float]:
        """Return (sum of losses, score) by one forward pass, which keeps no data for backward."""
        layers = range(len(self.layers))
        result, tape = self.forward(weights, self.inputs(batch), layers, self.targets(batch), keep=False, batch=batch)
        self.release(tape)
        return result

    def forward(
        self, weights: Weights, x: Any, layers: range, targets: Any = None, keep: bool = True, batch: Any = None
    ) -> tuple[Any, list[tuple[Any, Any]]]:
        """Return the output of the last of `layers` for x, and a list of (layer, saved data for backward). The loss's
        output is (sum of losses, score). keep=False: list the last layer alone. batch: for `takes_batch` layers."""
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

    def backward(
        self,
        weights: Weights,
        tape: list[tuple[Any, Any]],
        dy: Array | None,
        layers: range,
        left: list[tuple[int, list]] | None = None,
    ) -> Array | None:
        """Return dx, the gradient by the input of `layers`, from dy, the gradient by their output; consume tape and dy.
        dy is None if the last of `layers` is the loss; dx is None if the first is the model's first layer. left: takes
        what is left of each layer for `weight_gradients`; None: nothing is."""
        for i in reversed(layers):
            layer, saved = tape.pop()
            w = weights.open(i, i - 1 if i > layers.start else None)
            products: list | None = None if left is None else []
            with self.pool.leaving(products):
                dx = layer.backward(w, saved, dy, weights.gradient(i), self.group)
            if dy is not None:
                self.pool.give(dy)
            dy = dx
            if left is None or products is None:
                weights.ready(i)
            else:
                weights.close(i)
                left.append((i, products))
        return dy

    def weight_gradients(self, weights: Weights, left: list[tuple[int, list]]) -> None:
        """Compute the gradients that `backward` has left, and end the use of the gradient of each layer."""
        for i, products in left:
            for layer, a, b, into in products:
                layer.add_product(a, b, into)
                self.pool.unpin(a)
                self.pool.unpin(b)
            weights.reduce(i)

    def release(self, tape: list[tuple[Any, Any]]) -> None:
        for layer, saved in tape:
            layer.release(saved)

    def inputs(self, batch: Any) -> Any:
        """Return the input of the first layer."""
        return batch.x

    def targets(self, batch: Any) -> Array:
        """Return the targets of the rows of the loss."""
        return batch.y

    def last_rows(self, z: Array) -> Array:
        """Return the rows of z, the loss's input, from which predictions are made."""
        return z

    def check_arrays(self, x: Array, y: Array | None, *vectors: Array) -> None:
        """Raise UsageError if an array does not fit the model, as compiled loops do not check bounds."""
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
    """Return the initial values of a layer's full tensors, by layout name, on the host; `layer` itself may be cut."""
    names = [f"{layer.name}.{name}" for name in layer.full_shapes]
    values = [CPU.empty(shape, dtype) for shape in layer.full_shapes.values()]
    if names:
        layer.initialize(values, [random("initialize", name) for name in names])
    return dict(zip(names, values, strict=True))
