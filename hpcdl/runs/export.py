"""A checkpoint's parameters by name, for other programs: npz (numpy) or safetensors."""

from pathlib import Path

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.files import atomic_write


def export(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write the named tensors in the format that the file's ending names, .npz or .safetensors."""
    if path.suffix == ".npz":
        with atomic_write(path) as file:
            np.savez(file, **tensors)
    elif path.suffix == ".safetensors":
        try:
            from safetensors.numpy import save
        except ImportError:
            raise UsageError(f"--export {path} needs the package safetensors: pip install 'hpcdl[export]'") from None
        with atomic_write(path) as file:
            file.write(save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}))
    else:
        raise UsageError(f"--export {path}: the name should end in .npz or .safetensors")


def write_predictions(predicted: np.ndarray, classes: int, path: Path) -> None:
    """Write one prediction per row: .csv with the class (or value), or .npz with the model's outputs beside it."""
    if classes:
        answers = predicted.argmax(axis=1) if predicted.ndim == 2 else (predicted > 0.5).astype(np.int64)
    else:
        answers = predicted
    if path.suffix == ".npz":
        with atomic_write(path) as file:
            np.savez(file, prediction=answers, output=predicted)
    elif path.suffix == ".csv":
        with atomic_write(path) as file:
            np.savetxt(file, answers, fmt="%d" if classes else "%.9g", header="prediction", comments="")
    else:
        raise UsageError(f"--predict {path}: the name should end in .csv or .npz")
