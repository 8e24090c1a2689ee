"""Optimizers and learning-rate schedules on flat vectors, independent of MPI.

sgd    momentum:beta=0.9    nesterov:beta=0.9    adam:beta1=0.9,beta2=0.999,eps=1e-8    adamw:...    adagrad:eps=1e-10

torch:NAME takes a rule of torch.optim, as in torch:AdamW,betas=(0.9,0.95) (hpcdl/torch/optimizer.py).
"""

import importlib
from collections.abc import Callable
from typing import Any, cast

from numpy.typing import DTypeLike

from hpcdl.errors import parse_spec
from hpcdl.kernels.device import CPU, Device
from hpcdl.optim.adagrad import Adagrad
from hpcdl.optim.adam import Adam, AdamW
from hpcdl.optim.optimizer import Optimizer
from hpcdl.optim.schedules import make_schedule
from hpcdl.optim.sgd import SGD, Momentum, Nesterov
from hpcdl.plugins import of_torch

__all__ = ["Optimizer", "make_optimizer", "make_schedule", "vectors_of"]

ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
BETA = {"beta": 0.9}
SETTINGS: dict[str, dict[str, float]] = {"sgd": {}, "momentum": BETA, "nesterov": BETA, "adam": ADAM, "adamw": ADAM}
SETTINGS["adagrad"] = {"eps": 1e-10}
OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "nesterov": Nesterov,
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": Adagrad,
}


def make_optimizer(
    spec: str,
    size: int,
    dtype: DTypeLike,
    schedule: Callable[[int], float],
    weight_decay: float = 0.0,
    clip_norm: float = 0.0,
    device: Device = CPU,
    average_from: int | None = None,
) -> Optimizer:
    """Return the optimizer `spec` for a vector of `size` elements of `dtype`.

    schedule: step -> learning rate (make_schedule). weight_decay: weight_decay w is added to the mean gradient; adamw
    subtracts rate weight_decay w from w instead. clip_norm: largest 2-norm of the mean gradient, 0 for none. device:
    where the vectors lie (hpcdl.kernels.device). average_from: see `Optimizer`. Raises UsageError for an unknown name
    or setting and for a value out of range.
    """
    if of_torch(spec):
        made = torch_optimizers().TorchOptimizer(
            spec, size, dtype, schedule, weight_decay, clip_norm, device, average_from
        )
        return cast(Optimizer, made)
    name, settings = parse_spec("optimizer", spec, SETTINGS)
    return OPTIMIZERS[name](size, dtype, schedule, weight_decay, clip_norm, device, average_from, **settings)


def vectors_of(spec: str) -> tuple[str, ...]:
    """Return the names of the state vectors, of the parameters' length, of the optimizer `spec`."""
    if of_torch(spec):
        return cast(tuple[str, ...], torch_optimizers().vectors_of(spec))
    return OPTIMIZERS[parse_spec("optimizer", spec, SETTINGS)[0]].vectors


def torch_optimizers() -> Any:
    """Import the module of PyTorch's optimizers by name: it is in an upper room, and imports PyTorch."""
    return importlib.import_module("hpcdl.torch.optimizer")
