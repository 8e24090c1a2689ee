"""The communicator: all message primitives, each blocking and, with a leading i, asynchronous.

push       a rank sends data to another             wait/notify   pause until another rank sends a signal
pull       a rank fetches data from another         barrier       pause until all ranks have entered
broadcast  one rank sends the same to all           all_reduce    reduce, and all ranks get the result
reduce     combine the data of all on one rank      reduce_scatter, all_gather    the two halves of an all-reduce"""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from hpcdl.comm import failure
from hpcdl.comm.allreduce import algorithm, auto
from hpcdl.comm.call_path import flat
from hpcdl.comm.collectives import Collectives
from hpcdl.comm.diagnostics.call_signature import describe_call
from hpcdl.comm.diagnostics.call_site import refuse
from hpcdl.comm.diagnostics.collective_checker import CollectiveChecker, enabled_by_environment
from hpcdl.comm.diagnostics.watchdog import Watchdog
from hpcdl.comm.node_memory import known_memory, spans_nodes
from hpcdl.comm.point_to_point import PointToPoint
from hpcdl.comm.progress import activity, meet
from hpcdl.comm.rma_window import ExposedArray
from hpcdl.comm.staging import supports_device_arrays
from hpcdl.comm.trace import Timeline, Traffic
from hpcdl.kernels.device import CPU, Array, Device, device_of
from hpcdl.shared_memory import unlink_mapped
from hpcdl.time_slice import request_short_slice

PAIRS = ("push", "pull", "notify", "wait")  # point-to-point operations: they may never complete


