"""Collective operations: every rank of the group makes the same calls in the same order.

broadcast         one rank sends the same to all          reduce_scatter, all_gather    the halves of an all-reduce
reduce            combine the data of all on one rank     barrier                       until all ranks have come
all_reduce        reduce, and all ranks get the result    all_reduce_compressed         the same in 16-bit messages
run               an operation whose steps the caller brings (exchange.py has some)
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunk
from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.allreduce.ring import ring_all_gather, ring_reduce_scatter
from hpcdl.comm.allreduce.tree import tree_broadcast, tree_reduce
from hpcdl.comm.barrier import dissemination_barrier
from hpcdl.comm.call_matching import CallComparison, number
from hpcdl.comm.call_path import CallPath, flat
from hpcdl.comm.collective_schedule import Step, complete
from hpcdl.comm.compressed import Compressed
from hpcdl.comm.counting import CountingIntracomm
from hpcdl.comm.diagnostics.call_signature import Call
from hpcdl.comm.node_memory import NodeMemory
from hpcdl.comm.operations import Reduction, operation
from hpcdl.comm.progress import activity, clock
from hpcdl.comm.requests import Request
from hpcdl.comm.staging import staged

BARRIER: Call = "barrier", None, 0, "", 0
MOST_CALLS = 1000  # kept in the cache of fast calls: a program may use any number of lengths


class Collectives(CallPath):
    """The collective operations of a communicator."""

    algorithm: Algorithm
    node_memory: NodeMemory | None  # of the algorithm, if it uses shared memory

    def _open_collectives(self, algorithm: Algorithm) -> None:
        """Use this all-reduce algorithm from now on; collective."""
        self.algorithm = algorithm
        self.node_memory = algorithm.prepare(self._collective) if algorithm.prepare else None
        self._fast_calls = {}

    # -- all-reduce --------------------------------------------------------------------------------------------------

    def iall_reduce(self, array: np.ndarray, op: str = "sum") -> Request:
        """Replace every rank's `array` by the sum (mean, max, min) over all ranks, by the chosen algorithm.

        A user's algorithm that is not a generator is complete when this returns.
        """
        return self._all_reduce(array, op)

    def all_reduce(self, array: np.ndarray, op: str = "sum") -> None:
        if activity.in_flight or type(array) is not np.ndarray or not array.flags.carray or type(op) is not str:
            self._all_reduce(array, op, blocking=True).wait()
            return
        call = "all_reduce", array.dtype, array.size, op, 0
        run = self._fast_calls.get(call) or self._fast_call(array, call)
        self._begin_call(call)
        vector = array if array.ndim == 1 else array.reshape(-1)
        self._fast_path("all_reduce", self.traffic["all_reduce"], run, vector)

    @staged
    def iall_reduce_compressed(self, array: np.ndarray, state: Compressed, op: str = "sum") -> Request:
        """The sum (mean) as by `iall_reduce`, in 16-bit messages; state: a `Compressed` (hpcdl/comm/compressed.py).

        It uses its own algorithm. The rounding error stays in `state` for the next call.
        """
        state.check_vector(flat(array), op)
        return self._all_reduce(array, op, Algorithm("all_reduce_compressed", state.steps))

    def all_reduce_compressed(self, array: np.ndarray, state: Compressed, op: str = "sum") -> None:
        self.iall_reduce_compressed(array, state, op).wait()

    @staged(direct=True)
    def _all_reduce(self, array: np.ndarray, name: str, algorithm: Any = None, blocking: bool = False) -> Request:
        """Run an all-reduce on the request path."""
        vector, op = flat(array, written=True), operation(name, array.dtype)
        comm = self._lane((algorithm.name if algorithm else "all_reduce", vector.dtype, vector.size, name, 0))
        algorithm, memory = algorithm or self._chosen(vector), self.node_memory
        if algorithm.steps is None:
            steps = self._at_once("all_reduce", lambda: algorithm.blocking(comm, vector, op))
        elif blocking and algorithm.meets:
            steps = algorithm.meeting(comm, vector, op)
        else:
            steps = algorithm.steps(comm, vector, op)

        def finish() -> None:
            op.finish(vector, self.size)
            if memory is not None:
                comm.counters.bytes += memory.take_written()

        at_once = algorithm.steps is None  # it blocks, so the comparison may block, too
        if at_once and self._checker is not None:
            waited = self._checker.before(self, self._latest_call) / 1e9
            comm.counters.blocked_seconds += waited
            comm.counters.seconds += waited
        return self._request("all_reduce", steps, comm, finish, compared=at_once)

    def _at_once(self, name: str, call: Callable[[], object]) -> Iterator[Step]:
        """Run a call that has no steps; all of its time counts as blocked."""
        start = clock()
        with activity.inside(name):
            call()
        self.traffic[name].blocked_seconds += (clock() - start) / 1e9
        yield from ()

    def _chosen(self, vector: np.ndarray) -> Algorithm:
        """Return the algorithm for this vector (`auto` chooses by length)."""
        choose = self.algorithm.choose
        return self.algorithm if choose is None else choose(self._collective, vector)

    def _fast_call(self, array: np.ndarray, call: Call) -> Callable[[np.ndarray], tuple[int, int]]:
        """Return the function that the fast path runs for this all_reduce. Raises UsageError."""
        vector, op, what = flat(array), operation(call[3], array.dtype), number(call)
        comm = self._counted("all_reduce", self._collective)
        algorithm, memory, size = self._chosen(vector), self.node_memory, self.size
        reduce: Any = algorithm.bind(comm, vector, op) if algorithm.bind is not None else None
        same, checked = CallComparison(self._collective, vector, op) if algorithm.meets else None, False

        def by_messages(vector: np.ndarray) -> tuple[int, int]:
            nonlocal checked
            comm.lane, comm.counters = self._lane_of(what), self.traffic["all_reduce"]
            waited = blocking_call(algorithm, comm, vector, op, same, checked)
            checked = True
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

    # -- other collectives ---------------------------------------------------------------------------------------------

    @staged
    def ireduce(self, array: np.ndarray, root: int = 0, op: str = "sum") -> Request:
        """Replace the `array` of rank `root` by the sum (mean, max, min) over all ranks; the others keep theirs."""
        vector, reduction = flat(array, written=self.rank == root), operation(op, array.dtype)
        self._check_rank(root)
        total, finish = self._of_root(vector, root, reduction)
        comm = self._lane(("reduce", vector.dtype, vector.size, op, root))
        return self._request("reduce", tree_reduce.steps(comm, total, reduction, root, met=True), comm, finish)

    def reduce(self, array: np.ndarray, root: int = 0, op: str = "sum") -> None:
        vector = self._fast_vector(array, self.rank == root)
        if vector is None or not self._known(root):
            self.ireduce(array, root, op).wait()
            return
        reduction = operation(op, vector.dtype)
        total, finish = self._of_root(vector, root, reduction)
        comm = self._fast_lane(("reduce", vector.dtype, vector.size, op, root))
        steps = tree_reduce.steps(comm, total, reduction, root, met=True)
        self._fast_path("reduce", comm.counters, run_steps, steps, finish)

    def _of_root(self, vector: np.ndarray, root: int, op: Reduction) -> tuple[np.ndarray, Callable | None]:
        """Return the vector to reduce in place (a copy on ranks other than the root), and the root's final division."""
        if self.rank != root:
            return vector.copy(), None
        return vector, (lambda: op.finish(vector, self.size)) if op.divides else None

    @staged
    def ibroadcast(self, array: np.ndarray, root: int = 0) -> Request:
        """Replace every rank's `array` by that of rank `root`."""
        vector = flat(array, written=self.rank != root)
        self._check_rank(root)
        comm = self._lane(("broadcast", vector.dtype, vector.size, "", root))
        return self._request("broadcast", tree_broadcast.steps(comm, vector, root, met=True), comm)

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        vector = self._fast_vector(array, self.rank != root)
        if vector is None or not self._known(root):
            self.ibroadcast(array, root).wait()
            return
        comm = self._fast_lane(("broadcast", vector.dtype, vector.size, "", root))
        self._fast_path("broadcast", comm.counters, run_steps, tree_broadcast.steps(comm, vector, root, met=True))

    @staged
    def ireduce_scatter(self, array: np.ndarray, op: str = "sum") -> Request:
        """Leave in rank r chunk r of the sum (mean, max, min) over all ranks; the result is a view of that chunk.

        In place: the other chunks of `array` hold partial sums afterwards. Chunks are those of `hpcdl.chunks`.
        """
        vector, reduction = flat(array, written=True), operation(op, array.dtype)
        comm = self._lane(("reduce_scatter", vector.dtype, vector.size, op, 0))
        own = vector[chunk(vector.size, self.size, self.rank)]

        def finish() -> "np.ndarray":
            reduction.finish(own, self.size)
            return own

        return self._request("reduce_scatter", ring_reduce_scatter.steps(comm, vector, reduction), comm, finish)

    def reduce_scatter(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        vector = self._fast_vector(array, written=True)
        if vector is None:
            return self.ireduce_scatter(array, op).wait()
        reduction = operation(op, vector.dtype)
        comm = self._fast_lane(("reduce_scatter", vector.dtype, vector.size, op, 0))
        own = vector[chunk(vector.size, self.size, self.rank)]
        finish = (lambda: reduction.finish(own, self.size)) if reduction.divides else None
        self._fast_path(
            "reduce_scatter", comm.counters, run_steps, ring_reduce_scatter.steps(comm, vector, reduction), finish
        )
        return own

    @staged
    def iall_gather(self, array: np.ndarray) -> Request:
        """Fill in all chunks of `array`, of which rank r holds chunk r, on all ranks."""
        vector = flat(array, written=True)
        comm = self._lane(("all_gather", vector.dtype, vector.size, "", 0))
        return self._request("all_gather", ring_all_gather.steps(comm, vector), comm)

    def all_gather(self, array: np.ndarray) -> None:
        vector = self._fast_vector(array, written=True)
        if vector is None:
            self.iall_gather(array).wait()
            return
        comm = self._fast_lane(("all_gather", vector.dtype, vector.size, "", 0))
        self._fast_path("all_gather", comm.counters, run_steps, ring_all_gather.steps(comm, vector))

    def irun(self, call: Call, steps: Callable[[CountingIntracomm], Iterator[Step]]) -> Request:
        """Run a collective operation by the caller's algorithm: steps(comm) is its generator (collective_schedule.py).

        call: name, type, length, reduction and root, as the ranks compare them (call_matching.py); equal on all ranks.
        """
        self._check_rank(call[4])
        comm = self._lane(call)
        return self._request(call[0], steps(comm), comm)

    def run(self, call: Call, steps: Callable[[CountingIntracomm], Iterator[Step]]) -> None:
        if activity.in_flight or not self._known(call[4]):
            self.irun(call, steps).wait()
            return
        comm = self._fast_lane(call)
        self._fast_path(call[0], comm.counters, run_steps, steps(comm))

    def ibarrier(self) -> Request:
        """Complete when all ranks have called this."""
        comm = self._lane(BARRIER)
        return self._request("barrier", dissemination_barrier.steps(comm), comm)

    def barrier(self) -> None:
        if activity.in_flight:
            self.ibarrier().wait()
            return
        comm = self._fast_lane(BARRIER)
        self._fast_path("barrier", comm.counters, run_steps, dissemination_barrier.steps(comm))


def run_steps(steps: Iterable[Step]) -> tuple[int, int]:
    """Run the steps one after the other; return the nanoseconds waited, and 0 bytes moved without a message."""
    waited = 0
    for step in steps:
        start = clock()
        complete(step)
        waited += clock() - start
    return waited, 0


def blocking_call(
    algorithm: Algorithm,
    comm: CountingIntracomm,
    vector: np.ndarray,
    op: Reduction,
    same: CallComparison | None,
    checked: bool,
) -> int:
    """Run the blocking call of an algorithm; return the nanoseconds waited.

    All the time of a call without steps counts as waiting. same: the comparison of an algorithm that `meets`. The first
    call of its kind is compared before it is made, because MPICH ends the job if calls differ; a later one (`checked`)
    is compared beside it.
    """
    if algorithm.steps is not None and same is None:
        return run_steps(algorithm.steps(comm, vector, op))[0]
    start = clock()
    compared = same.start() if same is not None else MPI.REQUEST_NULL  # ranks may wait for it: see `meeting`
    if same is not None and not checked:
        activity.block(compared.Test)
        same.check()
    try:
        algorithm.blocking(comm, vector, op)  # type: ignore[misc]  # not None here
    finally:
        if same is not None and checked:
            activity.block(compared.Test)
            same.check()
    return clock() - start
