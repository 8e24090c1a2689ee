"""State of a run for checkpoints: named vectors, collected from the ranks and given back.

    Same            the same on all ranks                       stored as on rank 0
    PerRank         each rank's own, equally long               ranks/NAME, a row per rank: the number of ranks is fixed
    KeptResidual    as PerRank; only the ranks' sum counts      ranks/NAME; other ranks get sums of rows
    Summed          each rank has a summand of one vector       the sum; loaded to rank 0, other ranks get 0
    CutVector       each rank has a part (sharded_vector.py)    the whole vector, for any number of ranks and any cut
    RemoteVector    on other ranks that rank 0 can ask          the whole vector
    OptionalArray   on rank 0, of any length, or missing        unchanged

Each has a name, a shape and a type in the file, and passes through rank 0 (`gather` and `scatter`). For a cut vector
each rank writes and reads its own part (shards.py), if all ranks see the same files."""

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint, Stored, form_of, slabs_of
from hpcdl.checkpoint.sharded_vector import CutVector
from hpcdl.checkpoint.shards import Portion
from hpcdl.comm import Communicator, refuse_together
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array, device_of


class Tracked(Protocol):
    """A vector of a run's state, from this rank's view."""

    def stored(self, name: str) -> str:
        """Return the vector's name in the file, by default `name`."""
        return name

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        """Return the vector's shape and type in the file of a run on so many ranks."""

    def gather(self, comm: Communicator) -> np.ndarray | None:
        """Return the whole vector, on the host of rank 0; None elsewhere. Collective."""

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        """Give all ranks their parts of rank 0's vector; collective."""


class OneArray(Tracked):
    """A vector that stands in the file in the shape and type of `array`."""

    def __init__(self, array: Array):
        self.array = array

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        return self.array.shape, self.array.dtype


class Same(OneArray):
    """A vector `array` that is the same on all ranks."""

    def gather(self, comm: Communicator) -> np.ndarray | None:
        return device_of(self.array).host(self.array) if comm.rank == 0 else None

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        if whole is not None:
            device_of(self.array).copy_in(self.array, whole)
        comm.broadcast(self.array)


class PerRank(OneArray):
    """A vector `array` that is this rank's own; the vectors of all ranks have the same length."""

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


class KeptResidual(PerRank):
    """A vector `array` of this rank's own, of which only the sum over the ranks counts (what compressed messages have
    left out). Ranks of another number get the rows of the file in turn, and add theirs: the sum stays."""

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        if whole is not None and len(whole) != comm.size:
            rows = np.zeros((comm.size, self.array.size), self.array.dtype)
            for number, row in enumerate(whole):
                rows[number % comm.size] += row
            whole = rows
        super().scatter(comm, whole)


class Summed(OneArray):
    """A vector that is the sum of the ranks' arrays `array`; how the sum is divided among ranks does not matter."""

    def gather(self, comm: Communicator) -> np.ndarray | None:
        total = self.array.copy()
        comm.reduce(total)
        return total if comm.rank == 0 else None

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        self.array[...] = 0 if whole is None else whole


class RemoteVector(OneArray):
    """A vector on other ranks, tracked by rank 0: read() -> vector, write(vector). like: an array of the same form."""

    def __init__(self, read: Callable[[], np.ndarray], write: Callable[[np.ndarray], None], like: Array):
        super().__init__(like)
        self.read, self.write = read, write

    def gather(self, comm: Communicator) -> np.ndarray | None:
        return self.read()

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        assert whole is not None
        self.write(whole)


def may_be_infinite(vector: Tracked) -> bool:
    """True if the vector may hold infinite values (buffers.py)."""
    return getattr(vector, "may_be_infinite", False)


class OptionalArray(Tracked):
    """An array on rank 0, of any shape. read() -> array, None if missing. write(array): if a checkpoint has one."""

    def __init__(self, read: Callable[[], np.ndarray | None], write: Callable[[np.ndarray], None]):
        self.read, self.write = read, write

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
    """Return the vectors of rank 0's checkpoint, or None unless all ranks see the file and its pieces; collective."""
    vectors = found.vectors if found is not None and isinstance(found.vectors, Stored) else None
    with comm.inside("look for the checkpoint"):
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

    def check_vectors(self, found: Checkpoint, ranks: int, refusal: str) -> None:
        """Raise UsageError, which begins with `refusal`, if a checkpoint's vectors are not this run's in name, form and
        number of ranks, or not finite."""
        wanted = {vector.stored(name) for name, vector in self.tracked.items() if not isinstance(vector, OptionalArray)}
        if set(found.vectors) - self._loose != wanted:
            mine, theirs = (", ".join(sorted(names)) for names in (wanted, found.vectors))
            raise UsageError(f"{refusal} state is {theirs}; but this run's state is {mine}")
        for name, vector in self.tracked.items():
            if vector.stored(name) in self._loose:
                continue
            (shape, dtype), form = form_of(found.vectors, vector.stored(name)), vector.form(ranks)
            if isinstance(vector, PerRank) and len(shape) == 2 and shape[0] != ranks:
                before = shape[0]
                if not isinstance(vector, KeptResidual):
                    what = f"belongs to its {before} ranks; start {before} ranks, not {ranks}"
                    raise UsageError(f"{refusal} {name} {what}")
                form = vector.form(before)
            if (shape, dtype) != form and shape not in getattr(vector, "older_shapes", ()):
                raise UsageError(f"{refusal} {name} is {form_text(shape, dtype)}, not {form_text(*form)}")
            read_apart = isinstance(vector, CutVector) and isinstance(found.vectors, Stored)  # and checked by `load`
            if not (may_be_infinite(vector) or read_apart or finite(slabs_of(found.vectors, vector.stored(name)))):
                raise UsageError(f"{refusal} {name} is not finite, which no run saves")

    @property
    def cut(self) -> bool:
        """True if a vector is cut: each rank has a part of it."""
        return any(isinstance(vector, CutVector) for vector in self.tracked.values())

    def collect(self, comm: Communicator, apart: bool) -> tuple[dict[str, np.ndarray], dict[str, Portion], bool]:
        """Return (whole vectors on rank 0, this rank's portions if `apart`, True if the values of all ranks are
        finite); vectors and portions by names in the file, as views if possible. Collective."""
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
        """Give all ranks their parts of rank 0's checkpoint; collective. Raises AgreedError, which begins with
        `refusal`, if a rank reads its own part and the part is damaged or not finite."""
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
        return {vector.stored(name) for name, vector in self.tracked.items() if isinstance(vector, OptionalArray)}
