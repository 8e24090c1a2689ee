"""The values of actions, Q(s, a), as a model over a flat vector: one value for each action from one pass over s.

    mlp:128,128             s -> relu(128) -> relu(128) -> Q(s, .)
    mlp:128,128,dueling     s -> relu(128) -> relu(128) -> V(s)    \\
                                           -> relu(128) -> A(s, .) /  Q(s, a) = V(s) + A(s, a) - mean_b A(s, b)
    torch:nets:atari        a module of PyTorch's with one output for each action, as a classifier has for its classes

The loss of a row is weight * l(Q(s, a) - target), of the action that was taken alone; l is half the square, or Huber's,
which is linear beyond delta, so that a gradient by Q is delta at most. (Mnih et al., "Human-level control through deep
reinforcement learning", Nature 2015; Wang et al., "Dueling network architectures", ICML 2016, with a stream of its own
for V and for A: both as wide as the last layer that is named.)
"""

import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError, parse_spec, refuse_beyond
from hpcdl.kernels import td
from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.memory import available
from hpcdl.models import DTYPES, parse_model
from hpcdl.models.group import LayerGroup
from hpcdl.models.layered import FlatWeights, Layered
from hpcdl.models.layers import Dense, Layer, dense_layers
from hpcdl.models.losses import LOSSES, Loss
from hpcdl.models.pool import Pool
from hpcdl.plugins import of_torch
from hpcdl.random import Random

DUELING = "dueling"
ROWS = 1024  # observations whose values are computed at once


@dataclass
class QBatch:
    """What is learned from: x (rows, ...) observations, of each the action that was taken, its target and weight.

    After `QNetwork.loss_and_gradient`, errors (rows,) holds |Q(s, a) - target|. total: the rows of all ranks. step: of
    the learner, whose draws dropout follows.
    """

    epoch = 0

    x: Array
    actions: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    total: int
    errors: np.ndarray = field(default_factory=lambda: np.zeros(0))
    step: int = 0

    @property
    def index(self) -> np.ndarray:
        """The numbers of the rows."""
        return np.arange(len(self.targets))

    @property
    def y(self) -> np.ndarray:
        """The targets, as other batches call what their rows are compared with."""
        return self.targets


