"""State of a run for checkpoints: named vectors, collected from the ranks and given back.

    Same            the same on all ranks                       stored as on rank 0
    PerRank         each rank's own, equally long               ranks/NAME, a row per rank: the number of ranks is fixed
    Summed          each rank has a summand of one vector       the sum; loaded to rank 0, others get 0
    CutVector       each rank has a part (sharded_vector.py)    the whole vector, for any number of ranks and any cut
    RemoteVector    on other ranks that rank 0 can ask          the whole vector
    OptionalArray   on rank 0, of any length, or missing        unchanged

Each has a name, a shape and a type in the file, and passes through rank 0 (`gather` and `scatter`). For a cut vector
each rank writes and reads its own part (shards.py), if all ranks see the same files.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint, Stored, form_of, slabs_of
from hpcdl.checkpoint.sharded_vector import CutVector
from hpcdl.checkpoint.shards import Portion
from hpcdl.comm import Communicator, refuse_together
from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array, device_of


class Tracked(Protocol):
    """A vector of a run's state, from this rank's view."""

    def stored(self, name: str) -> str:
        """Return its name in the file."""

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        """Return its shape and type in the file of a run on so many ranks."""

    def gather(self, comm: Communicator) -> np.ndarray | None:
        """Return the whole vector, on the host of rank 0; None elsewhere. Collective."""

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        """Give all ranks their parts of rank 0's vector; collective."""


class OneArray:
    """A vector that stands in the file in the shape and type of `array`."""

    def __init__(self, array: Array):
        self.array = array

    def stored(self, name: str) -> str:
        return name

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        return self.array.shape, self.array.dtype


class Same(OneArray):
    """`array` is the same on all ranks."""

    def gather(self, comm: Communicator) -> np.ndarray | None:
        return device_of(self.array).host(self.array) if comm.rank == 0 else None

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        if whole is not None:
            device_of(self.array).copy_in(self.array, whole)
        comm.broadcast(self.array)


class PerRank:
    """`array` is this rank's own."""

    def __init__(self, array: Array):
        self.array = array

    def stored(self, name: str) -> str:
        return f"ranks/{name}"

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        return (ranks, self.array.size), self.array.dtype

    def gather(self, comm: Communicator) -> np.ndarray | None:
        if comm.rank > 0:
            comm.push(self.array, 0)
            return None
        rows = np.empty((comm.size, self.array.size), self.array.dtype)
        rows[0] = device_of(self.array).host(self.array)
        for rank in range(1, comm.size):
            comm.wait(rows[rank], rank)
        return rows

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        if whole is None:
            comm.wait(self.array, 0)
            return
        device_of(self.array).copy_in(self.array, whole[0])
        for rank in range(1, comm.size):
            comm.push(whole[rank], rank)


class Summed(OneArray):
    """`array` is this rank's summand of one vector; the distribution of the sum over ranks does not matter."""

    def gather(self, comm: Communicator) -> np.ndarray | None:
        total = self.array.copy()
        comm.reduce(total)
        return total if comm.rank == 0 else None

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        self.array[...] = 0 if whole is None else whole


class RemoteVector:
    """A vector distributed elsewhere: read() -> vector, write(vector). Tracked by rank 0 alone.

    like: an array of its shape and type.
    """

    def __init__(self, read: Callable[[], np.ndarray], write: Callable[[np.ndarray], None], like: Array):
        self.read, self.write, self.like = read, write, like

    def stored(self, name: str) -> str:
        return name

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        return self.like.shape, self.like.dtype

    def gather(self, comm: Communicator) -> np.ndarray | None:
        return self.read()

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        assert whole is not None
        self.write(whole)


def may_be_infinite(vector: Tracked) -> bool:
    """True if the vector may hold infinite values (buffers.py)."""
    return getattr(vector, "may_be_infinite", False)


class OptionalArray:
    """An optional array on rank 0, of any shape: read() -> array or None, write(array).

    A checkpoint without it can be resumed, too; write is not called then.
    """

    def __init__(self, read: Callable[[], np.ndarray | None], write: Callable[[np.ndarray], None]):
        self.read, self.write = read, write

    def stored(self, name: str) -> str:
        return name

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        raise NotImplementedError

    def gather(self, comm: Communicator) -> np.ndarray | None:
        return self.read() if comm.rank == 0 else None

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        if whole is not None:
            self.write(whole)


def finite(arrays: Iterable[np.ndarray]) -> bool:
    """True if all values are finite."""
    return all(bool(np.isfinite(each).all()) for each in arrays)


