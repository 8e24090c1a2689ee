"""The interface of a model, and the abilities that a model may have beyond the interface.

Every strategy trains a `Model`. A strategy that needs more, such as layers to cut, reads the model's `Abilities`; no
other code reads a model's optional members. A user's class need not derive from `Model`, nor declare `abilities`."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.models.layout import Layout
from hpcdl.random import Random

Wrapper = TypeVar("Wrapper", bound="ModelWrapper")
OnReady: TypeAlias = Callable[[slice], object] | None  # called with each final slice of a gradient
ROWS = 1024  # rows scored at once: bounds the memory that evaluation needs


class Model(Protocol):
    """Computes losses, and gradients as flat vectors, independent of MPI; layered.py explains the arguments."""

    layout: Layout

    def initialize(self, random: Random) -> Array:
        """Return a new parameter vector, the same for the same seed."""

    def loss_and_gradient(self, parameters: Array, batch: Any, gradient: Array, on_ready: OnReady = None) -> float:
        """Add the gradient of the batch's losses, summed over its rows, to `gradient`; return the sum of the losses."""

    def predict(self, parameters: Array, x: Array) -> Array:
        """Return the predictions for rows x."""


@dataclasses.dataclass(frozen=True)
class Abilities:
    """The abilities of a model beyond the interface.

    device        where it computes, and where its parameters, gradients and batches lie
    sparse        True if it takes sparse batches (hpcdl/csr.py)
    rows_at_once  number of rows that are scored together
    evaluate      True if `evaluate` scores a batch in one forward pass
    generate      True if `generate` writes text
    layers        True if it has `layers`: a list, or None for a PyTorch module that is no chain of layers
    pool          True if the model's activations lie in its `pool`, which counts their bytes
    buffers       True if `extra` maps names to arrays beside the parameters; ranks average those named in `averaged`
    module        True if it is a PyTorch module (hpcdl/torch/model.py)"""

    device: Device = CPU
    sparse: bool = False
    rows_at_once: int = ROWS
    evaluate: bool = False
    generate: bool = False
    layers: bool = False
    pool: bool = False
    buffers: bool = False
    module: bool = False


VALUES = ("device", "sparse", "rows_at_once")  # abilities that are members of the model themselves
MEMBERS = {"evaluate": "evaluate", "generate": "generate", "layers": "layers", "pool": "pool", "buffers": "extra"}


def abilities_of(model: Any) -> Abilities:
    """Return a model's member `abilities`, or else the abilities that its other members show."""
    declared = getattr(model, "abilities", None)
    if isinstance(declared, Abilities):
        return declared
    shown: dict[str, Any] = {ability: hasattr(model, member) for ability, member in MEMBERS.items()}
    return Abilities(**shown | {name: getattr(model, name) for name in VALUES if hasattr(model, name)})


def count(predicted: np.ndarray, y: np.ndarray, classes: int) -> float:
    """Return how many rows are predicted correctly; if `classes` is 0 (regression), the sum of squared errors."""
    if not classes:
        return float(np.square(predicted.reshape(y.shape) - y, dtype=np.float64).sum())
    answers = predicted.argmax(axis=1) if predicted.ndim == 2 else predicted > 0.5
    return int((answers == y).sum())


def layers_of(model: Any) -> list[Any] | None:
    """Return the layers of a model, the loss last; None for a model that is not made of layers."""
    return unwrapped(model).layers if abilities_of(model).layers else None


def name_of(model: Any) -> str:
    """Return the spec that makes the model (`make_model`), or the name of its class if the model has no spec."""
    kind = type(model)
    return getattr(model, "spec", "") or f"{kind.__module__}:{kind.__qualname__}"


class ModelWrapper:
    """Base of wrappers, which change one behaviour of `model` and delegate all other members to it."""

    def __init__(self, model: Any):
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def wrapper_of(model: Any, kind: type[Wrapper]) -> Wrapper | None:
    """Return the model's outermost wrapper of the class `kind`; None if it has no such wrapper."""
    while isinstance(model, ModelWrapper):
        if isinstance(model, kind):
            return model
        model = model.model
    return None


def unwrapped(model: Any) -> Any:
    """Return the model within all its wrappers."""
    while isinstance(model, ModelWrapper):
        model = model.model
    return model
