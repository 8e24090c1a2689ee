"""Optimizers and learning-rate schedules on flat vectors; they know nothing of MPI.

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
    """The optimizer that `spec` names, for a vector of `size` elements of `dtype`.

    schedule: step -> learning rate (make_schedule). weight_decay: its product with w is added to the mean gradient, in
    adamw the rate times it is taken off w itself. clip_norm: largest 2-norm of the mean gradient, 0 for none. device:
    where the vectors lie (hpcdl.kernels.device). average_from: see `Optimizer`.
    Raises UsageError for an unknown name or setting and for a value out of its range.
    """
    if of_torch(spec):
        made = torch_optimizers().TorchOptimizer(
            spec, size, dtype, schedule, weight_decay, clip_norm, device, average_from
        )
        return cast(Optimizer, made)
    name, settings = parse_spec("optimizer", spec, SETTINGS)
    return OPTIMIZERS[name](size, dtype, schedule, weight_decay, clip_norm, device, average_from, **settings)


def vectors_of(spec: str) -> tuple[str, ...]:
    """The names of the vectors, each as long as the parameters, that the optimizer has which `spec` names."""
    if of_torch(spec):
        return cast(tuple[str, ...], torch_optimizers().vectors_of(spec))
    return OPTIMIZERS[parse_spec("optimizer", spec, SETTINGS)[0]].vectors


def torch_optimizers() -> Any:
    """The module that makes them, by its name: it lies in a room above, and imports PyTorch."""
    return importlib.import_module("hpcdl.torch.optimizer")
