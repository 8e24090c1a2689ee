"""The state_dict of a trained module: written for plain PyTorch, and read, to start a run from.

    hpcdl                                        key of state_dict
    a tensor of the layout                       its name; a tied tensor also under its other names
    buffers and frozen parameters (`extra`)      their names; (1,) becomes a number if the module has one

A file is read with weights_only: only tensors, and no code in it is run."""

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.errors import UsageError, blamed_on
from hpcdl.plugins import of_torch


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Return the keys under which state_dict repeats a tensor: key -> first key of that tensor."""
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            original = first.setdefault(id(tensor), name)
            if original != name:
                aliases[name] = original
    return aliases


def by_key(tensors: dict[str, np.ndarray], module: nn.Module) -> dict[str, np.ndarray]:
    """Return the tensors by the keys of the module's state_dict, in its order and shapes; other tensors come last."""
    aliases, ordered = aliases_of(module), {}
    for key, each in module.state_dict(keep_vars=True).items():
        name = aliases.get(key, key)
        if name in tensors:
            ordered[key] = tensors[name].reshape(tuple(each.shape))
    return ordered | {name: each for name, each in tensors.items() if name not in ordered}


def state_dict(run: str, module: nn.Module | None = None, trust: Iterable[str] = ()) -> dict[str, Tensor]:
    """Return the trained tensors of a run (its folder, or a checkpoint) by the keys of its module's state_dict.
    module: one like the run's; None: its module is made anew, for which `trust` must hold the function's name or the
    run, like --trust. Raises UsageError if there is no such run. A run without PyTorch: by the layout's names."""
    # By name: these modules lie in a room above.
    trained = importlib.import_module("hpcdl.inference.trained_model").TrainedModel(run, trust)
    tensors = importlib.import_module("hpcdl.inference.pretrained").read_tensors(run)
    if module is not None:
        tensors = by_key(tensors, module)
    elif of_torch(trained.about["model"]):
        tensors = by_key(tensors, trained.model().module)
    return {name: torch.from_numpy(np.array(each)) for name, each in tensors.items()}


def read(path: str, told: str) -> dict[str, np.ndarray]:
    """Return the tensors of a torch.save file as arrays. Raises UsageError; its message begins with `told`."""
    with blamed_on(f"{told} cannot be read"):
        try:
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            if "weights_only" in str(error) or "Weights only" in str(error):
                advice = "write torch.save(module.state_dict(), FILE)"
                raise UsageError(f"{told} holds more than tensors, and is not read: {advice}") from None
            raise
    if not (isinstance(loaded, dict) and all(isinstance(each, Tensor) for each in loaded.values())):
        inside = f"; it holds {', '.join(map(str, list(loaded)[:6]))}" if isinstance(loaded, dict) else ""
        raise UsageError(f"{told} holds no state_dict, a dictionary of tensors by name{inside}")
    return {str(name): as_numbers(each) for name, each in loaded.items()}


def read_safetensors(path: str) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file that has types unknown to numpy."""
    from safetensors.torch import load_file

    return {name: as_numbers(each) for name, each in load_file(path).items()}


def as_numbers(tensor: Tensor) -> np.ndarray:
    """Return the tensor as an array; float types that numpy lacks, such as bfloat16, become float32."""
    known = (torch.float16, torch.float32, torch.float64)
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return (dense.float() if dense.is_floating_point() and dense.dtype not in known else dense).numpy()
