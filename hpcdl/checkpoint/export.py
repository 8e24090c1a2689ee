"""A checkpoint's parameters by name, for other programs: npz (numpy) or safetensors."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpcdl.errors import LoneError, UsageError, blamed_on
from hpcdl.files import atomic_write, check_writable


def check_output_file(option: str, path: str, endings: tuple[str, ...] = ()) -> None:
    """Refuse a file that could not be written, before any work is done for it; endings: of its name, if not any."""
    if path and endings and Path(path).suffix not in endings:
        raise UsageError(f"{option} {path}: the name should end in {' or '.join(endings)}")
    with blamed_on(f"{option} {path} cannot be written"):
        if path and not os.access(Path(path).absolute().parent, os.W_OK | os.X_OK):
            raise UsageError(f"{option} {path} cannot be written: there is no such folder, or no permission")
        if path:
            check_writable(path)


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """The file as `atomic_write` gives it; where it cannot be written, that rank ends the job in one line."""
    with blamed_on(f"{path} cannot be written", LoneError), atomic_write(path) as file:
        yield file


class PartialFile:
    """A file that is written part by part."""

    def __init__(self, file: BinaryIO, path: Path):
        self.file, self.path = file, path

    def write(self, part: bytes) -> None:
        """The next part; where it cannot be written, that rank ends the job in one line."""
        with blamed_on(f"{self.path} cannot be written", LoneError):
            self.file.write(part)


@contextlib.contextmanager
def written_in_parts(path: Path) -> Iterator[PartialFile]:
    """The same, while other things are done that are not to blame on the file."""
    with contextlib.ExitStack() as stack:
        with blamed_on(f"{path} cannot be written", LoneError):
            file = stack.enter_context(atomic_write(path))
        yield PartialFile(file, path)
        with blamed_on(f"{path} cannot be written", LoneError):
            stack.close()  # it gets its name


def named(model: Any, parameters: np.ndarray) -> dict[str, np.ndarray]:
    """The model's tensors by name; of a module of PyTorch's, all that its state_dict holds."""
    own = getattr(model, "named", None)
    return model.layout.views(parameters) if own is None else own(parameters)  # type: ignore[no-any-return]


def export(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write the named tensors in the format that the file's ending names, .npz or .safetensors."""
    if path.suffix == ".npz":
        with written(path) as file:
            np.savez(file, **tensors)  # type: ignore[arg-type]
    else:
        try:
            from safetensors.numpy import save
        except ImportError:
            raise UsageError(f"--export {path} needs the package safetensors: pip install 'hpcdl[export]'") from None
        with written(path) as file:
            file.write(save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}))


def write_json(value: dict, path: Path) -> None:
    """Write what JSON can hold; ValueError for what it cannot, which is not the file's fault."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with written(path) as file:
        file.write(text.encode())
