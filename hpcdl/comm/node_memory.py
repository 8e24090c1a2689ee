"""The memory that the ranks of one node share on behalf of a communicator: flags, scratch blocks, vectors.

    memory = node_memory(comm)       that of this communicator; the first call makes it and is collective
    memory.empty(n, dtype)           a vector that all ranks of the node reach (collective)
    memory.all_reduce(vector)        over the ranks of the node; `steps` is its asynchronous form
    memory.leaders(comm)             one rank of each node, as a communicator

The loops, and what the flags mean, are in kernels/shared.py. Operations that are in flight together take turns, in the
order in which they were started, which is the same on all ranks.
"""

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl import shared_memory
from hpcdl.comm.collective_schedule import Step, Until
from hpcdl.comm.diagnostics.call_signature import KINDS, TYPES, differ, told
from hpcdl.comm.operations import SUM, Reduction, reducible
from hpcdl.comm.progress import activity, clock
from hpcdl.errors import AgreedError, UsageError
from hpcdl.kernels import shared as kernels

SPINS = 2000  # looks at flags between two offers of the core to other processes, where every rank has a core of its own
YIELDS = 50  # of the core before MPI and Python's signal handlers are given a turn; each may take a slice of some ms
CODES = {"sum": kernels.SUM, "max": kernels.MAX, "min": kernels.MIN, "mean": kernels.MEAN}
MESSAGES = "ranks exchange messages instead"


