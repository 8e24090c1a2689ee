"""What a model holds beside its parameters (`model.extra`, arrays by name): the same on all ranks, saved, loaded.

    begin        all ranks take rank 0's
    a step       each rank's own change as its rows say, as batch norm's statistics do
    refresh      those in `model.averaged` become the mean over the ranks that train, whole numbers the largest, on all
                 of them: before each evaluation and checkpoint
    checkpoint   rank 0's, as extra/NAME

A model without a member `extra` has nothing of it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.comm import Communicator
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array, device_of
from hpcdl.models.model_wrapper import unwrapped
from hpcdl.random import Random

PREFIX = "extra/"  # of the names in a checkpoint


class Extra(Same):
    """`array` is the same on all ranks; of any type, and it may hold what is not finite, as a mask of -inf does."""

    may_be_infinite = True

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        if whole is not None:
            device_of(self.array).copy_in(self.array, whole)
        broadcast(comm, self.array)


def broadcast(comm: Communicator, array: Array, root: int = 0) -> None:
    """All ranks take rank root's, byte by byte; collective."""
    if array.size:
        comm.broadcast(array.reshape(-1).view(np.uint8), root)


def extra_of(model: Any) -> dict[str, Array]:
    """The arrays of a model by name."""
    return getattr(unwrapped(model), "extra", {})


def follow(model: Any, random: Random) -> None:
    """A run begins: a model that draws at random while it trains follows its seed."""
    if hasattr(unwrapped(model), "of_run"):
        unwrapped(model).of_run(random)


def tracked(arrays: dict[str, Array]) -> dict[str, Tracked]:
    """As parts of a checkpoint."""
    return {f"{PREFIX}{name}": Extra(array) for name, array in arrays.items()}


def share(model: Any, comm: Communicator) -> None:
    """All ranks of `comm` take rank 0's; collective."""
    for array in extra_of(model).values():
        broadcast(comm, array)


def pack(model: Any) -> np.ndarray:
    """Those that are to be averaged, one after the other, as float64."""
    arrays = extra_of(model)
    own = [arrays[name] for name in getattr(unwrapped(model), "averaged", ())]
    parts = [device_of(each).host(each).reshape(-1).astype(np.float64) for each in own]
    return np.concatenate([np.empty(0), *parts])


def unpack(model: Any, numbers: np.ndarray) -> None:
    """What `pack` has made, or the mean of such, into the model."""
    arrays, start = extra_of(model), 0
    for name in getattr(unwrapped(model), "averaged", ()):
        array = arrays[name]
        part = numbers[start : start + array.size].reshape(array.shape).astype(array.dtype)
        device_of(array).copy_in(array, part)
        start += array.size


def carried(model: Any) -> Callable[[], np.ndarray] | None:
    """`pack` of this model, for who sends it; None where there is nothing to be averaged."""
    return (lambda: pack(model)) if len(pack(model)) else None


def whole_numbers(model: Any) -> np.ndarray:
    """Which of the packed numbers are whole ones, of which the largest counts, and not the mean."""
    arrays = extra_of(model)
    kinds = [
        np.full(arrays[name].size, arrays[name].dtype.kind in "biu")
        for name in getattr(unwrapped(model), "averaged", ())
    ]
    return np.concatenate([np.empty(0, bool), *kinds])


def mean(model: Any, rows: list[np.ndarray]) -> np.ndarray:
    """Of what several models like this one have packed: the mean, of whole numbers the largest.

    What all have the same stays as it is, to the bit: the mean is taken of the distances from the first.
    """
    apart = np.mean([distance(row, rows[0]) for row in rows], axis=0)
    return np.where(whole_numbers(model), np.max(rows, axis=0), moved(rows[0], apart))


def distance(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """values - first, and 0 where they are the same, infinite ones too."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return np.where(values == first, 0.0, values - first)


def moved(first: np.ndarray, apart: np.ndarray) -> np.ndarray:
    """first + apart, and `first` itself where that is nothing."""
    return np.where(apart == 0, first, first + apart)


def average(model: Any, comm: Communicator) -> None:
    """Those that are to be averaged become the mean over the ranks of `comm` (see `mean`); collective."""
    values = pack(model)
    if comm.size == 1 or not len(values):
        return
    first, largest = values.copy(), values.copy()
    comm.broadcast(first)
    comm.all_reduce(largest, op="max")
    apart = distance(values, first)
    comm.all_reduce(apart, op="mean")
    unpack(model, np.where(whole_numbers(model), largest, moved(first, apart)))


@contextlib.contextmanager
def kept(model: Any) -> Iterator[None]:
    """What the body computes leaves no trace in what the model holds."""
    arrays = extra_of(model)
    copies = {name: array.copy() for name, array in arrays.items()}
    yield
    for name, array in extra_of(model).items():
        array[...] = copies[name]


def load(model: Any, vectors: dict[str, np.ndarray], where: str) -> None:
    """Write what a checkpoint holds of it into the model. UsageError, begun by `where`, where it does not fit."""
    arrays = extra_of(model)
    found = {name.removeprefix(PREFIX): each for name, each in vectors.items() if name.startswith(PREFIX)}
    if found.keys() != arrays.keys():
        names = ", ".join(sorted(found.keys() ^ arrays.keys()))
        raise UsageError(f"{where}: beside its parameters the model holds other things than the checkpoint: {names}")
    for name, array in arrays.items():
        if (found[name].shape, found[name].dtype) != (array.shape, array.dtype):
            raise UsageError(f"{where}: {name} is of another shape or type than the model's")
        device_of(array).copy_in(array, found[name])
