"""The primitives of distributed learning, each blocking and, with a leading i, asynchronous.

    push       a rank sends data to another             wait/notify   pause until another rank gives a sign
    pull       a rank fetches data from another         barrier       pause until all ranks have come
    broadcast  one rank sends the same to all           all_reduce    reduce, and all ranks get the result
    reduce     combine the data of all on one rank      reduce_scatter, all_gather    the two halves of an all-reduce

`Communicator` is the one door through which messages leave. It checks buffers, chooses the algorithm, and counts and
times what passes; the algorithms (hpcdl/comm/allreduce/) know nothing of that.
"""

import time
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunk
from hpcdl.comm import barrier, counting
from hpcdl.comm.allreduce import algorithm
from hpcdl.comm.allreduce.mpi import mpi
from hpcdl.comm.allreduce.ring import all_gather, reduce_scatter
from hpcdl.comm.allreduce.tree import broadcast, reduce
from hpcdl.comm.counting import CountingIntracomm
from hpcdl.comm.exposed import Exposed
from hpcdl.comm.node import KEY
from hpcdl.comm.operations import operation
from hpcdl.comm.progress import activity, meet, nap_until
from hpcdl.comm.requests import Request
from hpcdl.comm.staging import staged, takes_device_arrays
from hpcdl.comm.trace import Timeline, Traffic
from hpcdl.comm.watchdog import Watchdog
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, device_of, on_device

ANY = MPI.ANY_SOURCE
PAIRS = ("push", "pull", "notify", "wait")  # operations of two ranks, which may never be answered


class Arrival(NamedTuple):
    """What `wait` received: from which rank, and how many elements."""

    source: int
    size: int


def flat(array: np.ndarray) -> np.ndarray:
    """A flat view of a contiguous array, which is what travels; anything else is refused."""
    if not isinstance(array, np.ndarray) and not on_device(array):
        raise UsageError(f"a message is a numpy array, not {type(array).__name__}")
    if not array.flags.c_contiguous:
        raise UsageError(
            f"a buffer of shape {array.shape} is not contiguous; pass np.ascontiguousarray(...) or a contiguous part"
        )
    if array.dtype.kind not in "biufc" or not array.dtype.isnative:
        raise UsageError(f"messages hold numbers that MPI knows, not {array.dtype}; convert the array first")
    return array.reshape(-1)


def once(start):
    """The steps of an operation of one message, which start() sends or receives; from here on its bytes count."""
    yield [start()]


