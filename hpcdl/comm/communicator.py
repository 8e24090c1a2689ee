"""The one door through which messages leave: the primitives, each blocking and, with a leading i, asynchronous.

    push       a rank sends data to another             wait/notify   pause until another rank gives a sign
    pull       a rank fetches data from another         barrier       pause until all ranks have come
    broadcast  one rank sends the same to all           all_reduce    reduce, and all ranks get the result
    reduce     combine the data of all on one rank      reduce_scatter, all_gather    the two halves of an all-reduce

A `Communicator` checks buffers, chooses the algorithm, and counts and times what passes; the algorithms
(hpcdl/comm/allreduce/) know nothing of that. Its operations are in point_to_point.py and collectives.py; here it is
made, cut into groups, and given back.
"""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from hpcdl.comm import failure
from hpcdl.comm.allreduce import algorithm, auto
from hpcdl.comm.call_path import flat
from hpcdl.comm.collectives import Collectives
from hpcdl.comm.diagnostics.call_signature import told
from hpcdl.comm.diagnostics.call_site import refuse
from hpcdl.comm.diagnostics.collective_checker import Checking, wanted
from hpcdl.comm.diagnostics.watchdog import Watchdog
from hpcdl.comm.node_memory import KEY
from hpcdl.comm.point_to_point import PointToPoint
from hpcdl.comm.progress import activity, meet
from hpcdl.comm.rma_window import Exposed
from hpcdl.comm.staging import takes_device_arrays
from hpcdl.comm.trace import Timeline, Traffic
from hpcdl.kernels.device import CPU, Array, Device, device_of
from hpcdl.shared_memory import unname

PAIRS = ("push", "pull", "notify", "wait")  # operations of two ranks, which may never be answered


