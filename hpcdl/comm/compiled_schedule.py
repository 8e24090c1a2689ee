"""Schedules in compiled code: the fast path of algorithms whose steps are messages and additions.

`record` runs an algorithm's generator (collective_schedule.py) once for a vector's length and type, with a communicator
that sends nothing and notes its calls. kernels/schedule.py then executes the notes for each vector like it: the same
messages with the same tags, and the same additions in the same order. Python takes some 3 us more for each step.

An algorithm allows it by `Algorithm.fixed`. Its generator stays the reference, and the way to run it beside operations
in flight, on a GPU, in fault drills, after `survive`, and where MPI's functions are not found."""

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.collective_schedule import Step, Until
from hpcdl.comm.counting import TAGS, Counters, CountingIntracomm, size_class
from hpcdl.comm.operations import CODES, Reduction
from hpcdl.comm.progress import YIELDS, activity, clock
from hpcdl.kernels import schedule as kernels
from hpcdl.kernels import shared
from hpcdl.time_slice import request_short_slice

LONGEST = 1 << 20  # bytes of the longest vector: for longer ones Python's time does not count
SPINS = 64  # polls between two yields, at most
ALIGNED = 64  # bytes: scratch arrays begin at a cache line
NAMES = "MPI_Irecv", "MPI_Isend", "MPI_Issend", "MPI_Test"  # in the order of kernels.FUNCTIONS, kernels.TEST


