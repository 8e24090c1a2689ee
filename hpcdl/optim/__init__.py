"""Optimizers and learning-rate schedules on flat vectors, independent of MPI.

sgd   momentum:beta=0.9   nesterov:beta=0.9   adam:beta1=0.9,beta2=0.999,eps=1e-8   adamw:...   adagrad:eps=1e-10
torch:NAME    a rule of torch.optim, as in torch:AdamW,betas=(0.9,0.95) (hpcdl/torch/optimizer.py)"""

import importlib
from collections.abc import Callable
from typing import Any, cast

from numpy.typing import DTypeLike

from hpcdl.errors import UsageError, parse_spec
from hpcdl.kernels.device import CPU, Device
from hpcdl.optim.adagrad import Adagrad
from hpcdl.optim.adam import Adam, AdamW
from hpcdl.optim.optimizer import Optimizer
from hpcdl.optim.schedules import make_schedule
from hpcdl.optim.sgd import SGD, Momentum, Nesterov
from hpcdl.plugins import of_torch

__all__ = ["Optimizer", "make_optimizer", "make_schedule", "vectors_of"]

ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
RULES: dict[str, tuple[type[Optimizer], dict[str, float]]] = {
    "sgd": (SGD, {}),
    "momentum": (Momentum, {"beta": 0.9}),
    "nesterov": (Nesterov, {"beta": 0.9}),
    "adam": (Adam, ADAM),
    "adamw": (AdamW, ADAM),
    "adagrad": (Adagrad, {"eps": 1e-10}),
}
TORCH_RULES = {name.lower(): name for name in ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")}
SETTINGS = {name: settings for name, (_, settings) in RULES.items()}


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
    """Return the optimizer `spec` for parameters w of `size` elements of `dtype`. UsageError: bad name or setting.
    schedule: step -> learning rate (make_schedule). weight_decay: a factor c; c w is added to the mean gradient;
    adamw subtracts rate c w from w instead. clip_norm: upper bound of the mean gradient's 2-norm; 0: no clipping.
    device: where all vectors lie. average_from: see `Optimizer`."""
    if of_torch(spec):
        made = torch_optimizers().TorchOptimizer
        return cast(Optimizer, made(spec, size, dtype, schedule, weight_decay, clip_norm, device, average_from))
    name, settings = _parse(spec)
    return RULES[name][0](size, dtype, schedule, weight_decay, clip_norm, device, average_from, **settings)


def vectors_of(spec: str) -> tuple[str, ...]:
    """Return the names of the optimizer's state vectors, each as long as the parameters. UsageError: bad spec."""
    if of_torch(spec):
        return cast(tuple[str, ...], torch_optimizers().vectors_of(spec))
    return RULES[_parse(spec)[0]][0].vectors


def torch_optimizers() -> Any:
    """Return hpcdl.torch.optimizer, imported on demand: the module belongs to an upper room and imports PyTorch."""
    return importlib.import_module("hpcdl.torch.optimizer")


def _parse(spec: str) -> tuple[str, dict]:
    """Return a rule's name and settings; UsageError names PyTorch's rule for one that is not ours."""
    try:
        return parse_spec("optimizer", spec, SETTINGS)
    except UsageError as error:
        theirs = TORCH_RULES.get(spec.partition(":")[0].lower())
        raise UsageError(f"{error}; PyTorch's is torch:{theirs}" if theirs else str(error)) from None