class QNetwork:
    """The model of action values that `spec` names, of `actions` actions (`layout`, `size`, `dtype`, `device`).

    shape: of an observation; dtype: of the parameters. Observations of type uint8 are scaled by 1/255. loss: squared
    or huber:delta=1. Raises UsageError, one line.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        actions: int,
        spec: str,
        dtype: DTypeLike = "float32",
        device: Device = CPU,
        loss: str = "huber",
    ):
        self.shape, self.actions, self.spec, self.device = tuple(shape), actions, spec, device
        kind = np.dtype(dtype).name
        if kind not in DTYPES:
            raise UsageError(f"dtype {kind!r}: parameters are float32 or float64")
        delta = delta_of(loss)
        made = torch_values if of_torch(spec) else dense_values
        self.model: Any = made(spec, self.shape, actions, kind, device, delta)
        self.layout, self.size, self.dtype = self.model.layout, self.model.layout.size, self.model.layout.dtype
        if hasattr(self.model, "pool"):
            self.pool = self.model.pool

    def initialize(self, random: Random) -> Array:
        """A new parameter vector; each tensor's values depend on the seed and its name."""
        return self.model.initialize(random)

    def input(self, observations: np.ndarray) -> Array:
        """Observations (rows, *shape) as the model takes them, on its device: pixels from 0 to 1."""
        x = observations.astype(self.dtype)
        if observations.dtype == np.uint8:
            x /= 255
        return self.device.array(np.ascontiguousarray(x.reshape(self.model.rows(len(x)))))

    def values(self, parameters: Array, observations: np.ndarray) -> np.ndarray:
        """Q (rows, actions), on the host, of observations (rows, *shape)."""
        parts = [
            self.device.host(self.model.values(parameters, self.input(observations[start : start + ROWS])))
            for start in range(0, max(1, len(observations)), ROWS)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def loss_and_gradient(
        self, parameters: Array, batch: QBatch, gradient: Array, on_ready: Callable[[slice], None] | None = None
    ) -> float:
        """Add the gradient of the sum of losses to `gradient`, and fill in batch.errors; returns the sum of losses.

        batch.x: observations as they are. Zero rows are allowed.
        """
        ready = QBatch(
            self.input(batch.x),
            batch.actions,
            np.ascontiguousarray(batch.targets, self.dtype),
            np.ascontiguousarray(batch.weights, self.dtype),
            batch.total,
            step=batch.step,
        )
        loss = self.model.loss_and_gradient(parameters, ready, gradient, on_ready)
        batch.errors = ready.errors
        return loss


def delta_of(loss: str) -> float:
    """From where on the loss is linear; infinite where it is half the square. Raises UsageError."""
    _, settings = parse_spec("loss", loss, LOSSES)
    delta = settings.get("delta", math.inf)
    if not delta > 0:
        raise UsageError(f"loss {loss!r}: delta must be a number greater than 0")
    return delta


# -- of dense layers -------------------------------------------------------------------------------------------------


class ChosenAction(Loss):
    """The loss of the action that was taken; predicts Q itself."""

    def __init__(self, pool: Pool, delta: float):
        super().__init__(pool)
        self.target, self.delta = pool.dtype, delta
        td.ready(pool.dtype)

    def forward(self, w: Sequence[Array], z: Array, group: LayerGroup, y: Any) -> tuple[tuple[float, float], Array]:
        """(sum of losses, sum of squared errors) and what backward needs; y: the batch."""
        device, dz = self.pool.device, self.pool.take(*z.shape)
        q, slopes = device.host(z), device.host(dz)
        total, y.errors = td.errors(q, y.actions, y.targets, y.weights, self.delta, slopes)
        if slopes is not dz:
            device.copy_in(dz, slopes)
        return (total, float(np.square(y.errors).sum())), dz

    def predict(self, z: Array) -> Array:
        """A copy of z."""
        return z.copy()


class Dueling(Layer):
    """Q = V + A - mean A, of a layer whose first half is the stream of V and whose second half is that of A."""

    def __init__(self, name: str, inputs: int, actions: int, pool: Pool):
        width = inputs // 2
        shapes = {"value": (width, 1), "value_bias": (1,), "advantage": (width, actions), "advantage_bias": (actions,)}
        super().__init__(name, pool, dict(shapes))
        self.width, self.actions = width, actions

    def output_shape(self, rows: int, group: LayerGroup) -> tuple[int, int]:
        """The shape of Q for so many observations."""
        return rows, self.actions

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        """Variance 1 / width, biases zero."""
        for tensor, random in zip(w, generators, strict=True):
            tensor[...] = random.standard_normal(tensor.shape) / math.sqrt(self.width) if tensor.ndim == 2 else 0

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        """Q and what backward needs."""
        value, value_bias, advantage, advantage_bias = w
        y = self.pool.take(len(x), self.actions)
        self.matmul(x[:, self.width :], advantage, out=y)
        y += advantage_bias
        y -= y.mean(axis=1, keepdims=True)
        y += x[:, : self.width] @ value + value_bias
        return y, (x, y)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Array:
        """dx; the gradients by the tensors are added to g."""
        x, _ = saved
        of_value = dy.sum(axis=1, keepdims=True)
        of_advantage = dy - of_value / self.actions
        g[0][...] += x[:, : self.width].T @ of_value
        g[1][...] += of_value.sum(axis=0)
        g[2][...] += x[:, self.width :].T @ of_advantage
        g[3][...] += of_advantage.sum(axis=0)
        dx = self.pool.take(*x.shape)
        self.matmul(of_value, w[0].T, out=dx[:, : self.width])
        self.matmul(of_advantage, w[2].T, out=dx[:, self.width :])
        self.release(saved)
        return dx

    def release(self, saved: Any) -> None:
        """Give back what forward took."""
        self.pool.give(saved[1])


class DenseValues(Layered):
    """Dense layers with the values of actions at their end."""

    def rows(self, count: int) -> tuple[int, ...]:
        """The shape of so many observations as the first layer takes them."""
        return count, self.features

    def check_arrays(self, x: Array, y: Array | None, *vectors: Array) -> None:
        """Of observations and vectors: the targets stay on the host, with what else the loss takes."""
        super().check_arrays(x, None, *vectors)

    def targets(self, batch: Any) -> Any:
        """The loss takes the batch: an action and a weight belong to each target."""
        return batch

    def values(self, parameters: Array, x: Array) -> Array:
        """Q (rows, actions)."""
        layers = range(len(self.layers) - 1)
        z, kept = self.forward(FlatWeights(self, parameters), x, layers, keep=False)
        found = z.copy()
        self.release(kept)
        return found


def dense_values(
    spec: str, shape: tuple[int, ...], actions: int, dtype: str, device: Device, delta: float
) -> DenseValues:
    """The network mlp:WIDTHS, or mlp:WIDTHS,dueling, for observations of this shape."""
    name, _, rest = spec.partition(":")
    items = rest.split(",")
    dueling = DUELING in items
    plain = ",".join(item for item in items if item != DUELING)
    if name != "mlp":
        raise UsageError(
            f"--model {spec}: action values are those of mlp:128,128 or mlp:128,128,dueling, or of torch:..."
        )
    _, hidden, settings = parse_model(f"{name}:{plain}")
    pool, features, activation = Pool(dtype, device), math.prod(shape), settings["activation"]
    widths = [features, *hidden, actions]
    if dueling:
        widths[-2:] = [2 * hidden[-1]]
    size = sum(a * b for a, b in itertools.pairwise(widths)) * pool.dtype.itemsize
    refuse_beyond(f"--model {spec}, for observations of {features:,} numbers,", size, available())
    layers: list[Any] = dense_layers(widths, activation, pool)
    if dueling:
        last = layers[-1]
        inputs, outputs = last.whole["weight"]
        layers[-1] = Dense(last.name, inputs, outputs, activation, pool, first=last.first, by="columns")
        layers.append(Dueling(DUELING, widths[-1], actions, pool))
    return DenseValues(features, [*layers, ChosenAction(pool, delta)], pool)


# -- of PyTorch ------------------------------------------------------------------------------------------------------


def torch_values(spec: str, shape: tuple[int, ...], actions: int, dtype: str, device: Device, delta: float) -> Any:
    """The module that torch:package.module:function makes, whose outputs are the values of actions."""
    offered = {"features": shape, "classes": actions, "outputs": (), "dtype": dtype, "device": device}
    # By its name: PyTorch is imported by nobody who does not ask for it.
    model = importlib.import_module("hpcdl.torch.module_factory").make_torch_model(spec, offered)
    return importlib.import_module("hpcdl.rl.torch_values").TorchValues(model, shape, actions, delta)