class Recorder:
    """Stands for a communicator and a reduction while a generator runs; notes its calls as rows."""

    def __init__(self, comm: MPI.Intracomm, vector: np.ndarray):
        self.rank, self.size, self.vector = comm.Get_rank(), comm.Get_size(), vector
        self.rows: list[list[int]] = []
        self.free: list[int] = []  # slots
        self.slots = 0
        self.scratch: dict[int, tuple[int, np.ndarray]] = {}  # by address: offset and array, which is kept
        self.bytes = 0  # of scratch memory
        self.sent: Counter[tuple[int, int]] = Counter()  # messages, by receiver and bytes

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Irecv(self, buffer: np.ndarray, source: int, tag: int = 0) -> int:
        return self.message(kernels.RECEIVE, buffer, source, tag)

    def Isend(self, buffer: np.ndarray, to: int, tag: int = 0) -> int:
        self.sent[to, buffer.nbytes] += 1
        return self.message(kernels.SEND, buffer, to, tag)

    def Issend(self, buffer: np.ndarray, to: int, tag: int = 0) -> int:
        self.sent[to, buffer.nbytes] += 1
        return self.message(kernels.SYNCHRONOUS, buffer, to, tag)

    def message(self, action: int, buffer: np.ndarray, other: int, tag: int) -> int:
        """Note a message; return the slot of its request."""
        if not self.free:
            self.free.append(self.slots)
            self.slots += 1
        slot = self.free.pop()
        self.rows.append([action, other, tag, self.place(buffer), buffer.nbytes, slot, 0, 0])
        return slot

    def combine(self, into: np.ndarray, values: np.ndarray) -> None:
        """Note a reduction of values into another array of this length."""
        self.rows.append([kernels.COMBINE, 0, 0, self.place(into), into.nbytes, 0, self.place(values), 0])

    def place(self, part: np.ndarray) -> int:
        """Return where the part of an array lies: bytes from the vector's begin, or -1 - bytes in the scratch."""
        whole = part
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        offset = part.ctypes.data - whole.ctypes.data
        if whole is self.vector:
            return offset
        first, _ = self.scratch.setdefault(whole.ctypes.data, (self.bytes, whole))
        if first == self.bytes:
            self.bytes += -(-max(1, whole.nbytes) // ALIGNED) * ALIGNED
        return -1 - first - offset

    def run(self, steps: Iterator[Step]) -> None:
        """Run a generator to its end, and note its waits."""
        for step in steps:
            if isinstance(step, Until):
                raise TypeError("a fixed schedule waits for messages only")
            for slot in step:
                self.rows.append([kernels.WAIT, 0, 0, 0, 0, int(slot), 0, 0])  # type: ignore[call-overload]
                self.free.append(int(slot))  # type: ignore[call-overload]
        if len(self.free) != self.slots:
            raise TypeError("a fixed schedule waits for all its messages")


@dataclass(frozen=True)
class Schedule:
    """A recorded schedule. rows: of kernels/schedule.py. slots: requests in flight at once. scratch: bytes. messages,
    bytes: sent in all. sent: (receiver, class of sizes, messages, bytes)."""

    rows: np.ndarray
    slots: int
    scratch: int
    messages: int
    bytes: int
    sent: list[tuple[int, int, int, int]]


def record(steps: Callable[..., Iterator[Step]], comm: MPI.Intracomm, vector: np.ndarray, op: Reduction) -> Schedule:
    """Return the schedule of a generator steps(comm, vector, op) for vectors of this length and type."""
    made = Recorder(comm, np.empty_like(vector))
    made.run(steps(made, made.vector, Reduction(op.name, made.combine)))
    rows = np.array(made.rows, np.int64).reshape(-1, kernels.COLUMNS)
    sent = [(to, size_class(size), count, count * size) for (to, size), count in made.sent.items()]
    total = sum(size for *_, size in sent)
    return Schedule(rows, made.slots, made.bytes, made.sent.total(), total, sent)


def schedule_of(algorithm: Algorithm, comm: MPI.Intracomm, vector: np.ndarray, op: Reduction) -> Schedule | None:
    """Return the schedule of the algorithm for vectors like this one; None if compiled code cannot run it."""
    if algorithm.steps is None or not algorithm.fixed or vector.nbytes > LONGEST or functions() is None:
        return None
    return record(algorithm.steps, comm, vector, op)


def compile_for(dtype: np.dtype) -> None:
    """Compile, or load from the cache, what executes schedules for vectors of this type."""
    if dtype not in kernels.run.compiled:
        kernels.run.compile(dtype)


class ScheduleRunner:
    """Executes schedules on a communicator, one at a time."""

    def __init__(self, comm: MPI.Intracomm):
        state = self.state = np.zeros(kernels.WORDS, np.int64)
        state[shared.SPINS] = state[shared.MOST_SPINS] = SPINS
        state[shared.SLICED] = request_short_slice()
        handles = np.array([MPI._handleof(comm), MPI._handleof(MPI.BYTE)], np.uint64)
        state[kernels.COMM], state[kernels.BYTE] = handles.view(np.int64)
        state[kernels.REQUEST] = MPI._sizeof(MPI.Request)
        *starting, test = functions() or [0] * len(NAMES)
        state[kernels.TEST] = test
        state[kernels.FUNCTIONS : kernels.FUNCTIONS + len(starting)] = starting
        self.words = memoryview(state)  # type: ignore[arg-type]  # a view with faster access to single words
        self.requests, self.scratch = np.empty(0, np.uint8), np.empty(0, np.uint8)

    def make_room(self, requests: int, scratch: int) -> None:
        """Make room for this many bytes of requests and of scratch memory."""
        self.requests, self.scratch = at_least(self.requests, requests), at_least(self.scratch, scratch)
        self.state[kernels.REQUESTS] = self.requests.ctypes.data
        self.state[kernels.SCRATCH] = self.scratch.ctypes.data

    def abandon(self, vector: np.ndarray) -> None:
        """Give up the schedule that was interrupted: MPI may still use its memory."""
        activity.abandoned.append((vector, self.requests, self.scratch))
        self.words[kernels.ROW] = 0
        sizes = self.requests.nbytes, self.scratch.nbytes
        self.requests = self.scratch = np.empty(0, np.uint8)
        self.make_room(*sizes)

    def bind(self, schedule: Schedule, like: np.ndarray, op: Reduction) -> Callable[[np.ndarray], int]:
        """Return the function that executes this schedule for a vector; it returns nanoseconds waited."""
        self.make_room(schedule.slots * self.words[kernels.REQUEST], schedule.scratch)
        compile_for(like.dtype)
        loop, state, words, code = kernels.run.version(like.dtype), self.state, self.words, CODES[op.name]
        rows, waited, done, failed = schedule.rows, shared.WAITED, shared.DONE, kernels.FAILED

        def run(vector: np.ndarray) -> int:
            words[waited], begun, yields = 0, 0, YIELDS
            try:
                while (found := loop(vector, rows, state, code, yields)) != done:
                    if found == failed:
                        raise MPI.Exception(words[kernels.ERROR])
                    if activity.between_nodes:
                        before = clock()
                        begun = begun or before
                        yields = 1 if activity.nap_for_network(begun) else YIELDS
                        words[waited] += clock() - before
            except BaseException:
                self.abandon(vector)
                raise
            return words[waited]

        return run

    def counted(
        self, schedule: Schedule, like: np.ndarray, op: Reduction
    ) -> Callable[[np.ndarray, CountingIntracomm], int]:
        """Return `bind`'s function of a vector and the communicator that counts its messages."""
        run, words, lane = self.bind(schedule, like, op), self.words, kernels.LANE

        def counted(vector: np.ndarray, comm: CountingIntracomm) -> int:
            words[lane] = comm.lane * TAGS
            waited = run(vector)
            count_messages(schedule, comm.counters, comm.sent)
            return waited

        return counted


def count_messages(schedule: Schedule, counters: Counters, sent: dict[int, list[int]]) -> None:
    """Count the messages of a schedule, as if they were sent one by one."""
    counters.bytes += schedule.bytes
    if counters.messages is not None:
        counters.messages += schedule.messages
    for to, kind, count, size in schedule.sent:
        row = sent[to]
        row[kind] += count
        row[-1] += size


def at_least(memory: np.ndarray, size: int) -> np.ndarray:
    """Return this memory, or new memory of at least `size` bytes that begins at a cache line."""
    if memory.nbytes >= size:
        return memory
    fresh = np.empty(size + ALIGNED, np.uint8)
    return fresh[-fresh.ctypes.data % ALIGNED :][:size]


@functools.cache
def functions() -> list[int] | None:
    """Return the addresses of MPI's functions NAMES; None if they are not found."""
    for library in (None, MPI.__file__):  # a profiler that was loaded before comes first
        try:
            found = ctypes.CDLL(library)
            return [ctypes.cast(getattr(found, name), ctypes.c_void_p).value for name in NAMES]  # type: ignore[misc]
        except (OSError, AttributeError):
            continue
    return None
