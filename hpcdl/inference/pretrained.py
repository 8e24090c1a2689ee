"""Pretrained values for --initial: a run starts from the tensors of a file (fine-tuning).

    NAME.safetensors   NAME.npz        tensors by name, as `hpcdl evaluate --export` writes them
    NAME.pt   NAME.pth                 a state_dict, as torch.save writes it; no code in it is run
    a run's folder, or a checkpoint    its parameters and buffers

The names are those of the model's tensors (`layout`) and buffers (`extra`); for a PyTorch module the keys of its
state_dict. The file must have every one of them in its shape, and no other."""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.checkpoint.buffers import PREFIX, extra_of
from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data.formats.prepare_npz import load_npz
from hpcdl.data.schema import name_list
from hpcdl.errors import UsageError, blamed_on
from hpcdl.inference.trained_model import parameters_of
from hpcdl.models.model import abilities_of, unwrapped
from hpcdl.random import Random

ENDINGS = (".safetensors", ".npz", ".pt", ".pth")
MOST = 6  # names of each kind that a message lists


def load_initial_values(model: Any, path: str) -> None:
    """Make the values in a file the initial values of the model. Raises UsageError, one line, if they do not fit."""
    source, model = f"--initial {path}", unwrapped(model)
    given, aliases = read_tensors(path), model.aliases if abilities_of(model).module else {}
    tensors = {name: each for name, each in given.items() if name not in aliases}
    for name in given.keys() & aliases.keys():  # name in the file -> name in the layout
        tensors.setdefault(aliases[name], given[name])
    extra, device = extra_of(model), abilities_of(model).device
    shapes = {name: tensor.shape for name, tensor in model.layout.tensors.items()}
    check(tensors, shapes | {name: tuple(array.shape) for name, array in extra.items()}, source)
    parameters = np.empty(model.layout.size, model.layout.dtype)
    for name, view in model.layout.views(parameters).items():
        with np.errstate(over="ignore"):
            view[...] = tensors[name].reshape(view.shape)
    if not np.isfinite(parameters).all():
        raise UsageError(f"{source}: some values are not finite in {model.layout.dtype}")

    def values(random: Random) -> dict[str, np.ndarray]:
        for name, array in extra.items():
            device.copy_in(array, tensors[name].astype(array.dtype).reshape(array.shape))
        return model.layout.views(parameters)  # type: ignore[no-any-return]

    def initialize(random: Random) -> Any:
        values(random)
        return device.array(parameters.copy())

    with blamed_on(f"{source}: this model cannot be given initial values"):
        model.initialize, model.initial_values = initialize, values


def read_tensors(path: str) -> dict[str, np.ndarray]:
    """Return the tensors of a file by name. Raises UsageError, one line."""
    source = f"--initial {path}"
    if os.path.isdir(path) or path.endswith(".h5"):
        checkpoint = Checkpoint.read(Path(path))
        parameters, layout = parameters_of(checkpoint, path), checkpoint.attributes["layout"]
        parts = np.split(parameters, np.cumsum([math.prod(each["shape"]) for each in layout])[:-1])
        tensors = {each["name"]: part.reshape(each["shape"]) for each, part in zip(layout, parts, strict=True)}
        beside = {name: each for name, each in checkpoint.vectors.items() if name.startswith(PREFIX)}
        return tensors | {name.removeprefix(PREFIX): each for name, each in beside.items()}
    if not path.endswith(ENDINGS):
        raise UsageError(f"{source}: give a file that ends in {', '.join(ENDINGS)}, or a run's folder or checkpoint")
    if not os.path.isfile(path):
        raise UsageError(f"{source}: there is no such file")
    if path.endswith(".npz"):
        return load_npz(path)
    if path.endswith(".safetensors"):
        try:
            from safetensors.numpy import load_file
        except ImportError:
            raise UsageError(f"{source} needs the package safetensors: pip install 'hpcdl[export]'") from None
        with blamed_on(f"{source} cannot be read"), contextlib.suppress(KeyError, TypeError):  # of a type numpy lacks
            return load_file(path)
    from hpcdl.torch import state  # here: PyTorch is loaded on demand only

    with blamed_on(f"{source} cannot be read"):
        return state.read_safetensors(path) if path.endswith(".safetensors") else state.read(path, source)


def check(tensors: dict[str, np.ndarray], wanted: dict[str, tuple[int, ...]], source: str) -> None:
    """Raise UsageError, one line, for missing or unexpected names, wrong shapes, and tensors that hold no numbers."""
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
    phrases = [f"{what}: {name_list(names, MOST, plain=True)}" for what, names in problems.items() if names]
    if phrases:
        raise UsageError(f"{source} does not fit the model: {'; '.join(phrases)}")
