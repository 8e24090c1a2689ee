"""Collective operations: all ranks of the group make the same calls in the same order (communicator.py)."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.comm.allreduce.circulant import circulant_all_gather, circulant_reduce_scatter, has_fewer_steps
from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.allreduce.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from hpcdl.comm.call_matching import CallComparison, number
from hpcdl.comm.call_path import CallPath, flat
from hpcdl.comm.collective_schedule import Step, complete
from hpcdl.comm.compiled_schedule import ScheduleRunner, compile_for, schedule_of
from hpcdl.comm.compression import Compressed
from hpcdl.comm.counting import CountingIntracomm
from hpcdl.comm.diagnostics.call_signature import Call
from hpcdl.comm.node_memory import NodeMemory
from hpcdl.comm.operations import SUM, Reduction, operation
from hpcdl.comm.primitives import chain
from hpcdl.comm.primitives.all_to_all import all_to_all
from hpcdl.comm.primitives.barrier import dissemination_barrier
from hpcdl.comm.progress import activity, clock
from hpcdl.comm.requests import Request
from hpcdl.comm.staging import staged
from hpcdl.errors import UsageError

BARRIER: Call = "barrier", None, 0, "", 0
MOST_CALLS = 1000  # kept in the cache of fast calls: a program may use any number of lengths


class Collectives(CallPath):
    """The collective operations of a communicator."""

    algorithm: Algorithm
    node_memory: NodeMemory | None  # of the algorithm, if it uses shared memory
    several_nodes: bool  # True if the ranks are on several nodes
    _runner: ScheduleRunner | None = None  # of compiled schedules

    def iall_reduce(self, array: np.ndarray, op: str = "sum") -> Request:
        """Replace every rank's `array` by the sum (mean, max, min) over all ranks, by the chosen algorithm."""
        return self._all_reduce(array, op)

    def all_reduce(self, array: np.ndarray, op: str = "sum") -> None:
        """The blocking form of `iall_reduce`."""
        if activity.in_flight or type(array) is not np.ndarray or not array.flags.carray or type(op) is not str:
            self._all_reduce(array, op, blocking=True).wait()
            return
        call = "all_reduce", array.dtype, array.size, op, 0
        run = self._fast_calls.get(call) or self._fast_call(array, call)
        self._begin_call(call)
        vector = array if array.ndim == 1 else array.reshape(-1)
        self._fast_path("all_reduce", self.traffic["all_reduce"], run, vector)

    def compile_for(self, dtype: np.dtype) -> None:
        """Compile, or load, what reductions of this type execute: the first one would take seconds else. Local."""
        SUM(np.empty(0, dtype), np.empty(0, dtype))
        if self.size > 1 and (self.algorithm.fixed or self.algorithm.choose is not None):
            compile_for(dtype)

    def iall_reduce_compressed(self, array: np.ndarray, state: Compressed, op: str = "sum") -> Request:
        """Replace every rank's `array` by the sum (mean), in compressed messages. state: of this array, as
        hpcdl.comm.compression.compressed makes it; what it does not compress is reduced by the chosen algorithm, or by
        `ring` if that is not made of messages alone."""
        return self._reduce_compressed(array, state, op, self._message_steps)

    def all_reduce_compressed(self, array: np.ndarray, state: Compressed, op: str = "sum") -> None:
        """The blocking form of `iall_reduce_compressed`; by any algorithm."""
        self._reduce_compressed(array, state, op, self._plain_steps).wait()

    @staged()
    def _reduce_compressed(self, array: np.ndarray, state: Compressed, op: str, plain: Any) -> Request:
        state.check_vector(flat(array), op)

        def steps(comm: Any, vector: "np.ndarray", _: Reduction) -> Iterator[Step]:
            return state.steps(comm, vector, plain)

        return self._all_reduce(array, op, Algorithm("all_reduce_compressed", steps))

    def _plain_steps(self, comm: Any, vector: np.ndarray) -> Iterator[Step]:
        """Yield the steps of an all-reduce by the chosen algorithm, within another operation."""
        algorithm = self._chosen(vector)
        if algorithm.steps is not None:
            return algorithm.steps(comm, vector, SUM)
        return self._at_once(lambda: algorithm.blocking(comm, vector, SUM))  # type: ignore[misc]  # not None here

    def _message_steps(self, comm: Any, vector: np.ndarray) -> Iterator[Step]:
        """Yield the steps of an all-reduce that may begin on each rank in another order than other operations in
        flight: its messages have tags of their own, but calls of MPI and places in shared memory do not."""
        algorithm = self._chosen(vector)
        tagged = algorithm.steps is not None and algorithm.prepare is None and not algorithm.meets
        if tagged:
            return algorithm.steps(comm, vector, SUM)  # type: ignore[misc]  # not None here
        return ring_all_reduce.steps(comm, vector, SUM)

    @staged(direct=True)
    def _all_reduce(self, array: np.ndarray, name: str, algorithm: Any = None, blocking: bool = False) -> Request:
        vector, op = flat(array, written=True), operation(name, array.dtype)
        comm = self._lane((algorithm.name if algorithm else "all_reduce", vector.dtype, vector.size, name, 0))
        algorithm, memory = algorithm or self._chosen(vector), self.node_memory
        if algorithm.steps is None:
            steps = self._at_once(lambda: algorithm.blocking(comm, vector, op))
        elif blocking and algorithm.meets:
            steps = algorithm.meeting(comm, vector, op)
        else:
            steps = algorithm.steps(comm, vector, op)

        def finish() -> None:
            op.finish(vector, self.size)
            if memory is not None:
                comm.counters.bytes += memory.take_written()

        if self.checker is not None and algorithm.steps is None:  # it blocks, so the comparison may block, too
            waited = self.checker.before(self, self._latest_call) / 1e9
            comm.counters.blocked_seconds += waited
            comm.counters.seconds += waited
        elif self.checker is not None:
            steps = self.checker.checked_steps(self, self._latest_call, steps)
        return Request(self, "all_reduce", steps, comm.counters, finish)

    def _at_once(self, call: Callable[[], object]) -> Iterator[Step]:
        """Run call(), an all-reduce without steps, and yield nothing. All of its time counts as blocked."""
        start = clock()
        with activity.inside("all_reduce"):
            call()
        self.traffic["all_reduce"].blocked_seconds += (clock() - start) / 1e9
        yield from ()

    def _chosen(self, vector: np.ndarray) -> Algorithm:
        choose = self.algorithm.choose
        return self.algorithm if choose is None else choose(self._collective, vector)

    def _fast_call(self, array: np.ndarray, call: Call) -> Callable[[np.ndarray], tuple[int, int]]:
        """Return the function that the fast path runs for this all_reduce. UsageError for a bad array or operation."""
        vector, op, what = flat(array), operation(call[3], array.dtype), number(call)
        comm = self._counted("all_reduce", self._collective)
        algorithm, memory, size = self._chosen(vector), self.node_memory, self.size
        reduce: Any = algorithm.bind(comm, vector, op) if algorithm.bind is not None else None
        replay = self._compiled(algorithm, vector, op)
        same = CallComparison(self._collective, vector, op) if algorithm.meets else contextlib.nullcontext()

        def by_messages(vector: np.ndarray) -> tuple[int, int]:
            comm.lane, comm.counters = self._lane_of(what), self.traffic["all_reduce"]
            if replay is not None and not activity.survives:
                return replay(vector, comm), 0
            if algorithm.steps is not None and not algorithm.meets:
                waited, _ = run_steps(algorithm.steps(comm, vector, op))
            else:  # all its time counts as waiting
                start = clock()
                with same:
                    algorithm.blocking(comm, vector, op)  # type: ignore[misc]  # not None here
                waited = clock() - start
            return waited, memory.take_written() if memory is not None else 0

        def mean(vector: np.ndarray) -> tuple[int, int]:
            costs = reduce(vector)
            op.finish(vector, size)
            return costs

        reduce = reduce or by_messages
        if len(self._fast_calls) == MOST_CALLS:
            self._fast_calls.clear()
        run = self._fast_calls[call] = mean if op.divides else reduce
        return run

    def _compiled(
        self, algorithm: Algorithm, vector: np.ndarray, op: Reduction
    ) -> Callable[[np.ndarray, CountingIntracomm], int] | None:
        """Return the algorithm's schedule for vectors like this one in compiled code; None if it runs step by step."""
        if self.size == 1 or self._intracomm is not CountingIntracomm:  # another class: a fault drill
            return None
        schedule = schedule_of(algorithm, self._collective, vector, op)
        if schedule is None:
            return None
        self._runner = self._runner or ScheduleRunner(self._collective)
        return self._runner.counted(schedule, vector, op)

    @staged()
    def ireduce(self, array: np.ndarray, root: int = 0, op: str = "sum") -> Request:
        """Replace the `array` of rank `root` by the sum (mean, max, min) over all ranks; other ranks keep theirs."""
        return self._reduce(self.irun, flat(array, written=self.rank == root), root, op)

    def reduce(self, array: np.ndarray, root: int = 0, op: str = "sum") -> None:
        """The blocking form of `ireduce`."""
        vector = self._fast_vector(array, self.rank == root)
        if vector is None:
            self.ireduce(array, root, op).wait()
        else:
            self._reduce(self.run, vector, root, op)

    def _reduce(self, run: Callable, vector: np.ndarray, root: int, name: str) -> Any:
        op = operation(name, vector.dtype)
        total = vector if self.rank == root else vector.copy()  # the schedule overwrites it
        finish = (lambda: op.finish(vector, self.size)) if op.divides and self.rank == root else None
        call = "reduce", vector.dtype, vector.size, name, root
        return run(call, chain.reduce.steps, total, self.several_nodes, op, root, True, finish=finish)

    @staged()
    def ibroadcast(self, array: np.ndarray, root: int = 0) -> Request:
        """Replace every rank's `array` by that of rank `root`."""
        return self._broadcast(self.irun, flat(array, written=self.rank != root), root)

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """The blocking form of `ibroadcast`."""
        vector = self._fast_vector(array, self.rank != root)
        if vector is None:
            self.ibroadcast(array, root).wait()
        else:
            self._broadcast(self.run, vector, root)

    def _broadcast(self, run: Callable, vector: np.ndarray, root: int) -> Any:
        call = "broadcast", vector.dtype, vector.size, "", root
        return run(call, chain.broadcast.steps, vector, self.several_nodes, root, True)

    @staged()
    def ireduce_scatter(self, array: np.ndarray, op: str = "sum") -> Request:
        """Leave chunk r of the sum (mean, max, min) on rank r, as the result; other chunks get partial sums."""
        return self._reduce_scatter(self.irun, flat(array, written=True), op)

    def reduce_scatter(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        """The blocking form of `ireduce_scatter`."""
        vector = self._fast_vector(array, written=True)
        if vector is None:
            return self.ireduce_scatter(array, op).wait()
        return self._reduce_scatter(self.run, vector, op)

    def _reduce_scatter(self, run: Callable, vector: np.ndarray, name: str) -> Any:
        op, own = operation(name, vector.dtype), vector[chunk(vector.size, self.size, self.rank)]

        def finish() -> "np.ndarray":
            op.finish(own, self.size)
            return own

        call = "reduce_scatter", vector.dtype, vector.size, name, 0
        scatter = circulant_reduce_scatter if has_fewer_steps(vector, self.size) else ring_reduce_scatter
        return run(call, scatter.steps, vector, op, finish=finish)

    @staged()
    def iall_gather(self, array: np.ndarray) -> Request:
        """Fill in all chunks of `array`, of which rank r holds chunk r, on all ranks."""
        return self._all_gather(self.irun, flat(array, written=True))

    def all_gather(self, array: np.ndarray) -> None:
        """The blocking form of `iall_gather`."""
        vector = self._fast_vector(array, written=True)
        if vector is None:
            self.iall_gather(array).wait()
        else:
            self._all_gather(self.run, vector)

    def _all_gather(self, run: Callable, vector: np.ndarray) -> Any:
        gather = circulant_all_gather if has_fewer_steps(vector, self.size) else ring_all_gather
        return run(("all_gather", vector.dtype, vector.size, "", 0), gather.steps, vector)

    @staged()
    def iall_to_all(self, array: np.ndarray) -> Request:
        """Send row s of `array`, one of N equal parts, to rank s; replace it by the row for this rank from rank s."""
        vector = flat(array, written=True)
        if vector.size % self.size:
            what = f"{vector.size} elements are no multiple of {self.size} ranks"
            raise UsageError(f"all_to_all: {what}; give each rank a row of the same length")
        return self.irun(("all_to_all", vector.dtype, vector.size, "", 0), all_to_all.steps, vector)

    def all_to_all(self, array: np.ndarray) -> None:
        """The blocking form of `iall_to_all`."""
        self.iall_to_all(array).wait()

    def ibarrier(self) -> Request:
        """Return a request that is complete when all ranks have called this."""
        return self.irun(BARRIER, dissemination_barrier.steps)

    def barrier(self) -> None:
        """The blocking form of `ibarrier`."""
        self.run(BARRIER, dissemination_barrier.steps)

    def irun(
        self, call: Call, steps: Callable[..., Iterator[Step]], *arguments: Any, finish: Callable[[], Any] | None = None
    ) -> Request:
        """Start the collective operation of the generator steps(comm, *arguments); finish(), called at its end, returns
        the result. call: name, type, length, reduction and root, equal on all ranks (call_matching.py)."""
        self._check(call[4])
        comm = self._lane(call)
        made = steps(comm, *arguments)
        if self.checker is not None:
            made = self.checker.checked_steps(self, call, made)
        return Request(self, call[0], made, comm.counters, finish)

    def run(
        self, call: Call, steps: Callable[..., Iterator[Step]], *arguments: Any, finish: Callable[[], Any] | None = None
    ) -> Any:
        if activity.in_flight or not 0 <= call[4] < self.size:
            return self.irun(call, steps, *arguments, finish=finish).wait()
        comm = self._lane(call, reused=True)
        return self._fast_path(call[0], comm.counters, run_steps, steps(comm, *arguments), finish)


def run_steps(steps: Iterable[Step]) -> tuple[int, int]:
    """Run the steps one after the other; return the nanoseconds waited, and 0, the bytes moved without a message."""
    waited = 0
    for step in steps:
        start = clock()
        complete(step)
        waited += clock() - start
    return waited, 0
