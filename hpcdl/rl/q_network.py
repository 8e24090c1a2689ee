"""Action values Q(s, a) as a model over a flat vector: one pass over s gives a value for each action.

    mlp:128,128             s -> relu(128) -> relu(128) -> Q(s, .)
    mlp:128,128,dueling     s -> relu(128) -> relu(128) -> V(s)    \\
                                           -> relu(128) -> A(s, .) /  Q(s, a) = V(s) + A(s, a) - mean_b A(s, b)
    torch:nets:atari        a PyTorch module with one output for each action, as a classifier has for its classes

The loss of a row is weight * l(Q(s, a) - target), for the action taken only; l is half the square, or Huber's, which is
linear beyond delta, so that its derivative by Q is at most delta. (Mnih et al., "Human-level control through deep
reinforcement learning", Nature 2015; Wang et al., "Dueling network architectures", ICML 2016, with a separate stream
for V and for A, both as wide as the last layer that is named.)"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hpcdl.errors import UsageError, parse_spec, refuse_beyond
from hpcdl.kernels import td
from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.memory import available
from hpcdl.models import DTYPES, parse_model
from hpcdl.models.group import LayerGroup
from hpcdl.models.layered import FlatWeights, Layered
from hpcdl.models.layers import Dense, Layer, dense_layers
from hpcdl.models.losses import LOSSES, Loss
from hpcdl.models.model import OnReady, abilities_of
from hpcdl.models.pool import Pool
from hpcdl.plugins import of_torch
from hpcdl.random import Random

DUELING = "dueling"
ROWS = 1024  # observations per forward pass


@dataclass
class QBatch:
    """A batch: observations x (rows, *shape); by row the action taken, the target of its value, and its weight.
    errors (rows,): |Q(s, a) - target|, set by `loss_and_gradient`. total: rows of all ranks. step: a key of dropout."""

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
        return np.arange(len(self.targets))

    @property
    def y(self) -> np.ndarray:
        return self.targets


class QNetwork:
    """The model `spec`, with a value for each of `actions` actions. UsageError for an invalid argument.
    shape: of an observation; uint8 is scaled by 1/255. dtype: of the parameters. loss: squared or huber:delta=1."""

    def __init__(
        self, shape: tuple, actions: int, spec: str, dtype: Any = "float32", device: Device = CPU, loss: str = "huber"
    ):
        self.shape, self.actions, self.spec, self.device = tuple(shape), actions, spec, device
        kind = np.dtype(dtype).name
        if kind not in DTYPES:
            raise UsageError(f"dtype {kind!r}: parameters are float32 or float64")
        delta = delta_of(loss)
        self.model: Any
        if of_torch(spec):
            from hpcdl.rl.torch_values import torch_values  # here: PyTorch is loaded on demand only

            self.model = torch_values(spec, self.shape, actions, kind, device, delta)
        else:
            self.model = dense_values(spec, self.shape, actions, kind, device, delta)
        self.row = self.shape if of_torch(spec) else (self.model.features,)  # its shape, as the model takes it
        self.layout, self.size, self.dtype = self.model.layout, self.model.layout.size, self.model.layout.dtype
        if abilities_of(self.model).pool:
            self.pool = self.model.pool

    def initialize(self, random: Random) -> Array:
        return self.model.initialize(random)

    def input(self, observations: np.ndarray) -> Array:
        """Return observations (rows, *shape) as the model takes them, on its device; pixels are scaled to [0, 1]."""
        x = observations.astype(self.dtype)
        if observations.dtype == np.uint8:
            x /= 255
        return self.device.array(np.ascontiguousarray(x.reshape(len(x), *self.row)))

    def values(self, parameters: Array, observations: np.ndarray) -> np.ndarray:
        """Return Q (rows, actions), on the host, for observations (rows, *shape)."""
        parts = [
            self.device.host(self.model.values(parameters, self.input(observations[start : start + ROWS])))
            for start in range(0, max(1, len(observations)), ROWS)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def loss_and_gradient(self, parameters: Array, batch: QBatch, gradient: Array, on_ready: OnReady = None) -> float:
        """Add the gradient of the sum of losses to `gradient`, set batch.errors; return the sum.
        batch.x: unscaled observations; may have zero rows."""
        targets, weights = (np.ascontiguousarray(each, self.dtype) for each in (batch.targets, batch.weights))
        ready = replace(batch, x=self.input(batch.x), targets=targets, weights=weights)
        loss = self.model.loss_and_gradient(parameters, ready, gradient, on_ready)
        batch.errors = ready.errors
        return loss


def delta_of(loss: str) -> float:
    """Return the |error| from which the loss is linear; infinity for half the square. Raises UsageError."""
    _, settings = parse_spec("loss", loss, LOSSES)
    delta = settings.get("delta", math.inf)
    if not delta > 0:
        raise UsageError(f"loss {loss!r}: delta must be a number greater than 0")
    return delta


class ChosenAction(Loss):
    """The loss of the value of the action taken. `predict` returns Q itself."""

    def __init__(self, pool: Pool, delta: float):
        super().__init__(pool)
        self.target, self.delta = pool.dtype, delta
        td.ready(pool.dtype)

    def forward(
        self, w: Sequence[Array], z: Array, group: LayerGroup, y: Any, batch: Any = None, keep: bool = True
    ) -> tuple[tuple[float, float], Array]:
        """Return (sum of losses, sum of squared errors) and the saved values for backward; y: the batch."""
        device, dz = self.pool.device, self.pool.take(*z.shape)
        q, slopes = device.host(z), device.host(dz)
        total, y.errors = td.errors(q, y.actions, y.targets, y.weights, self.delta, slopes)
        if slopes is not dz:
            device.copy_in(dz, slopes)
        return (total, float(np.square(y.errors).sum())), dz

    def predict(self, z: Array) -> Array:
        return z.copy()


class Dueling(Layer):
    """Q = V + A - mean A, for an input whose first half is the stream of V and whose second half is that of A."""

    def __init__(self, name: str, inputs: int, actions: int, pool: Pool):
        width = inputs // 2
        shapes = {"value": (width, 1), "value_bias": (1,), "advantage": (width, actions), "advantage_bias": (actions,)}
        super().__init__(name, pool, dict(shapes))
        self.width, self.actions = width, actions

    def output_shape(self, rows: int, group: LayerGroup) -> tuple[int, int]:
        return rows, self.actions

    def initialize(self, w: Sequence[Array], generators: Sequence[np.random.Generator]) -> None:
        for tensor, random in zip(w, generators, strict=True):
            tensor[...] = random.standard_normal(tensor.shape) / math.sqrt(self.width) if tensor.ndim == 2 else 0

    def forward(self, w: Sequence[Array], x: Array, group: LayerGroup) -> tuple[Array, Any]:
        value, value_bias, advantage, advantage_bias = w
        y = self.pool.take(len(x), self.actions)
        self.matmul(x[:, self.width :], advantage, out=y)
        y += advantage_bias
        y -= y.mean(axis=1, keepdims=True)
        y += x[:, : self.width] @ value + value_bias
        return y, (x, y)

    def backward(self, w: Sequence[Array], saved: Any, dy: Array, g: Sequence[Array], group: LayerGroup) -> Array:
        x, _ = saved
        d_value = dy.sum(axis=1, keepdims=True)
        d_advantage = dy - d_value / self.actions
        g[0][...] += x[:, : self.width].T @ d_value
        g[1][...] += d_value.sum(axis=0)
        g[2][...] += x[:, self.width :].T @ d_advantage
        g[3][...] += d_advantage.sum(axis=0)
        dx = self.pool.take(*x.shape)
        self.matmul(d_value, w[0].T, out=dx[:, : self.width])
        self.matmul(d_advantage, w[2].T, out=dx[:, self.width :])
        self.release(saved)
        return dx

    def release(self, saved: Any) -> None:
        self.pool.give(saved[1])


class DenseValues(Layered):
    """Dense layers whose output is action values."""

    def check_arrays(self, x: Array, y: Array | None, *vectors: Array) -> None:
        """Check observations and vectors only: targets stay on the host."""
        super().check_arrays(x, None, *vectors)

    def targets(self, batch: Any) -> Any:
        """Return the batch: the loss also needs actions and weights."""
        return batch

    def values(self, parameters: Array, x: Array) -> Array:
        layers = range(len(self.layers) - 1)
        z, saved = self.forward(FlatWeights(self, parameters), x, layers, keep=False)
        values = z.copy()
        self.release(saved)
        return values


def dense_values(spec: str, shape: tuple, actions: int, dtype: str, device: Device, delta: float) -> DenseValues:
    """Return the network mlp:WIDTHS, or mlp:WIDTHS,dueling. UsageError for another spec, or a too large one."""
    name, _, rest = spec.partition(":")
    items = rest.split(",")
    dueling = DUELING in items
    plain = ",".join(item for item in items if item != DUELING)
    if name != "mlp":
        raise UsageError(
            f"--model {spec}: action values need mlp:128,128, mlp:128,128,dueling or torch:package.module:function"
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
        inputs, outputs = last.full_shapes["weight"]
        layers[-1] = Dense(last.name, inputs, outputs, activation, pool, first=last.first, by="columns")
        layers.append(Dueling(DUELING, widths[-1], actions, pool))
    return DenseValues(features, [*layers, ChosenAction(pool, delta)], pool)