def visible_to_all(comm: Communicator, found: Checkpoint | None) -> Stored | None:
    """Return the vectors of rank 0's checkpoint if all ranks see the file and its pieces; collective."""
    vectors = found.vectors if found is not None and isinstance(found.vectors, Stored) else None
    with activity.inside("look for the checkpoint", comm):
        vectors = comm.mpi.bcast(vectors)
        seen = comm.mpi.allreduce(vectors is not None and vectors.visible(), MPI.LAND)
    return vectors if seen else None


def form_text(shape: tuple[int, ...], dtype: np.dtype) -> str:
    """Return a vector's shape and type for display."""
    return f"{' x '.join(map(str, shape)) or 'one'} of {dtype}"


class State:
    """Tracked vectors by name; the same names on all ranks of the communicator."""

    def __init__(self) -> None:
        self.tracked: dict[str, Tracked] = {}

    def track(self, name: str, vector: Tracked) -> None:
        """Add a vector to each checkpoint."""
        self.tracked[name] = vector

    def check_vectors(self, found: Checkpoint, ranks: int, refusal: str) -> None:
        """Raise UsageError if a checkpoint has other vectors, or vectors of another form or number of ranks."""
        wanted = {vector.stored(name) for name, vector in self.tracked.items() if not isinstance(vector, OptionalArray)}
        if set(found.vectors) - self._loose != wanted:
            raise UsageError(f"{refusal} state is {', '.join(sorted(found.vectors))}, not {', '.join(sorted(wanted))}")
        for name, vector in self.tracked.items():
            if vector.stored(name) in self._loose:
                continue
            (shape, dtype), form = form_of(found.vectors, vector.stored(name)), vector.form(ranks)
            if isinstance(vector, PerRank) and len(shape) == 2 and shape[0] != ranks:
                before = shape[0]
                raise UsageError(f"{refusal} {name} belongs to its {before} ranks; start {before}, not {ranks}")
            if (shape, dtype) != form and shape not in getattr(vector, "older_shapes", ()):
                raise UsageError(f"{refusal} {name} is {form_text(shape, dtype)}, not {form_text(*form)}")
            read_apart = isinstance(vector, CutVector) and isinstance(found.vectors, Stored)  # and looked at then
            if not (may_be_infinite(vector) or read_apart or finite(slabs_of(found.vectors, vector.stored(name)))):
                raise UsageError(f"{refusal} {name} is not finite, which no run saves")

    @property
    def cut(self) -> bool:
        """True if there is a vector of which each rank has a part."""
        return any(isinstance(vector, CutVector) for vector in self.tracked.values())

    def collect(self, comm: Communicator, apart: bool) -> tuple[dict[str, np.ndarray], dict[str, Portion], bool]:
        """Return (whole vectors on rank 0, this rank's own portions, True if all values are finite), by names in the
        file.

        Vectors are views if possible; there are no portions unless `apart`. Collective; the flag is the same on all
        ranks.
        """
        vectors: dict[str, np.ndarray] = {}
        portions: dict[str, Portion] = {}
        free = {each.stored(name) for name, each in self.tracked.items() if may_be_infinite(each)}
        for name, vector in self.tracked.items():
            if apart and isinstance(vector, CutVector) and vector.size:
                portions[vector.stored(name)] = vector.portion()
                continue
            whole = vector.gather(comm)
            if whole is not None:
                vectors[vector.stored(name)] = whole
        good = all(finite([vector]) for name, vector in vectors.items() if name not in free)
        bad = np.array([0.0 if good and all(finite(each.slabs()) for each in portions.values()) else 1.0])
        comm.all_reduce(bad)
        return vectors, portions, not bad[0]

    def load(self, comm: Communicator, found: Checkpoint | None, refusal: str = "") -> None:
        """Give all ranks their parts of rank 0's checkpoint; collective.

        Raises AgreedError, begun by `refusal`, if a rank that reads its own part finds it damaged, or not finite.
        """
        seen = visible_to_all(comm, found) if self.cut else None
        for name in sorted(self.tracked):
            vector = self.tracked[name]
            if seen is None or not isinstance(vector, CutVector):
                vector.scatter(comm, found.vectors.get(vector.stored(name)) if found else None)
                continue
            with refuse_together(comm.mpi):
                if not vector.read(vector.stored(name), seen):
                    raise UsageError(f"{refusal} {name} is not finite, which no run saves")

    @property
    def _loose(self) -> set[str]:
        """The names of optional vectors, of any form."""
        return {vector.stored(name) for name, vector in self.tracked.items() if isinstance(vector, OptionalArray)}
