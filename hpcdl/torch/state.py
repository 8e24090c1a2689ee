"""The state_dict of a trained module: written for plain PyTorch, and read, to start a run from.

    hpcdl                                        key of state_dict
    a tensor of the layout                       its name; a tied tensor stands under its other names, too
    what the module holds beside (`extra`)       its name; (1,) becomes a number where the module has one

A file is read as tensors alone (weights_only): no code in it is run.
"""

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.errors import UsageError, blamed_on
from hpcdl.plugins import of_torch

if TYPE_CHECKING:
    from hpcdl.torch.model import TorchModel


def aliases_of(module: nn.Module) -> dict[str, str]:
    """The keys under which state_dict shows a tensor that it has shown before: key -> the first one."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            known = first.setdefault(id(tensor), name)
            if known != name:
                found[name] = known
    return found


def named(model: "TorchModel", parameters: np.ndarray) -> dict[str, np.ndarray]:
    """All that the module's state_dict holds with these parameters, by its keys: what `--export` writes."""
    tensors = model.layout.views(parameters)
    for name, array in getattr(model, "extra", {}).items():
        tensors[name] = np.asarray(model.device.host(array))
    return by_key(tensors, model.module)


def by_key(tensors: dict[str, np.ndarray], module: nn.Module) -> dict[str, np.ndarray]:
    """The tensors by the keys of the module's state_dict, in its order and shapes; what the module lacks comes last."""
    aliases, found = aliases_of(module), {}
    for key, each in module.state_dict(keep_vars=True).items():
        name = aliases.get(key, key)
        if name in tensors:
            found[key] = tensors[name].reshape(tuple(each.shape))
    return found | {name: each for name, each in tensors.items() if name not in found}


def state_dict(run: str, module: nn.Module | None = None, trust: Iterable[str] = ()) -> dict[str, Tensor]:
    """What a run (its folder, or a checkpoint) has trained, as tensors by the keys of its module's state_dict.

    module: one like the run's; without it the run's own is made, which `trust` must allow, as --trust does: by the
    name of its function, or by the run.
    Raises UsageError where there is no such run, or it trained no module.
    """
    tensors_of = importlib.import_module(
        "hpcdl.inference.pretrained"
    ).tensors_of  # by its name: it lies in a room above
    trained = importlib.import_module("hpcdl.inference.trained_model").Trained(run, trust)
    tensors = tensors_of(run)
    if module is not None:
        tensors = by_key(tensors, module)
    elif of_torch(trained.about["model"]):
        tensors = by_key(tensors, trained.model().module)
    return {name: torch.from_numpy(np.array(each)) for name, each in tensors.items()}


def read(path: str, told: str) -> dict[str, np.ndarray]:
    """The tensors of a file that torch.save has written, as arrays; `told` begins a refusal, one line."""
    with blamed_on(f"{told} cannot be read"):
        try:
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            if "weights_only" in str(error) or "Weights only" in str(error):
                raise UsageError(
                    f"{told} holds more than tensors, which is not read: write torch.save(module.state_dict(), FILE)"
                ) from None
            raise
    if not (isinstance(found, dict) and all(isinstance(each, Tensor) for each in found.values())):
        inside = f"; it holds {', '.join(map(str, list(found)[:6]))}" if isinstance(found, dict) else ""
        raise UsageError(f"{told} holds no state_dict, tensors by name{inside}")
    return {str(name): as_numbers(each) for name, each in found.items()}


def read_safetensors(path: str) -> dict[str, np.ndarray]:
    """The tensors of such a file, where some are of a type that numpy has not."""
    from safetensors.torch import load_file

    return {name: as_numbers(each) for name, each in load_file(path).items()}


def as_numbers(tensor: Tensor) -> np.ndarray:
    """As an array; floats of a type that numpy has not, as bfloat16, in float32."""
    known = (torch.float16, torch.float32, torch.float64)
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return (dense.float() if dense.is_floating_point() and dense.dtype not in known else dense).numpy()
