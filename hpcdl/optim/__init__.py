"""Optimizers and learning-rate schedules on flat vectors, independent of MPI.

sgd   momentum:beta=0.9   nesterov:beta=0.9   adam:beta1=0.9,beta2=0.999,eps=1e-8   adamw:...   adagrad:eps=1e-10
muon:beta=0.95,steps=5,scale=shape,...   matrices by Muon, the rest by AdamW (muon.py)
torch:NAME    a rule of torch.optim, as in torch:AdamW,betas=(0.9,0.95) (hpcdl/torch/optimizer.py)"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

from numpy.typing import DTypeLike

from hpcdl.errors import UsageError, parse_spec
from hpcdl.kernels.device import CPU, Device
from hpcdl.optim.adagrad import Adagrad
from hpcdl.optim.adam import Adam, AdamW
from hpcdl.optim.muon import MUON, Muon, matrix_flops, workspace_size
from hpcdl.optim.optimizer import Optimizer
from hpcdl.optim.schedules import make_schedule
from hpcdl.optim.sgd import SGD, Momentum, Nesterov
from hpcdl.plugins import of_torch

__all__ = ["Optimizer", "make_optimizer", "make_schedule", "vectors_of"]

ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
RULES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {}),
    "momentum": (Momentum, {"beta": 0.9}),
    "nesterov": (Nesterov, {"beta": 0.9}),
    "adam": (Adam, ADAM),
    "adamw": (AdamW, ADAM),
    "adagrad": (Adagrad, {"eps": 1e-10}),
    "muon": (Muon, MUON),
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
    weights: Sequence[Any] = (),
) -> Optimizer:
    """Return the optimizer `spec` for parameters w of `size` elements of `dtype`. UsageError: bad name or setting.
    schedule: step -> learning rate (make_schedule). weight_decay: a factor c; c w is added to the mean gradient;
    adamw and muon subtract rate c w from w instead. clip_norm: upper bound of the mean gradient's 2-norm; 0: none.
    device: where all vectors lie. average_from: see `Optimizer`. weights: the model's `Layout.hidden`, for muon."""
    if of_torch(spec):
        made = torch_optimizers().TorchOptimizer
        return cast(Optimizer, made(spec, size, dtype, schedule, weight_decay, clip_norm, device, average_from))
    name, settings = _parse(spec)
    if RULES[name][0] is Muon:
        settings["weights"] = weights
    return RULES[name][0](size, dtype, schedule, weight_decay, clip_norm, device, average_from, **settings)


def vectors_of(spec: str) -> tuple[str, ...]:
    """Return the names of the optimizer's state vectors, each as long as the parameters. UsageError: bad spec."""
    if of_torch(spec):
        return cast(tuple[str, ...], torch_optimizers().vectors_of(spec))
    return RULES[_parse(spec)[0]][0].vectors


def matrix_work(spec: str, weights: Sequence[Any]) -> tuple[int, float]:
    """Return the elements of memory beside the state, and the flops, of the matrices' update; (0, 0) without any.
    weights: the model's `Layout.hidden`."""
    if not _takes_matrices(spec):
        return 0, 0.0
    return workspace_size(weights), sum(matrix_flops(each, _parse(spec)[1]["steps"]) for each in weights)


def refuse_slices(spec: str, who: str) -> None:
    """Raise UsageError if the optimizer `spec` cannot update slices of the vector, which `who` has."""
    if _takes_matrices(spec):
        instead = "take adamw, or train-allreduce, train-fully-sharded or train-grid"
        raise UsageError(f"--optimizer {spec} updates whole matrices, and {who}; {instead}")


def _takes_matrices(spec: str) -> bool:
    return not of_torch(spec) and RULES[_parse(spec)[0]][0] is Muon


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