class Communicator(PointToPoint, Collectives):
    """A group of ranks that exchange typed buffers; wraps an mpi4py communicator, which it duplicates.

    allreduce: name of the algorithm (see hpcdl/comm/allreduce/) or package.module:function. timeout: seconds
    after which a rank that waits in one operation is taken for hung; the job is ended with a report of which ranks
    wait where. 0: never. trace: how many of the last spans to keep for the picture of the run. device: where `empty`
    allocates (hpcdl.kernels.device). ends_job: whether an exception that nobody catches on a rank is to end all ranks,
    and ranks that would wait for ever are: the first communicator over several ranks that says so installs what does
    (hpcdl/comm/failure.py). check: whether the ranks compare what they call together before each such call
    (hpcdl/comm/diagnostics/collective_checker.py); None: where $HPCDL_CHECK says so. Buffers are C-contiguous numpy
    arrays, or arrays on a GPU (hpcdl/comm/staging.py), of any shape and of any type that MPI knows (float32, float64,
    int64, ...). Making one, `split`, `duplicate`, `expose` and `free` are collective calls.
    """

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
        check = wanted() if check is None else check
        self._open(comm, "world", Traffic(), allreduce, bool(comm.allreduce(check, MPI.LOR)))
        if self.size == MPI.COMM_WORLD.size:  # all ranks have come so far
            unname()
        self.direct = takes_device_arrays(self.mpi, device)
        self.timeline = Timeline(self.mpi, trace)
        watches = timeout > 0 or (ends_job and self.size > 1)
        self.watchdog = Watchdog(self.mpi, timeout, ends_job) if watches else None
        self._watched_by(self.watchdog)

    def use(self, allreduce: str) -> None:
        """Choose the all-reduce algorithm by name, the same on all ranks; a collective call."""
        self._compare("use", f"all-reduce by {allreduce}")
        self.allreduce = allreduce
        self._open_collectives(algorithm(allreduce))

    @property
    def by_length(self) -> list[str]:
        """The algorithms that `auto` takes, for short vectors to long ones; empty where another algorithm is in use."""
        return auto.table(self._collective) if self.algorithm is auto.ALGORITHM else []

    @property
    def exchange(self) -> str:
        """How all_reduce sends an array on its GPU: direct or staged (hpcdl/comm/staging.py)."""
        return "direct" if self.direct and self.algorithm.direct else "staged"

    def _open(self, comm: MPI.Intracomm, name: str, traffic: Traffic, allreduce: str, check: bool) -> None:
        self.name, self.traffic, self._checking = name, traffic, None
        self.mpi, self.rank, self.size = comm.Dup(), comm.Get_rank(), comm.Get_size()
        self._exposed: list[Exposed] = []
        self._parent: Communicator | None = None
        self._derived: list[Communicator] = []  # those that were not given back yet
        self._open_door(comm.Dup())
        self.use(allreduce)
        if check:
            self._checking = Checking(comm)

    # -- groups ------------------------------------------------------------------------------------------------------

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
        """The group of all ranks that give the same color, ordered by key; None for a rank whose color is None.

        The group inherits trace and watchdog, and the algorithm unless `allreduce` names another.
        """
        color, key = MPI.UNDEFINED if color is None else color, self.rank if key is None else key
        meet(self, "split")
        with activity.inside("split", self):
            part = self.mpi.Split(color, key)
        if part == MPI.COMM_NULL:
            return None
        group = self._derive(part, name, self.traffic, allreduce)
        part.Free()
        return group

    def subgroup(self, ranks: Sequence[int], name: str = "group", tag: int = 0) -> "Communicator":
        """The group of these ranks, in this order; they alone make the call. It inherits as one of `split` does.

        tag: tells apart groups that are made at once by several threads.
        """
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
        """Its groups and duplicates that were not given back yet."""
        return list(self._derived)

    def family(self) -> Iterator["Communicator"]:
        """This one, its groups and duplicates, and theirs."""
        yield self
        for group in self._derived:
            yield from group.family()

    def duplicate(self, name: str, allreduce: str | None = None) -> "Communicator":
        """The same ranks with a traffic count of their own and no trace, for what is no part of the training."""
        meet(self, "duplicate")
        group = self._derive(self.mpi, name, Traffic(), allreduce)
        group.timeline = Timeline(group.mpi)
        return group

    def _derive(self, comm: Any, name: str, traffic: Traffic, allreduce: str | None = None) -> "Communicator":
        group = object.__new__(Communicator)
        group.device, group.direct = self.device, self.direct
        group.timeline, group.watchdog = self.timeline, None
        with activity.inside("duplicate"):
            group._open(comm, name, traffic, allreduce or self.allreduce, self._checking is not None)
        group._watched_by(self._watcher)
        group._parent = self
        self._derived.append(group)
        return group

    def _watched_by(self, watcher: Watchdog | None) -> None:
        self._watcher = watcher
        if watcher is not None:
            watcher.watch(self)
        if activity.flight is not None:
            activity.flight.know(self)

    def _compare(self, name: str, mine: str) -> None:
        """Raise AgreedError, on all ranks, where what they ask for in the call `name` is not the same; collective."""
        with activity.inside(name):
            if len({*self.mpi.allgather(mine)}) > 1:
                refuse(self.mpi, mine)

    def empty(self, n: int | None = None, dtype: DTypeLike = "float32", like: Array | None = None) -> Array:
        """A flat vector of n elements, aligned to 64 bytes (whole cache lines); a collective call.

        Where the all-reduce algorithm gains from it, the other ranks of the node reach the vector, too; that memory is
        given back when no rank has the vector any more, at the next call, or when this communicator is freed. n may
        differ from rank to rank only where the algorithm works by messages alone: else an AgreedError.
        """
        if n is None:
            assert like is not None
            n = like.size
        dtype = np.dtype(dtype if like is None else like.dtype)
        device = self.device if like is None else device_of(like)
        if device is not CPU:
            return device.empty(n, dtype)
        if self.node_memory is not None:
            meet(self, "empty")
            self._compare("empty", told(("empty", dtype, n, "", 0)))
            vector = self.node_memory.empty(n, dtype)
            if vector is not None:
                return vector
        return CPU.empty(n, dtype)

    def expose(self, array: np.ndarray) -> Exposed:
        """Copy `array` to where all ranks can pull from it and push into it; see `Exposed.array`."""
        flat(array)
        meet(self, "expose")
        with activity.inside("expose", self):
            exposed = Exposed(self.mpi, device_of(array).host(array))
        self._exposed.append(exposed)
        return exposed

    def revoke(self) -> None:
        """Let all ranks leave what they wait in here or in a group of it: their calls raise; local (ULFM).

        It is for ranks that have seen another fail, and cannot be used any more then.
        """
        for group in self._derived:
            group.revoke()
        for comm in (self.mpi, self._collective, *([self._checking.comm] if self._checking is not None else [])):
            if comm != MPI.COMM_NULL:
                comm.Revoke()

    def free(self) -> None:
        """Complete the collective operations in flight; give back windows and communicators, and stop the watchdog.

        Groups and duplicates that were not given back yet are, too: MPI has a few thousand communicators for a process.
        Nothing happens where this one was given back before.
        """
        if self.mpi == MPI.COMM_NULL:
            return
        for request in list(activity.in_flight):
            if request.communicator is self and request.name not in PAIRS:
                request.wait()
        for group in self._derived[::-1]:
            group.free()
        if self._parent is not None:
            self._parent._derived.remove(self)
        if self.watchdog is not None:
            meet(self, "free")  # until then it watches
            self.watchdog.close()
        if self._watcher is not None:
            self._watcher.forget(self)
        if activity.flight is not None:
            activity.flight.forget(self)
        with activity.inside("free"):
            for exposed in self._exposed:
                exposed.free()
            if self.timeline.comm is self.mpi:
                self.timeline.close()
            memory: Any = self._collective.Get_attr(KEY)  # of any algorithm that has been in use
            if memory is not None:
                memory.free()
            self.mpi.Free()
            self._collective.Free()
            if self._checking is not None:
                self._checking.free()
            self._short_calls.clear()  # they know the memory that is gone, ...
            self._counting.clear()  # ... and these the communicators