class NodeMemory:
    """What a rank knows of its node: its ranks (`comm`, `rank`, `size`), and the memory that they share.

    usable: whether there is room for it, on all nodes of the communicator. nodes: how many there are. shared: whether
    all ranks of the communicator share it, and are several.
    """

    def __init__(self, comm: MPI.Intracomm):
        self.comm = ranks_of_node(comm)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.ranks = self.comm.allgather(comm.rank)  # of this node, by their numbers in `comm`
        firsts = comm.allgather(self.ranks[0])  # of each rank, the first rank of its node
        self.firsts = sorted(set(firsts))
        self.nodes, self.ranks_per_node = len(self.firsts), max(map(firsts.count, self.firsts))
        spins = SPINS if self.size <= cores(self.comm) else 1
        self.patience = YIELDS * spins  # looks
        self.queue: deque[Iterator[Step]] = deque()  # operations in flight
        self.state = np.zeros(kernels.WORDS, np.int64)
        self.words = memoryview(self.state)  # type: ignore[arg-type]  # the same, faster to read one by one
        self.state[kernels.RANK], self.state[kernels.SPINS] = self.rank, spins
        self.places = np.empty((0, 1 + self.size), np.int64)
        self.parts: list[list[np.ndarray]] = []
        self.dropped: set[int] = set()  # rows of `places` whose vector this rank no longer has
        self.empty_rows: list[int] = []  # of `places`: the same on all ranks
        made = self.size == 1 or self._share(kernels.BYTES, "an all-reduce in shared memory", MESSAGES) is not None
        self.usable = comm.allreduce(made, MPI.LAND)
        self.shared = self.usable and self.nodes == 1 and self.size > 1
        self.arrived = Until(lambda: bool(self._arrived(0)) or self._progress(), self._await_arrival)

    def _share(self, size: int, what: str, otherwise: str) -> int | None:
        """Memory of `size` bytes for each rank: its row in `places`, or None where there is no room."""
        parts = shared_memory.share(self.comm, size, what, otherwise)
        if parts is None:
            return None
        row = self.empty_rows.pop() if self.empty_rows else len(self.parts)
        if row == len(self.parts):
            self.places = np.vstack([self.places, np.zeros_like(self.places, shape=(1, 1 + self.size))])
            self.parts.append([])
        self.places[row] = [size, *(part.ctypes.data for part in parts)]
        self.parts[row] = parts  # others may still use theirs when this rank's vector is gone
        return row

    def _take_back(self) -> None:
        """Let the memory go of the vectors that no rank has any more; collective over the node."""
        for row in sorted(set.intersection(*self.comm.allgather(set(self.dropped)))):
            self.places[row] = 0  # bytes: no vector lies in it
            self.parts[row] = []
            self.empty_rows.append(row)
            self.dropped.discard(row)

    def empty(self, n: int, dtype: np.dtype) -> np.ndarray | None:
        """A vector of n elements that all ranks of the node reach, or None; collective over the node."""
        if not self.usable or self.size == 1 or n == 0 or not reducible(dtype):
            return None
        with activity.inside("empty"):
            self._take_back()
            row = self._share(n * dtype.itemsize, "a vector for each rank", "each rank keeps its own")
        self._compile(dtype)  # now, and not when the first step is timed
        if row is None:
            return None
        lent = Lent(self.parts[row][self.rank][: n * dtype.itemsize])
        weakref.finalize(lent, self.dropped.add, row).atexit = False
        return np.asarray(lent).view(dtype)

    def _compile(self, dtype: np.dtype) -> None:
        """Have the loops for this element type at hand: compiling takes seconds, which a watchdog takes for a hang."""
        loops = [kernels.all_reduce] if self.nodes == 1 else kernels.OVER_NODES
        for loop, kind in [*((loop, dtype) for loop in loops), *((loop, np.dtype(np.int64)) for loop in kernels.FLAGS)]:
            if kind not in loop.compiled:
                loop.compile(kind)

    def leaders(self, comm: MPI.Intracomm) -> "Members":
        """The first rank of each node, as a communicator whose messages pass through `comm`."""
        return Members(comm, self.firsts)

    # -- flags and turns ---------------------------------------------------------------------------------------------

    def _arrived(self, looks: int) -> int:
        return self._same(kernels.arrived(self.places, self.state, looks))

    def _same(self, found: int) -> int:
        """The same again, which is true when all have come; UsageError where the ranks' calls differ."""
        if found == kernels.DIFFER:
            self.words[kernels.PHASE], self.words[kernels.START] = kernels.BEGIN, 0
            words = [part[: kernels.LINE].view(np.int64)[4 + self.words[kernels.COUNT] % 2] for part in self.parts[0]]
            kind = AgreedError if self.nodes == 1 else UsageError
            raise kind(differ(dict(zip(self.ranks, map(read_call, words), strict=True))))
        return found

    def begin(self, vector: np.ndarray, op: Reduction) -> None:
        """What follows is this operation on this vector: all ranks of the node compare what they call."""
        self.words[kernels.CALL] = call_of(vector, op)

    def _await_arrival(self) -> None:
        while not self._arrived(self.patience):
            self._progress()

    def _progress(self) -> bool:
        """Give MPI a turn: others may need it, for a message that this rank has sent or for what it exposes. False."""
        return self.comm.Iprobe()  # nothing ever comes here: a message would end the turn at once

    def turn(self, steps: Iterator[Step], dtype: np.dtype) -> Iterator[Step]:
        """Run the generator `steps` when all that were started before it are done; dtype: of its vector."""
        self.queue.append(steps)
        self._compile(dtype)
        try:
            yield Until(lambda: self.queue[0] is steps)
            yield from steps
        finally:
            self.queue.remove(steps)

    def take_written(self) -> int:
        """Bytes that this rank has written to shared memory, or copied from there, since it was last asked."""
        written, self.words[kernels.WRITTEN] = self.words[kernels.WRITTEN], 0
        return written

    # -- the all-reduce of one node ----------------------------------------------------------------------------------

    def _advance(self, vector: np.ndarray, op: Reduction, looks: int) -> int:
        return self._same(kernels.all_reduce(vector, self.places, self.state, call_of(vector, op), looks))

    def all_reduce(self, vector: np.ndarray, op: Reduction = SUM) -> None:
        """Reduce `vector` over the ranks of the node, in place."""
        while not self._advance(vector, op, self.patience):
            self._progress()

    def reducer(self, like: np.ndarray, op: Reduction) -> Callable[[np.ndarray], tuple[int, int]]:
        """The same, as a function of vectors as `like` that can be written to, with nothing left to look up.

        It returns the nanoseconds for which it waited, and the bytes that `take_written` would have given.
        """
        self._compile(like.dtype)
        loop, state, call = kernels.all_reduce.version(like.dtype), self.state, call_of(like, op)
        words, waited, written = self.words, kernels.WAITED, kernels.WRITTEN
        patience, done = self.patience, kernels.DONE

        def reduce(vector: np.ndarray) -> tuple[int, int]:
            before = words[waited]
            while (found := loop(vector, self.places, state, call, patience)) != done:
                self._same(found)
                start = clock()
                self._progress()
                words[waited] += clock() - start
            count, words[written] = words[written], 0
            return words[waited] - before, count

        return reduce

    def steps(self, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
        """The same, asynchronously."""
        while not self._advance(vector, op, 0):
            yield self.arrived

    # -- one node of several: rank 0 of the node leads, the others add into its vector, all copy from there ----------

    def offer(self, vector: np.ndarray, start: int) -> None:
        """Offer the vector from element `start` on, or a copy of its next block, to the node."""
        kernels.offer_from(vector, start, self.places, self.state)

    def offered(self, vector: np.ndarray, start: int) -> np.ndarray:
        """Where what this rank offers lies: the vector itself, from `start` on, or its scratch block."""
        if kernels.in_window(self.places, self.state):
            return vector[start:]
        return self.parts[0][self.rank][kernels.SCRATCH : kernels.BYTES].view(vector.dtype)

    def add_to_leader(self, vector: np.ndarray, first: int, size: int, op: Reduction) -> None:
        """Add this rank's share of all vectors of the node, from `first` on, into the leader's; raise the flag."""
        kernels.add_to_leader(vector, first, size, self.places, self.state, CODES[op.name])

    def post(self) -> None:
        """Raise this rank's flag."""
        kernels.raise_flag(self.places, self.state)

    def publish(self) -> None:
        """Tell the node that one more piece of the leader's vector is complete."""
        kernels.publish(self.places, self.state)

    def published(self) -> Until:
        """Until the next piece is complete."""
        self.state[kernels.PUBLISHED] += 1
        count = self.state[kernels.PUBLISHED]
        return Until(lambda: kernels.published(self.places, count) or self._progress())

    def copy_from_leader(self, into: np.ndarray, first: int) -> None:
        """into <- the leader's values, from `first` on in what it offers."""
        kernels.copy_from_leader(into, first, self.places, self.state)

    def free(self) -> None:
        """Let the memory go: vectors in it last as long as they are used."""
        self.parts, self.places = [], self.places[:0]
        self.comm.Free()


class Lent:
    """A part of the shared memory that lives as long as an array over it."""

    def __init__(self, part: np.ndarray):
        self.part, self.__array_interface__ = part, part.__array_interface__


class Members:
    """Some ranks of a communicator, numbered from 0, for an algorithm among them; None of its other methods."""

    def __init__(self, comm: MPI.Intracomm, ranks: list[int]):
        self.comm, self.ranks = comm, ranks

    def Get_rank(self) -> int:
        return self.ranks.index(self.comm.Get_rank())

    def Get_size(self) -> int:
        return len(self.ranks)

    def Isend(self, buffer: np.ndarray, to: int, tag: int = 0) -> MPI.Request:
        return self.comm.Isend(buffer, self.ranks[to], tag)

    def Irecv(self, buffer: np.ndarray, source: int, tag: int = 0) -> MPI.Request:
        return self.comm.Irecv(buffer, self.ranks[source], tag)


def ranks_of_node(comm: MPI.Intracomm) -> MPI.Intracomm:
    """The ranks of `comm` on this rank's node; collective."""
    return comm.Split_type(MPI.COMM_TYPE_SHARED)  # type: ignore[return-value]


def cores(comm: MPI.Intracomm) -> int:
    """How many cores the ranks of a node may run on, all together; collective."""
    return len(set().union(*comm.allgather(os.sched_getaffinity(0))))


def call_of(vector: np.ndarray, op: Reduction) -> int:
    """Length, type and operation in one number, as the kernels compare it."""
    return (vector.size * 64 + TYPES[vector.dtype]) * 4 + CODES[op.name]


def read_call(word: int) -> str:
    """What such a number says."""
    size, kind = divmod(int(word) >> 2, 64)
    return told(("all_reduce", KINDS[kind], size, list(CODES)[int(word) & 3], 0))


KEY = MPI.Comm.Create_keyval()


def node_memory(comm: MPI.Intracomm) -> NodeMemory:
    """The node memory of this communicator; collective at the first call."""
    memory: Any = comm.Get_attr(KEY)
    if memory is None:
        with activity.inside("node memory"):
            memory = NodeMemory(comm)
        comm.Set_attr(KEY, memory)
    return memory
