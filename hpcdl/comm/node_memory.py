"""Shared memory of a communicator's ranks on one node: flags, scratch blocks, vectors (see kernels/shared.py).
Operations in flight take turns in the order of their start, which is the same on all ranks."""

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl import shared_memory
from hpcdl.comm.collective_schedule import Step, Until
from hpcdl.comm.diagnostics.call_signature import KINDS, TYPES, describe_call, mismatch_message
from hpcdl.comm.operations import CODES, SUM, Reduction, reducible
from hpcdl.comm.progress import SPINS, YIELDS, activity, attribute_key, clock
from hpcdl.errors import AgreedError, UsageError
from hpcdl.kernels import shared as kernels
from hpcdl.time_slice import request_short_slice

MESSAGES = "ranks exchange messages instead"


class NodeMemory:
    """The shared memory of a node. comm, rank, size: of its ranks. usable: True if all nodes have room. nodes: number
    of nodes. firsts: each node's first rank, its leader. shared: True if usable, by several ranks, all on one node."""

    def __init__(self, comm: MPI.Intracomm):
        self.comm = ranks_of_node(comm)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.ranks = self.comm.allgather(comm.rank)  # of this node, numbered as in `comm`
        firsts = comm.allgather(self.ranks[0])  # the first rank of each rank's node
        self.firsts = sorted(set(firsts))
        self.nodes, self.ranks_per_node = len(self.firsts), max(map(firsts.count, self.firsts))
        self.queue: deque[Iterator[Step]] = deque()  # operations in flight
        self.state = np.zeros(kernels.WORDS, np.int64)
        self.words = memoryview(self.state)  # type: ignore[arg-type]  # a view with faster access to single words
        self.state[kernels.RANK], self.state[kernels.SLICED] = self.rank, request_short_slice()
        self.state[kernels.SPINS] = self.state[kernels.MOST_SPINS] = SPINS
        self.places = np.empty((0, 1 + self.size), np.int64)
        self.parts: list[list[np.ndarray]] = []
        self.dropped: set[int] = set()  # rows of `places` whose vector this rank has dropped
        self.empty_rows: list[int] = []  # of `places`; equal on all ranks
        made = self.size == 1 or self._share(kernels.BYTES, "an all-reduce in shared memory", MESSAGES) is not None
        self.usable = comm.allreduce(made, MPI.LAND)
        self.shared = self.usable and self.nodes == 1 and self.size > 1
        self.arrived = Until(lambda: bool(self._arrived(0)) or self._progress(), self._await_arrival)

    def _share(self, size: int, what: str, otherwise: str) -> int | None:
        """Allocate `size` bytes per rank; return their row in `places`, or None, with a warning, if room is lacking."""
        parts = shared_memory.share(self.comm, size, what, otherwise)
        if parts is None:
            return None
        row = self.empty_rows.pop() if self.empty_rows else len(self.parts)
        if row == len(self.parts):
            self.places = np.vstack([self.places, np.zeros_like(self.places, shape=(1, 1 + self.size))])
            self.parts.append([])
        self.places[row] = [size, *(part.ctypes.data for part in parts)]
        self.parts[row] = parts  # others may still use their parts when this rank has dropped its vector
        return row

    def empty(self, n: int, dtype: np.dtype) -> np.ndarray | None:
        """Return a vector of n elements that all ranks of the node can access, or None; collective over the node."""
        if not self.usable or self.size == 1 or n == 0 or not reducible(dtype):
            return None
        with activity.inside("empty"):
            for row in sorted(set.intersection(*self.comm.allgather(set(self.dropped)))):  # all ranks have dropped it
                self.places[row] = 0  # 0 bytes: an empty row
                self.parts[row] = []
                self.empty_rows.append(row)
                self.dropped.discard(row)
            made = self._share(n * dtype.itemsize, "a vector for each rank", "each rank keeps its own")
        self._compile(dtype)  # before the first timed step
        if made is None:
            return None
        lent = ArrayOwner(self.parts[made][self.rank][: n * dtype.itemsize])
        weakref.finalize(lent, self.dropped.add, made).atexit = False
        return np.asarray(lent).view(dtype)

    def _compile(self, dtype: np.dtype) -> None:
        """Compile the loops for this element type now: it takes seconds, which a watchdog could take for a hang."""
        loops = [kernels.all_reduce] if self.nodes == 1 else kernels.OVER_NODES
        for loop, kind in [*((loop, dtype) for loop in loops), *((loop, np.dtype(np.int64)) for loop in kernels.FLAGS)]:
            if kind not in loop.compiled:
                loop.compile(kind)

    def _arrived(self, looks: int) -> int:
        return self._agreed(kernels.arrived(self.places, self.state, looks))

    def _agreed(self, found: int) -> int:
        """Return `found`, true when all ranks have arrived; UsageError if the ranks' calls differ."""
        if found == kernels.DIFFER:
            self.words[kernels.PHASE], self.words[kernels.START] = kernels.BEGIN, 0
            calls, kind = {}, AgreedError if self.nodes == 1 else UsageError
            for rank, part in zip(self.ranks, self.parts[0], strict=True):
                word = int(part[: kernels.LINE].view(np.int64)[4 + self.words[kernels.COUNT] % 2])  # a `call_code`
                call = "all_reduce", KINDS[(word >> 2) % 64], word >> 8, list(CODES)[word & 3], 0
                calls[rank] = describe_call(call)
            raise kind(mismatch_message(calls))
        return found

    def _await_arrival(self) -> None:
        while not self._arrived(YIELDS):
            self._progress()

    def _progress(self) -> bool:
        """Let MPI progress: others may wait for a message of this rank or its exposed memory. Returns False."""
        return self.comm.Iprobe()  # no message ever arrives on this communicator

    def turn(self, steps: Iterator[Step], dtype: np.dtype) -> Iterator[Step]:
        """Yield `steps` after the steps of all operations started before have ended. dtype: of the vector to reduce."""
        self.queue.append(steps)
        self._compile(dtype)
        try:
            yield Until(lambda: self.queue[0] is steps)
            yield from steps
        finally:
            self.queue.remove(steps)

    def take_written(self) -> int:
        """Return the bytes that this rank has written to or copied from shared memory since the last call."""
        written, self.words[kernels.WRITTEN] = self.words[kernels.WRITTEN], 0
        return written

    def _advance(self, vector: np.ndarray, op: Reduction, looks: int) -> int:
        return self._agreed(kernels.all_reduce(vector, self.places, self.state, call_code(vector, op), looks))

    def all_reduce(self, vector: np.ndarray, op: Reduction = SUM) -> None:
        """Reduce `vector` over the ranks of the node, in place."""
        while not self._advance(vector, op, YIELDS):
            self._progress()

    def reducer(self, like: np.ndarray, op: Reduction) -> Callable[[np.ndarray], tuple[int, int]]:
        """Return the all-reduce for writable vectors like `like`; it returns nanoseconds waited and bytes moved."""
        self._compile(like.dtype)
        loop, state, call = kernels.all_reduce.version(like.dtype), self.state, call_code(like, op)
        words, waited, written = self.words, kernels.WAITED, kernels.WRITTEN
        done = kernels.DONE

        def reduce(vector: np.ndarray) -> tuple[int, int]:
            before = words[waited]
            while (found := loop(vector, self.places, state, call, YIELDS)) != done:
                self._agreed(found)
                start = clock()
                self._progress()
                words[waited] += clock() - start
            count, words[written] = words[written], 0
            return words[waited] - before, count

        return reduce

    def steps(self, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
        """Yield the steps of the node's all-reduce."""
        while not self._advance(vector, op, 0):
            yield self.arrived

    # -- several nodes: all ranks of a node add into the vector of its rank 0, the leader, and copy the result ------

    def offered(self, vector: np.ndarray, start: int) -> np.ndarray:
        """Return the values offered to the node: the vector itself from `start` on, or this rank's scratch block."""
        if kernels.in_window(self.places, self.state):
            return vector[start:]
        return self.parts[0][self.rank][kernels.SCRATCH : kernels.BYTES].view(vector.dtype)

    def published(self) -> Until:
        """Return a step that waits until the leader has published the next piece."""
        self.state[kernels.PUBLISHED] += 1
        count = self.state[kernels.PUBLISHED]
        return Until(lambda: kernels.published(self.places, count) or self._progress())

    def free(self) -> None:
        """Release the memory; vectors in it live as long as arrays refer to them."""
        self.parts, self.places = [], self.places[:0]
        self.comm.Free()


class ArrayOwner:
    """Keeps a part of the shared memory alive as long as an array over that part exists."""

    def __init__(self, part: np.ndarray):
        self.part, self.__array_interface__ = part, part.__array_interface__


class SubsetCommunicator:
    """A subset of a communicator's ranks, numbered from 0, with the methods that all-reduce algorithms use."""

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
    """Return a communicator of the ranks of `comm` on this node; collective."""
    return comm.Split_type(MPI.COMM_TYPE_SHARED)  # type: ignore[return-value]


def spans_nodes(comm: MPI.Intracomm) -> bool:
    """Return True if the ranks of `comm` are on several nodes; collective."""
    with activity.inside("ranks of the node"):
        here = ranks_of_node(comm)
    several = here.Get_size() < comm.Get_size()
    here.Free()
    return several


def cores(comm: MPI.Intracomm) -> int:
    """Return the number of cores that the ranks of a node may use together; collective."""
    return len(set().union(*comm.allgather(os.sched_getaffinity(0))))


def call_code(vector: np.ndarray, op: Reduction) -> int:
    """Encode length, type and operation as one number, which the kernels compare."""
    return (vector.size * 64 + TYPES[vector.dtype]) * 4 + CODES[op.name]


def known_memory(comm: MPI.Intracomm) -> Any:
    """Return the node memory of this communicator, None if it has none yet."""
    return comm.Get_attr(attribute_key("node memory"))


def node_memory(comm: MPI.Intracomm) -> NodeMemory:
    """Return the node memory of this communicator. The first call makes it, and is collective."""
    memory = known_memory(comm)
    if memory is None:
        with activity.inside("node memory"):
            memory = NodeMemory(comm)
        comm.Set_attr(attribute_key("node memory"), memory)
    return memory