class Communicator(PointToPoint, Collectives):
    """A group of ranks that exchange typed buffers, by a duplicate of an mpi4py communicator. Counts and times all
    operations.

    allreduce: name of the algorithm (hpcdl/comm/allreduce/) or package.module:function. timeout: seconds that a rank
    may wait in one operation before the job ends with a report of all ranks' places; 0: no limit. trace: number of last
    spans kept for the trace. device: where `empty` allocates. ends_job: True if an uncaught exception on one rank, or a
    deadlock, ends all ranks (failure.py). check: True if the ranks compare each collective call before they make it
    (diagnostics/collective_checker.py); None: as $HPCDL_CHECK says. Buffers: C-contiguous numpy arrays, or arrays on a
    GPU, of any shape and MPI type. The constructor, `split`, `duplicate`, `expose` and `free` are collective."""

    def __init__(
        self,
        comm: MPI.Intracomm = MPI.COMM_WORLD,
        allreduce: str = "auto",
        timeout: float = 0,
        trace: int = 0,
        device: Device = CPU,
        ends_job: bool = True,
        check: bool | None = None,
    ):
        if ends_job and comm.Get_size() > 1:
            failure.install()
        self.device = device
        check = enabled_by_environment() if check is None else check
        self._open(comm, "world", Traffic(), allreduce, bool(comm.allreduce(check, MPI.LOR)))
        if self.size == MPI.COMM_WORLD.size:  # all ranks have reached this point
            unlink_mapped()
        self.direct = supports_device_arrays(self.mpi, device)
        self.timeline = Timeline(self.mpi, trace)
        watches = timeout > 0 or (ends_job and self.size > 1)
        self.watchdog = Watchdog(self.mpi, timeout, ends_job) if watches else None
        self._watched_by(self.watchdog)

    def use(self, allreduce: str) -> None:
        """Set the all-reduce algorithm by name. Collective; raises AgreedError if the names differ between ranks."""
        self._compare("use", f"all-reduce by {allreduce}")
        self.allreduce, self.algorithm, self._fast_calls = allreduce, algorithm(allreduce), {}
        self.node_memory = self.algorithm.prepare(self._collective) if self.algorithm.prepare else None

    @property
    def by_length(self) -> list[str]:
        """The names of the algorithms that `auto` uses, from short vectors to long ones; empty if auto is not used."""
        return auto.table(self._collective) if self.algorithm is auto.ALGORITHM else []

    @property
    def exchange(self) -> str:
        """How all_reduce sends an array on a GPU: "direct" or "staged" (hpcdl/comm/staging.py)."""
        return "direct" if self.direct and self.algorithm.direct else "staged"

    def _open(self, comm: MPI.Intracomm, name: str, traffic: Traffic, allreduce: str, check: bool) -> None:
        self.name, self.traffic, self.checker = name, traffic, None
        self.mpi, self.rank, self.size = comm.Dup(), comm.Get_rank(), comm.Get_size()
        self._exposed_arrays: list[ExposedArray] = []
        self._parent: Communicator | None = None
        self._derived: list[Communicator] = []  # not freed yet
        self.several_nodes = self.size > 1 and spans_nodes(comm)
        self._open_call_path(comm.Dup())
        activity.short_slices = request_short_slice()
        activity.between_nodes = activity.between_nodes or self.several_nodes
        self.use(allreduce)
        if check:
            self.checker = CollectiveChecker(comm)

    @overload
    def split(
        self, color: int, key: int | None = None, name: str = "group", allreduce: str | None = None
    ) -> "Communicator": ...

    @overload
    def split(
        self, color: int | None, key: int | None = None, name: str = "group", allreduce: str | None = None
    ) -> "Communicator | None": ...

    def split(
        self, color: int | None, key: int | None = None, name: str = "group", allreduce: str | None = None
    ) -> "Communicator | None":
        """Return the group of the ranks that pass the same color, ordered by key (None: the rank); None if color is
        None. The group inherits trace and watchdog, and the algorithm unless `allreduce` names another."""
        color, key = MPI.UNDEFINED if color is None else color, self.rank if key is None else key
        meet(self, "split")
        with self.inside("split"):
            part = self.mpi.Split(color, key)
        if part == MPI.COMM_NULL:
            return None
        group = self._derive(part, name, self.traffic, allreduce)
        part.Free()
        return group

    def subgroup(self, ranks: Sequence[int], name: str = "group", tag: int = 0) -> "Communicator":
        """Return the group of these ranks, in this order; only they call this. tag: different in concurrent threads."""
        everyone = self.mpi.Get_group()
        chosen = everyone.Incl(list(ranks))
        with activity.inside("subgroup"):
            part = self.mpi.Create_group(chosen, tag)
        chosen.Free()
        everyone.Free()
        group = self._derive(part, name, self.traffic)
        part.Free()
        return group

    @property
    def groups(self) -> list["Communicator"]:
        """The groups and duplicates of this communicator that are not freed yet."""
        return list(self._derived)

    def family(self) -> Iterator["Communicator"]:
        """Yield this communicator and, recursively, its groups and duplicates."""
        yield self
        for group in self._derived:
            yield from group.family()

    def duplicate(self, name: str, allreduce: str | None = None) -> "Communicator":
        """Return a communicator of the same ranks with its own traffic count and no trace, for bookkeeping messages."""
        meet(self, "duplicate")
        group = self._derive(self.mpi, name, Traffic(), allreduce)
        group.timeline = Timeline(group.mpi)
        return group

    def _derive(self, comm: Any, name: str, traffic: Traffic, allreduce: str | None = None) -> "Communicator":
        group = object.__new__(Communicator)
        group.device, group.direct = self.device, self.direct
        group.timeline, group.watchdog = self.timeline, None
        with activity.inside("duplicate"):
            group._open(comm, name, traffic, allreduce or self.allreduce, self.checker is not None)
        group._watched_by(self._watcher)
        group._parent = self
        self._derived.append(group)
        return group

    def _watched_by(self, watcher: Watchdog | None) -> None:
        self._watcher = watcher
        if watcher is not None:
            watcher.watch(self)
        if activity.flight is not None:
            activity.flight.register(self)

    def _compare(self, name: str, mine: str) -> None:
        """Raise AgreedError on all ranks if `mine`, this rank's call as text, differs between ranks; collective."""
        with activity.inside(name):
            if len({*self.mpi.allgather(mine)}) > 1:
                refuse(self.mpi, mine)

    def empty(self, n: int | None = None, dtype: DTypeLike = "float32", like: Array | None = None) -> Array:
        """Return a flat vector of n elements, or of length, type and device of `like`, aligned to 64 bytes. Collective.
        If the algorithm uses shared memory, the vector lies there: n and type must be equal on all ranks (AgreedError),
        and the memory is released by the next `empty` after all ranks have dropped the vector, or by `free`."""
        if n is None:
            assert like is not None
            n = like.size
        dtype = np.dtype(dtype if like is None else like.dtype)
        device = self.device if like is None else device_of(like)
        if device is not CPU:
            return device.empty(n, dtype)
        if self.node_memory is not None:
            meet(self, "empty")
            self._compare("empty", describe_call(("empty", dtype, n, "", 0)))
            vector = self.node_memory.empty(n, dtype)
            if vector is not None:
                return vector
        return CPU.empty(n, dtype)

    def expose(self, array: np.ndarray) -> ExposedArray:
        """Copy `array` into memory that all ranks can pull from and push into. The result's `array` is the copy."""
        flat(array)
        meet(self, "expose")
        with self.inside("expose"):
            exposed = ExposedArray(self.mpi, device_of(array).host(array))
        self._exposed_arrays.append(exposed)
        return exposed

    def set_timeout(self, seconds: float) -> None:
        """Replace the timeout, if this communicator has a watchdog."""
        if self.watchdog is not None:
            self.watchdog.timeout = seconds

    def revoke(self) -> None:
        """Revoke this communicator and its groups (ULFM) after a failure: all ranks' calls on them raise. Local."""
        for group in self._derived:
            group.revoke()
        for comm in (self.mpi, self._collective, self.checker.comm if self.checker is not None else MPI.COMM_NULL):
            if comm != MPI.COMM_NULL:
                comm.Revoke()

    def free(self) -> None:
        """Complete the collective operations in flight; free windows, groups and communicators (MPI has only a few
        thousand for a process); stop the watchdog. A second call has no effect."""
        if self.mpi == MPI.COMM_NULL:
            return
        for request in self.in_flight:
            if request.name not in PAIRS:
                request.wait()
        for group in self._derived[::-1]:
            group.free()
        if self._parent is not None:
            self._parent._derived.remove(self)
        if self.watchdog is not None:
            meet(self, "free")  # the watchdog works until all ranks are here
            self.watchdog.close()
        if self._watcher is not None:
            self._watcher.forget(self)
        if activity.flight is not None:
            activity.flight.forget(self)
        with activity.inside("free"):
            for exposed in self._exposed_arrays:
                exposed.free()
            if self.timeline.comm is self.mpi:
                self.timeline.close()
            memory: Any = known_memory(self._collective)  # of any algorithm used so far
            if memory is not None:
                memory.free()
            self.mpi.Free()
            self._collective.Free()
            if self.checker is not None:
                self.checker.comm.Free()
            self._fast_calls.clear()  # they refer to the freed memory ...
            self._counting.clear()  # ... and these to the freed communicators
