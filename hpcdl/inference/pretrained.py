"""Pretrained values for --initial: a run starts from the tensors of a file (fine-tuning).

    NAME.safetensors   NAME.npz        tensors by name, as `hpcdl evaluate --export` writes them
    NAME.pt   NAME.pth                 a state_dict, as torch.save writes it; no code in it is run
    a run's folder, or a checkpoint    its parameters and buffers

The names are those of the model's tensors (`layout`) and buffers (`extra`); for a PyTorch module the keys of its
state_dict. The file must have every one of them in its shape, and no other.
"""

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
from hpcdl.models.model import abilities_of, unwrapped
from hpcdl.random import Random

ENDINGS = (".safetensors", ".npz", ".pt", ".pth")
MOST = 6  # names of each kind that a message lists


def load_initial_values(model: Any, path: str) -> None:
    """Set the model's initial values to those of a file. Raises UsageError, one line, if they do not fit."""
    source, model = f"--initial {path}", unwrapped(model)
    tensors = resolve_aliases(read_tensors(path), model)
    extra, device = extra_of(model), abilities_of(model).device
    check(tensors, shapes_of(model), source)
    parameters = np.empty(model.layout.size, model.layout.dtype)
    for name, view in model.layout.views(parameters).items():
        with np.errstate(over="ignore"):
            view[...] = tensors[name].reshape(view.shape)
    if not np.isfinite(parameters).all():
        raise UsageError(f"{source}: its values are not finite numbers of {model.layout.dtype}")

    def values(random: Random) -> dict[str, np.ndarray]:
        """Set the buffers; return the initial values of the tensors by name."""
        for name, array in extra.items():
            device.copy_in(array, tensors[name].astype(array.dtype).reshape(array.shape))
        return model.layout.views(parameters)  # type: ignore[no-any-return]

    def initialize(random: Random) -> Any:
        values(random)
        return device.array(parameters.copy())

    with blamed_on(f"{source}: this model has no room for initial values"):
        model.initialize, model.initial_values = initialize, values


def read_tensors(path: str) -> dict[str, np.ndarray]:
    """Return the tensors of a file by name. Raises UsageError, one line."""
    source = f"--initial {path}"
    if os.path.isdir(path) or path.endswith(".h5"):
        checkpoint = Checkpoint.read(Path(path))
        parameters, tensors, at = parameters_of(checkpoint, path), {}, 0
        for each in checkpoint.attributes["layout"]:
            size = math.prod(each["shape"])
            tensors[each["name"]] = parameters[at : at + size].reshape(each["shape"])
            at += size
        beside = {name: each for name, each in checkpoint.vectors.items() if name.startswith(PREFIX)}
        return tensors | {name.removeprefix(PREFIX): each for name, each in beside.items()}
    if not path.endswith(ENDINGS):
        raise UsageError(f"{source}: take a file {', '.join(ENDINGS)}, or a run's folder or checkpoint")
    if not os.path.isfile(path):
        raise UsageError(f"{source}: there is no such file")
    if path.endswith(".npz"):
        return load_npz(path)
    if path.endswith(".safetensors"):
        with blamed_on(f"{source} cannot be read"):
            return from_safetensors(path, source)
    from hpcdl.torch import state  # here: PyTorch is loaded on demand only

    return state.read(path, source)


def from_safetensors(path: str, source: str) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file; bfloat16, which numpy lacks, by PyTorch."""
    try:
        from safetensors.numpy import load_file
    except ImportError:
        raise UsageError(f"{source} needs the package safetensors: pip install 'hpcdl[export]'") from None
    try:
        return load_file(path)
    except (KeyError, TypeError):  # a type that numpy lacks
        from hpcdl.torch import state

        return state.read_safetensors(path)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors and buffers by name."""
    shapes = {name: tensor.shape for name, tensor in model.layout.tensors.items()}
    return shapes | {name: tuple(array.shape) for name, array in extra_of(model).items()}


def resolve_aliases(tensors: dict[str, np.ndarray], model: Any) -> dict[str, np.ndarray]:
    """Return the tensors with aliases (model.aliases: name -> name in the layout) under their names in the layout."""
    aliases = model.aliases if abilities_of(model).module else {}
    resolved = {name: each for name, each in tensors.items() if name not in aliases}
    for name in tensors.keys() & aliases.keys():
        resolved.setdefault(aliases[name], tensors[name])
    return resolved


def check(tensors: dict[str, np.ndarray], wanted: dict[str, tuple[int, ...]], source: str) -> None:
    """Raise UsageError, one line, that lists missing and unexpected names, and wrong shapes."""
    other = [
        f"{name} ({' x '.join(map(str, tensors[name].shape)) or 'one'}, not {' x '.join(map(str, shape))})"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape and not (shape == (1,) and tensors[name].size == 1)
    ]
    problems = {
        "missing": [name for name in wanted if name not in tensors],
        "unexpected": [name for name in tensors if name not in wanted],
        "of another shape": other,
        "no numbers": [name for name in wanted if name in tensors and tensors[name].dtype.kind not in "biuf"],
    }
    phrases = [f"{what}: {name_list(names)}" for what, names in problems.items() if names]
    if phrases:
        raise UsageError(f"{source} does not fit the model: {'; '.join(phrases)}")


def name_list(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more