class Communicator:
    """A group of ranks that exchange typed buffers; wraps an mpi4py communicator, which it duplicates.

    allreduce: name of the algorithm (see hpcdl/comm/allreduce/) or package.module:function. timeout: seconds
    after which a rank that waits in one operation is taken for hung; the job is ended with a report of which ranks
    wait where. 0: never. trace: how many spans to keep for the picture of the run. device: where `empty` allocates
    (hpcdl.kernels.device). Buffers are C-contiguous numpy arrays, or arrays on a GPU (hpcdl/comm/staging.py), of any
    shape and of any type that MPI knows (float32, float64, int64, ...). Making one, `split`, `duplicate`, `expose` and
    `free` are collective calls.
    """

    def __init__(
        self,
        comm: MPI.Intracomm = MPI.COMM_WORLD,
        allreduce: str = "auto",
        timeout: float = 0,
        trace: int = 0,
        device=CPU,
    ):
        self.device = device
        self._open(comm, "world", Traffic(), allreduce)
        self.direct = takes_device_arrays(self.mpi, device)
        self.timeline = Timeline(self.mpi, trace)
        self.watchdog = Watchdog(self.mpi, timeout) if timeout > 0 else None

    def use(self, allreduce: str) -> None:
        """Choose the all-reduce algorithm by name; a collective call, for some algorithms share memory."""
        self.allreduce, self.algorithm = allreduce, algorithm(allreduce)
        prepare = getattr(self.algorithm, "prepare", None)
        self.memory = prepare(self._collective) if prepare else None

    @property
    def exchange(self) -> str:
        """How all_reduce sends an array on its GPU: direct or staged (hpcdl/comm/staging.py)."""
        return "direct" if self.direct and getattr(self.algorithm, "direct", False) else "staged"

    def _open(self, comm, name, traffic, allreduce):
        self.name, self.traffic = name, traffic
        self.mpi, self._collective = comm.Dup(), comm.Dup()  # messages between two ranks; collective operations
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._pairs, self._sequence, self._opened, self._places = {}, 0, [], None
        self.use(allreduce)

    # -- groups ------------------------------------------------------------------------------------------------------

    def split(
        self, color: int | None, key: int | None = None, name: str = "group", allreduce: str | None = None
    ) -> "Communicator | None":
        """The group of all ranks that give the same color, ordered by key; None for a rank whose color is None.

        The group inherits trace and watchdog, and the algorithm unless `allreduce` names another.
        """
        color, key = MPI.UNDEFINED if color is None else color, self.rank if key is None else key
        meet(self.mpi, "split")
        with activity.inside("split"):
            part = self.mpi.Split(color, key)
        if part == MPI.COMM_NULL:
            return None
        group = self._derive(part, name, self.traffic, allreduce)
        part.Free()
        return group

    def duplicate(self, name: str, allreduce: str | None = None) -> "Communicator":
        """The same ranks with a traffic count of their own and no trace, for what is no part of the training."""
        meet(self.mpi, "duplicate")
        group = self._derive(self.mpi, name, Traffic(), allreduce)
        group.timeline = Timeline(group.mpi)
        return group

    def _derive(self, comm, name, traffic, allreduce=None):
        group = object.__new__(Communicator)
        group.device, group.direct = self.device, self.direct
        group.timeline, group.watchdog = self.timeline, None
        with activity.inside("duplicate"):
            group._open(comm, name, traffic, allreduce or self.allreduce)
        return group

    def empty(self, n: int | None = None, dtype="float32", like: np.ndarray | None = None) -> np.ndarray:
        """A flat vector of n elements, aligned to 64 bytes (whole cache lines); a collective call.

        Where the all-reduce algorithm gains from it, the other ranks of the node reach the vector, too; that memory is
        given back when this communicator is freed and the vector is no longer used. n may differ from rank to rank
        only where the algorithm works by messages alone.
        """
        n, dtype = like.size if n is None else n, np.dtype(dtype if like is None else like.dtype)
        device = self.device if like is None else device_of(like)
        if device is not CPU:
            return device.empty(n, dtype)
        if self.memory is not None:
            meet(self.mpi, "empty")
            vector = self.memory.empty(n, dtype)
            if vector is not None:
                return vector
        return CPU.empty(n, dtype)

    def expose(self, array: np.ndarray) -> Exposed:
        """Copy `array` to where all ranks can pull from it and push into it; see `Exposed.array`."""
        flat(array)
        meet(self.mpi, "expose")
        with activity.inside("expose"):
            exposed = Exposed(self.mpi, device_of(array).host(array))
        self._opened.append(exposed)
        return exposed

    def free(self) -> None:
        """Complete the collective operations in flight; give back windows and communicators, and stop the watchdog."""
        for request in list(activity.in_flight):
            if request.communicator is self and request.name not in PAIRS:
                request.wait()
        if self.watchdog is not None:
            self.watchdog.close()
        with activity.inside("free"):
            for exposed in self._opened:
                exposed.free()
            if self.timeline.comm is self.mpi:
                self.timeline.close()
            memory = self._collective.Get_attr(KEY)  # of any algorithm that has been in use
            if memory is not None:
                memory.free()
            self.mpi.Free()
            self._collective.Free()

    # -- between two ranks -------------------------------------------------------------------------------------------

    @staged(back=False, collective=False)
    def ipush(
        self, array, to: int, tag: int = 0, into: Exposed | None = None, at: int = 0, op: str = "replace"
    ) -> Request:
        """Send `array` to rank `to`, which takes it by `wait(array, source)`.

        into: write it straight into what `to` exposes, from element `at` on, while that rank computes; op "sum"
        adds it.
        """
        vector = flat(array)
        self._check_rank(to)
        self._check_tag(tag)
        comm = self._counting("push")
        if into is None:
            return self._request("push", once(lambda: comm.Isend(vector, to, tag)), comm, peer=self._peer("to", to))
        into.check(vector, to, at)
        if op not in ("replace", "sum"):
            raise UsageError(f"push: unknown op {op!r}; known: replace, sum")
        put = into.window.Rput if op == "replace" else into.window.Raccumulate
        options = {} if op == "replace" else {"op": MPI.SUM}

        def write():
            comm.count(vector)
            return put(vector, to, target=at, **options)

        return self._request("push", once(write), comm, lambda: into.window.Flush(to), peer=self._peer("to", to))

    def push(self, array, to, tag=0, into=None, at=0, op="replace") -> None:
        self.ipush(array, to, tag, into, at, op).wait()

    @staged(out=False, collective=False)
    def ipull(self, array, source: int, of: Exposed, at: int = 0) -> Request:
        """Fetch into `array` the elements from `at` on of what rank `source` exposes, while that rank computes."""
        vector = flat(array)
        self._check_rank(source)
        of.check(vector, source, at)
        comm = self._counting("pull")
        comm.count(np.empty(0))  # the values are sent by `source`; what this rank sends is the question
        return self._request(
            "pull", iter([[of.window.Rget(vector, source, target=at)]]), comm, peer=self._peer("from", source)
        )

    def pull(self, array, source, of, at=0) -> None:
        self.ipull(array, source, of, at).wait()

    def inotify(self, to: int, tag: int = 0) -> Request:
        """Give rank `to` a sign, an empty message, for which it can `wait(source=...)`."""
        self._check_rank(to)
        self._check_tag(tag)
        comm = self._counting("notify")
        return self._request(
            "notify", once(lambda: comm.Isend(barrier.EMPTY, to, tag)), comm, peer=self._peer("to", to)
        )

    def notify(self, to, tag=0) -> None:
        self.inotify(to, tag).wait()

    @staged(collective=False)
    def iwait(self, array: np.ndarray | None = None, source: int = ANY, tag: int = 0) -> Request:
        """Pause until a push (into `array`) or, without an array, a notification comes; the result is its `Arrival`."""
        vector = barrier.EMPTY if array is None else flat(array)
        if source != ANY:
            self._check_rank(source)
        self._check_tag(tag)
        comm, status = self._counting("wait"), MPI.Status()

        def arrival():
            return Arrival(status.source, status.Get_elements(MPI.BYTE) // vector.itemsize)

        peer = None if source == ANY else self._peer("from", source)
        return self._request("wait", iter([[comm.Irecv(vector, source, tag)]]), comm, arrival, [status], peer)

    def wait(self, array=None, source=ANY, tag=0) -> Arrival:
        return self.iwait(array, source, tag).wait()

    def wait_until(self, condition, meanwhile=None, patient: bool = False) -> None:
        """Pause until `condition()`, in naps, while what is in flight goes on; the options are those of `nap_until`."""
        waited = nap_until(condition, "wait", meanwhile, patient)
        self.traffic["wait"].seconds += waited
        self.traffic["wait"].blocked_seconds += waited

    # -- all ranks together: every rank of the group makes the same calls in the same order --------------------------

    def iall_reduce(self, array, op: str = "sum") -> Request:
        """Replace every rank's `array` by the sum (mean, max, min) over all ranks, by the algorithm chosen.

        An algorithm of the user's that is no generator is done when this returns.
        """
        return self._all_reduce(array, op)

    def all_reduce(self, array, op="sum") -> None:
        self._all_reduce(array, op, blocking=True).wait()

    @staged
    def iall_reduce_compressed(self, array, state, op: str = "sum") -> Request:
        """The sum (mean) as by `iall_reduce`, in 16-bit messages; state: a `Compressed` (hpcdl/comm/compressed.py).

        It has an algorithm of its own. What is rounded away stays in `state` for the next call.
        """
        state.check(flat(array), op)
        return self._all_reduce(array, op, state)

    def all_reduce_compressed(self, array, state, op="sum") -> None:
        self.iall_reduce_compressed(array, state, op).wait()

    @staged(direct=True)
    def _all_reduce(self, array, op, chosen=None, blocking=False):
        vector, op, comm = flat(array), operation(op, array.dtype), self._lane("all_reduce")
        choose = getattr(self.algorithm, "choose", None)
        chosen = chosen or (choose(self._collective, vector) if choose else self.algorithm)
        steps = mpi.at_once if chosen is mpi and blocking else getattr(chosen, "steps", None)
        if steps is None:
            running = self._at_once("all_reduce", lambda: chosen(comm, vector, op))
        else:
            running = steps(comm, vector, op)

        memory = self.memory

        def finish():
            op.finish(vector, self.size)
            if memory is not None:
                comm.counters.bytes += memory.take_written()

        return self._request("all_reduce", running, comm, finish)

    def _at_once(self, name, call):
        """The steps of a call that does not tell what it waits for: none, and all of its time counts as blocked."""
        start = time.perf_counter_ns()
        with activity.inside(name):
            call()
        self.traffic[name].blocked_seconds += (time.perf_counter_ns() - start) / 1e9
        yield from ()

    @staged
    def ireduce(self, array, root: int = 0, op: str = "sum") -> Request:
        """Replace the `array` of rank `root` by the sum (mean, max, min) over all ranks; the others keep theirs."""
        vector, op = flat(array), operation(op, array.dtype)
        self._check_rank(root)
        total = vector if self.rank == root else vector.copy()
        comm = self._lane("reduce")

        def finish():
            if self.rank == root:
                op.finish(vector, self.size)

        return self._request("reduce", reduce.steps(comm, total, op, root), comm, finish)

    def reduce(self, array, root=0, op="sum") -> None:
        self.ireduce(array, root, op).wait()

    @staged
    def ibroadcast(self, array, root: int = 0) -> Request:
        """Replace every rank's `array` by that of rank `root`."""
        vector = flat(array)
        self._check_rank(root)
        comm = self._lane("broadcast")
        return self._request("broadcast", broadcast.steps(comm, vector, root), comm)

    def broadcast(self, array, root=0) -> None:
        self.ibroadcast(array, root).wait()

    @staged
    def ireduce_scatter(self, array, op: str = "sum") -> Request:
        """Leave in rank r chunk r of the sum (mean, max, min) over all ranks; the result is a view of that chunk.

        In place: the other chunks of `array` hold partial sums afterwards. Chunks are those of `hpcdl.chunks`.
        """
        vector, op = flat(array), operation(op, array.dtype)
        own, comm = vector[chunk(vector.size, self.size, self.rank)], self._lane("reduce_scatter")

        def finish():
            op.finish(own, self.size)
            return own

        return self._request("reduce_scatter", reduce_scatter.steps(comm, vector, op), comm, finish)

    def reduce_scatter(self, array, op="sum") -> np.ndarray:
        return self.ireduce_scatter(array, op).wait()

    @staged
    def iall_gather(self, array) -> Request:
        """Fill in all chunks of `array`, of which rank r holds chunk r, on all ranks."""
        comm = self._lane("all_gather")
        return self._request("all_gather", all_gather.steps(comm, flat(array)), comm)

    def all_gather(self, array) -> None:
        self.iall_gather(array).wait()

    def ibarrier(self) -> Request:
        """Complete when all ranks have called this."""
        comm = self._lane("barrier")
        return self._request("barrier", barrier.barrier.steps(comm), comm)

    def barrier(self) -> None:
        self.ibarrier().wait()

    # -- what all of them share --------------------------------------------------------------------------------------

    def _counting(self, name):
        """The counting communicator of the messages of this name between two ranks, whose tags are the caller's."""
        if name not in self._pairs:
            self._pairs[name] = CountingIntracomm(self.mpi)
            self._pairs[name].counters = self.traffic[name]
        return self._pairs[name]

    def _lane(self, name):
        """A counting communicator with tags of its own; all ranks start the same operations in the same order."""
        self._sequence += 1
        comm = CountingIntracomm(self._collective)
        comm.counters, comm.lane = self.traffic[name], 1 + self._sequence % (counting.LANES - 1)
        return comm

    def _request(self, name, steps, comm, finish=None, statuses=None, peer=None):
        return Request(self, name, steps, comm.counters, finish, statuses, peer)

    def _peer(self, direction, rank):
        """What the trace says of the other rank of a message: its number among the rows of the trace."""
        if not self.timeline.limit:
            return None
        if self._places is None:
            ours, rows = self.mpi.Get_group(), self.timeline.comm.Get_group()
            self._places = ours.Translate_ranks(None, rows)
            ours.Free()
            rows.Free()
        return {direction: int(self._places[rank])}

    def _check_tag(self, tag):
        if not 0 <= tag <= 32767:  # what MPI guarantees
            raise UsageError(f"a tag is a number from 0 to 32767, not {tag}")

    def _check_rank(self, rank):
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank} in a group of {self.size} (0 to {self.size - 1})")
