"""--initial: a run starts from values in a file, by name, and not from drawn ones: fine-tuning.

    NAME.safetensors   NAME.npz        tensors by name, as `hpcdl evaluate --export` writes them
    NAME.pt   NAME.pth                 a state_dict, as torch.save writes it; no code in it is run
    a run's folder, or a checkpoint    its parameters, and what its model holds beside them

The names are those of the model's tensors (`layout`), and of what it holds beside them (`extra`): of a module of
PyTorch's the keys of its state_dict. Every one of them has to be there, in its shape, and no other.
"""

import importlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.checkpoint.buffers import PREFIX, extra_of
from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data.formats.prepare_npz import load_npz
from hpcdl.errors import UsageError, blamed_on
from hpcdl.inference.trained_model import parameters_of
from hpcdl.kernels.device import CPU
from hpcdl.models.model_wrapper import unwrapped
from hpcdl.random import Random

ENDINGS = (".safetensors", ".npz", ".pt", ".pth")
MOST = 6  # names of each kind that a message lists


def begin_with(model: Any, path: str) -> None:
    """Let the model's initial values be those of a file. Raises UsageError, one line, where they do not fit."""
    told, model = f"--initial {path}", unwrapped(model)
    found = renamed(tensors_of(path), model)
    extra, device = extra_of(model), getattr(model, "device", CPU)
    check(found, shapes_of(model), told)
    parameters = np.empty(model.layout.size, model.layout.dtype)
    for name, view in model.layout.views(parameters).items():
        with np.errstate(over="ignore"):
            view[...] = found[name].reshape(view.shape)
    if not np.isfinite(parameters).all():
        raise UsageError(f"{told}: its values are not finite numbers of {model.layout.dtype}")

    def values(random: Random) -> dict[str, np.ndarray]:
        """As a model has it that makes all of its values at once: those of its tensors by name."""
        for name, array in extra.items():
            device.copy_in(array, found[name].astype(array.dtype).reshape(array.shape))
        return model.layout.views(parameters)  # type: ignore[no-any-return]

    def initialize(random: Random) -> Any:
        values(random)
        return device.array(parameters.copy())

    with blamed_on(f"{told}: this model has no room for initial values"):
        model.initialize, model.initial_values = initialize, values


def tensors_of(path: str) -> dict[str, np.ndarray]:
    """What a file holds, by name. Raises UsageError, one line."""
    told = f"--initial {path}"
    if os.path.isdir(path) or path.endswith(".h5"):
        found = Checkpoint.read(Path(path))
        parameters, tensors, at = parameters_of(found, path), {}, 0
        for each in found.attributes["layout"]:
            size = math.prod(each["shape"])
            tensors[each["name"]] = parameters[at : at + size].reshape(each["shape"])
            at += size
        beside = {name: each for name, each in found.vectors.items() if name.startswith(PREFIX)}
        return tensors | {name.removeprefix(PREFIX): each for name, each in beside.items()}
    if not path.endswith(ENDINGS):
        raise UsageError(f"{told}: take a file {', '.join(ENDINGS)}, or a run's folder or checkpoint")
    if not os.path.isfile(path):
        raise UsageError(f"{told}: there is no such file")
    if path.endswith(".npz"):
        return load_npz(path)
    if path.endswith(".safetensors"):
        with blamed_on(f"{told} cannot be read"):
            return from_safetensors(path, told)
    # By its name, for the room is PyTorch's, which is imported by nobody who does not ask for it.
    return importlib.import_module("hpcdl.torch.state").read(path, told)  # type: ignore[no-any-return]


def from_safetensors(path: str, told: str) -> dict[str, np.ndarray]:
    """What such a file holds; 16-bit floats of the kind that numpy lacks by PyTorch."""
    try:
        from safetensors.numpy import load_file
    except ImportError:
        raise UsageError(f"{told} needs the package safetensors: pip install 'hpcdl[export]'") from None
    try:
        return load_file(path)
    except (KeyError, TypeError):  # a type that numpy has not
        return importlib.import_module("hpcdl.torch.state").read_safetensors(path)  # type: ignore[no-any-return]


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """What the model's tensors, and what it holds beside them, are called, and their shapes."""
    shapes = {name: tensor.shape for name, tensor in model.layout.tensors.items()}
    return shapes | {name: tuple(array.shape) for name, array in extra_of(model).items()}


def renamed(found: dict[str, np.ndarray], model: Any) -> dict[str, np.ndarray]:
    """What a file holds, tensors with several names (model.aliases: name -> the one of the layout) under one."""
    aliases = getattr(model, "aliases", {})
    kept = {name: each for name, each in found.items() if name not in aliases}
    for name in found.keys() & aliases.keys():
        kept.setdefault(aliases[name], found[name])
    return kept


def check(found: dict[str, np.ndarray], wanted: dict[str, tuple[int, ...]], told: str) -> None:
    """Raise UsageError, one line that lists them, where names are missing or too many, or shapes are others."""
    other = [
        f"{name} ({' x '.join(map(str, found[name].shape)) or 'one'}, not {' x '.join(map(str, shape))})"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape and not (shape == (1,) and found[name].size == 1)
    ]
    problems = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in wanted],
        "of another shape": other,
        "no numbers": [name for name in wanted if name in found and found[name].dtype.kind not in "biuf"],
    }
    said = [f"{what}: {listed(names)}" for what, names in problems.items() if names]
    if said:
        raise UsageError(f"{told} does not fit the model: {'; '.join(said)}")


def listed(names: list[str]) -> str:
    """Some names, and how many there are more."""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more
