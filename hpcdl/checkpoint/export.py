"""Export of a checkpoint's parameters by name for other programs: npz (numpy) or safetensors."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np

from hpcdl.errors import LoneError, UsageError, blamed_on
from hpcdl.files import atomic_write, check_writable


def check_output_file(option: str, path: str, endings: tuple[str, ...] = ()) -> None:
    """Raise UsageError, before any work, if a file cannot be written. endings: allowed file-name endings; (): all."""
    if path and endings and Path(path).suffix not in endings:
        raise UsageError(f"{option} {path}: the name should end in {' or '.join(endings)}")
    with blamed_on(f"{option} {path} cannot be written"):
        if path and not os.access(Path(path).absolute().parent, os.W_OK | os.X_OK):
            raise UsageError(f"{option} {path} cannot be written: there is no such folder, or no permission")
        if path:
            check_writable(path)


@contextlib.contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Context with the file of `atomic_write`; a failing write ends the job with one line."""
    with blamed_on(f"{path} cannot be written", LoneError), atomic_write(path) as file:
        yield file


@contextlib.contextmanager
def output_file_in_parts(path: Path) -> Iterator[Any]:
    """Context like `output_file` for a longer body: errors of `write` are blamed on the file, other errors are not."""
    blamed = blamed_on(f"{path} cannot be written", LoneError)
    with contextlib.ExitStack() as stack:
        file = blamed(stack.enter_context)(atomic_write(path))
        yield SimpleNamespace(write=blamed(file.write))
        blamed(stack.close)()  # renames the file


def named(model: Any, parameters: np.ndarray) -> dict[str, np.ndarray]:
    """Return the model's tensors by name; for a PyTorch module, its whole state_dict."""
    from hpcdl.models.model import abilities_of

    tensors: dict[str, np.ndarray]
    tensors = model.named(parameters) if abilities_of(model).module else model.layout.views(parameters)
    return tensors


def export(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write the named tensors in the format of the file's ending, .npz or .safetensors."""
    if path.suffix == ".npz":
        with output_file(path) as file:
            np.savez(file, **tensors)  # type: ignore[arg-type]
    else:
        try:
            from safetensors.numpy import save
        except ImportError:
            raise UsageError(f"--export {path} needs the package safetensors: pip install 'hpcdl[export]'") from None
        with output_file(path) as file:
            file.write(save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}))


def write_json(value: dict, path: Path) -> None:
    """Write a JSON file. Raises ValueError for values that JSON lacks, before the file is opened."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with output_file(path) as file:
        file.write(text.encode())
