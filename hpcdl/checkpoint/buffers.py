"""Buffers of a model beside its parameters (`model.extra`, arrays by name): shared, averaged, saved and loaded.

begin        all ranks take the buffers of rank 0
a step       each rank changes its own buffers by its rows, as the statistics of batch norm
refresh      before each evaluation and checkpoint, the buffers in `model.averaged` become their mean over the ranks
             that train (integers: the largest), on all of these ranks
checkpoint   the buffers of rank 0 are saved as extra/NAME"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.comm import Communicator
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array, device_of
from hpcdl.models.model import abilities_of, unwrapped
from hpcdl.random import Random

PREFIX = "extra/"  # begins a buffer's name in a checkpoint


class SharedBuffer(Same):
    """A buffer, the same on all ranks; of any type, and possibly with infinite values, such as a mask of -inf."""

    may_be_infinite = True

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        if whole is not None:
            device_of(self.array).copy_in(self.array, whole)
        broadcast(comm, self.array)


def broadcast(comm: Communicator, array: Array, root: int = 0) -> None:
    """Broadcast the array from `root`, byte by byte; collective."""
    if array.size:
        comm.broadcast(array.reshape(-1).view(np.uint8), root)


def extra_of(model: Any) -> dict[str, Array]:
    """Return the buffers of a model by name; {} if the model has no member `extra`."""
    return unwrapped(model).extra if abilities_of(model).buffers else {}


def follow(model: Any, random: Random) -> None:
    """Let a model that is a PyTorch module draw its random numbers in training by the seed of this run."""
    if abilities_of(model).module:
        unwrapped(model).of_run(random)


def averaged_of(model: Any) -> list[Array]:
    """Return the buffers to be averaged, which `model.averaged` names."""
    own = unwrapped(model)
    return [own.extra[name] for name in own.averaged] if abilities_of(model).buffers else []


def tracked(arrays: dict[str, Array]) -> dict[str, Tracked]:
    """Return the buffers `arrays` as tracked vectors, by their names in a checkpoint."""
    return {f"{PREFIX}{name}": SharedBuffer(array) for name, array in arrays.items()}


def share(model: Any, comm: Communicator) -> None:
    """Broadcast rank 0's buffers over `comm`; collective."""
    for array in extra_of(model).values():
        broadcast(comm, array)


def pack(model: Any) -> np.ndarray:
    """Return the buffers to be averaged as one float64 vector."""
    parts = [device_of(each).host(each).reshape(-1).astype(np.float64) for each in averaged_of(model)]
    return np.concatenate([np.empty(0), *parts])


def unpack(model: Any, numbers: np.ndarray) -> None:
    """Write `numbers`, a vector made by `pack` or a mean of such vectors, into the model's buffers."""
    start = 0
    for array in averaged_of(model):
        part = numbers[start : start + array.size].reshape(array.shape).astype(array.dtype)
        device_of(array).copy_in(array, part)
        start += array.size


def buffer_packer(model: Any) -> Callable[[], np.ndarray] | None:
    """Return a function that packs this model's buffers; None if nothing is to be averaged."""
    return (lambda: pack(model)) if len(pack(model)) else None


def whole_numbers(model: Any) -> np.ndarray:
    """Return a mask of the packed numbers that are integers, which are combined by their maximum, not the mean."""
    kinds = [np.full(array.size, array.dtype.kind in "biu") for array in averaged_of(model)]
    return np.concatenate([np.empty(0, bool), *kinds])


def mean(model: Any, rows: list[np.ndarray]) -> np.ndarray:
    """Return the mean of several models' packed buffers `rows` (integers: the largest). Equal values stay the same to
    the bit: the mean is taken of the differences from the first row."""
    apart = np.mean([distance(row, rows[0]) for row in rows], axis=0)
    return np.where(whole_numbers(model), np.max(rows, axis=0), moved(rows[0], apart))


def distance(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return values - first, and 0 where they are equal, infinities included."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return np.where(values == first, 0.0, values - first)


def moved(first: np.ndarray, apart: np.ndarray) -> np.ndarray:
    """Return first + apart, and exactly `first` where apart is 0."""
    return np.where(apart == 0, first, first + apart)


def average(model: Any, comm: Communicator) -> None:
    """Set the buffers to be averaged to their mean over the ranks of `comm` (see `mean`); collective."""
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
def buffers_restored(model: Any) -> Iterator[None]:
    """Context that restores the model's buffers at its end."""
    arrays = extra_of(model)
    copies = {name: array.copy() for name, array in arrays.items()}
    yield
    for name, array in extra_of(model).items():
        array[...] = copies[name]


def load(model: Any, vectors: dict[str, np.ndarray], where: str) -> None:
    """Load a checkpoint's buffers into the model. Raises UsageError, beginning with `where`, if they do not fit."""
    arrays = extra_of(model)
    loaded = {name.removeprefix(PREFIX): each for name, each in vectors.items() if name.startswith(PREFIX)}
    if loaded.keys() != arrays.keys():
        names = ", ".join(sorted(loaded.keys() ^ arrays.keys()))
        raise UsageError(f"{where}: the model and the checkpoint differ in buffers; only one of them has {names}")
    for name, array in arrays.items():
        if (loaded[name].shape, loaded[name].dtype) != (array.shape, array.dtype):
            raise UsageError(f"{where}: the buffer {name} has another shape or type in the checkpoint than here")
        device_of(array).copy_in(array, loaded[name])
