"""What a checkpoint holds of a run: named vectors, however they lie on the ranks, gathered on rank 0 and given back.

    Same         the same on all ranks                       stored as it is on rank 0
    PerRank      each rank's own, of one length on all       ranks/NAME, a row for each rank: the number of ranks stays
    Summed       of each rank a summand of one vector        the sum, which rank 0 has when the run goes on, others 0
    CutVector    of each rank a part (cut_vector.py)         the whole vector, for any number of ranks and any cut
    Elsewhere    on other ranks that rank 0 can ask          the whole vector
    Loose        on rank 0, of any length, or not there      as it is

Each of them has a name, a shape and a type in the file, `gather` and `scatter`: the state neither knows nor asks which
it has.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.errors import UsageError, reason
from hpcdl.kernels.device import Array, device_of
from hpcdl.runs.checkpoint import Checkpoint

NOT_FINITE, UNWRITTEN = "not finite", "unwritten"


class Tracked(Protocol):
    """A vector of a run's state, as this rank knows it."""

    def stored(self, name: str) -> str:
        """Its name in the file."""

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        """Its shape and type in the file of a run on so many ranks."""

    def gather(self, comm: Communicator) -> np.ndarray | None:
        """The whole vector, on the host of rank 0; None elsewhere. Collective."""

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        """Give all ranks what is theirs of the whole vector that rank 0 has; collective."""


class Same:
    """`array` is the same on all ranks."""

    def __init__(self, array: Array):
        self.array = array

    def stored(self, name: str) -> str:
        return name

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        return self.array.shape, self.array.dtype

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


class Summed:
    """`array` is this rank's summand of one vector; to which rank a part of the sum belongs does not matter."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def stored(self, name: str) -> str:
        return name

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        return self.array.shape, self.array.dtype

    def gather(self, comm: Communicator) -> np.ndarray | None:
        total = self.array.copy()
        comm.reduce(total)
        return total if comm.rank == 0 else None

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        self.array[...] = 0 if whole is None else whole


class Elsewhere:
    """A vector that lies in parts elsewhere: read() -> vector, write(vector). Tracked by rank 0 alone.

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
    """Whether it may hold what is no finite number (extra.py)."""
    return getattr(vector, "may_be_infinite", False)


class Loose:
    """An array of any form that rank 0 has, or none: read() -> array or None, write(array).

    A checkpoint without it is gone on with, too, and write is not called then.
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


def described(shape: tuple[int, ...], dtype: np.dtype) -> str:
    """A vector's form, for people."""
    return f"{' x '.join(map(str, shape)) or 'one'} of {dtype}"


class State:
    """The vectors by name, as this rank knows them; the ranks of the communicator that is handed over know the same."""

    def __init__(self) -> None:
        self.tracked: dict[str, Tracked] = {}

    def track(self, name: str, vector: Tracked) -> None:
        """Make it part of each checkpoint."""
        self.tracked[name] = vector

    def check_vectors(self, found: Checkpoint, ranks: int, refusal: str) -> None:
        """Raise UsageError where the vectors of a checkpoint are others, or of another form or number of ranks."""
        wanted = {vector.stored(name) for name, vector in self.tracked.items() if not isinstance(vector, Loose)}
        if set(found.vectors) - self._loose != wanted:
            raise UsageError(f"{refusal} state is {', '.join(sorted(found.vectors))}, not {', '.join(sorted(wanted))}")
        for name, vector in self.tracked.items():
            if vector.stored(name) in self._loose:
                continue
            whole, form = found.vectors[vector.stored(name)], vector.form(ranks)
            if isinstance(vector, PerRank) and whole.ndim == 2 and len(whole) != ranks:
                before = len(whole)
                raise UsageError(f"{refusal} {name} belongs to its {before} ranks; start {before}, not {ranks}")
            if (whole.shape, whole.dtype) != form:
                raise UsageError(f"{refusal} {name} is {described(whole.shape, whole.dtype)}, not {described(*form)}")
            if not (may_be_infinite(vector) or np.isfinite(whole).all()):
                raise UsageError(f"{refusal} {name} is not finite, which no run saves")

    def gather(self, comm: Communicator) -> dict[str, np.ndarray]:
        """The whole vectors by their names in the file, on rank 0; nothing on the others. Collective."""
        gathered = {}
        for name, vector in self.tracked.items():
            whole = vector.gather(comm)
            if whole is not None:
                gathered[vector.stored(name)] = whole
        return gathered

    def write(self, comm: Communicator, attributes: dict, write: Callable[[Checkpoint], None]) -> str:
        """Let rank 0 write a checkpoint; returns, on all ranks, what is in the way: NOT_FINITE, a reason, or nothing.

        A checkpoint is always a good one: a state that is not finite is not written. The reason is known on rank 0,
        the others say UNWRITTEN. Collective.
        """
        vectors, problem, failed = self.gather(comm), "", np.zeros(1)
        if comm.rank == 0:
            free = {each.stored(name) for name, each in self.tracked.items() if may_be_infinite(each)}
            if not all(np.isfinite(vector).all() for name, vector in vectors.items() if name not in free):
                problem = NOT_FINITE
            else:
                try:
                    write(Checkpoint(vectors, attributes))
                except Exception as error:  # whatever h5py raises: all ranks are to know
                    problem = reason(error)
            failed[0] = {"": 0, NOT_FINITE: 1}.get(problem, 2)
        comm.broadcast(failed)
        return problem or ("", NOT_FINITE, UNWRITTEN)[int(failed[0])]

    def load(self, comm: Communicator, found: Checkpoint | None) -> None:
        """Give all ranks what is theirs of the checkpoint that rank 0 has read; collective."""
        for name in sorted(self.tracked):
            vector = self.tracked[name]
            vector.scatter(comm, found.vectors.get(vector.stored(name)) if found else None)

    @property
    def _loose(self) -> set[str]:
        """The names of what a checkpoint may have in any form, or not at all."""
        return {vector.stored(name) for name, vector in self.tracked.items() if isinstance(vector, Loose)}
