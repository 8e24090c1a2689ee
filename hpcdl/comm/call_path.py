"""The two paths of an operation through a communicator; both send the same messages with the same tags.

    request path    a `Request` (requests.py): may be in flight beside others, and advances them while it waits
    fast path       for a blocking call while nothing is in flight: the same steps, executed one after the other

One rank may take one path, and another the other. Both check, count and time an operation, report it to the watchdog
and record its span. The request path costs some us more."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.call_matching import number
from hpcdl.comm.counting import LANES, Counters, CountingIntracomm, TranslatedSentCounts, translate_ranks
from hpcdl.comm.diagnostics.call_signature import ALL, TYPES, Call, describe_call
from hpcdl.comm.diagnostics.collective_checker import CollectiveChecker
from hpcdl.comm.diagnostics.flight_recorder import FAILED, REMEMBERED
from hpcdl.comm.progress import WaitTarget, activity, clock
from hpcdl.comm.requests import Request
from hpcdl.comm.trace import Timeline, Traffic
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array, on_device

OWN_LANES = LANES - 1  # lanes of collective operations; lane 0 is for tags that the caller names
MOST_TAG = 32767  # what MPI guarantees


def flat(array: np.ndarray, written: bool = False) -> np.ndarray:
    """Return a flat view of a contiguous array; UsageError for other buffers. written: the operation writes to it."""
    if not isinstance(array, np.ndarray) and not on_device(array):
        raise UsageError(f"a message is a numpy array, not {type(array).__name__}")
    if not array.flags.c_contiguous:
        advice = "pass a contiguous array, or a contiguous part of this one"
        raise UsageError(f"a buffer of shape {array.shape} is not contiguous; {advice}")
    if array.dtype not in TYPES:
        raise UsageError(f"MPI has no type for elements of {array.dtype}; convert the array first")
    if written and isinstance(array, np.ndarray) and not array.flags.writeable:
        raise UsageError("the array is read-only, and the operation writes to it; pass array.copy()")
    return array.reshape(-1)


class CallPath:
    """Base of a communicator: the request path and the fast path of its operations."""

    activity = activity  # the state of this process's communication
    mpi: MPI.Intracomm  # for point-to-point messages
    rank: int
    size: int
    traffic: Traffic
    timeline: Timeline
    allreduce: str
    checker: CollectiveChecker | None  # None: the ranks do not compare their calls
    _fast_calls: dict[Call, Callable[[np.ndarray], tuple[int, int]]]  # of all_reduce (collectives.py)

    def _open_call_path(self, collective: MPI.Intracomm) -> None:
        self._collective = collective  # for collective operations
        self._everyone = WaitTarget(self)
        self._others: dict[int, WaitTarget] = {}
        self.sequence = 0  # number of collective calls so far
        self._calls: list[Call | None] = [None] * REMEMBERED  # the last calls, a ring buffer
        self._intracomm = CountingIntracomm
        self._counting: dict[str, CountingIntracomm] = {}  # by operation, for the fast path and for named tags
        self._routes = TranslatedSentCounts(self.traffic.sent, lambda: self._world_ranks)

    def _fast_vector(self, array: Array, written: bool = False) -> np.ndarray | None:
        """Return the array as a flat vector (see `flat`) if a blocking call may take the fast path, else None."""
        if activity.in_flight or type(array) is not np.ndarray:
            return None
        flags = array.flags
        if array.dtype not in TYPES or not (flags.carray if written else flags.c_contiguous and flags.aligned):
            return None  # the request path refuses or copies it
        return array if array.ndim == 1 else array.reshape(-1)

    def _fast_path(
        self,
        name: str,
        counters: Counters,
        run: Callable[[Any], tuple[int, int]],
        argument: Any,
        finish: Callable[[], Any] | None = None,
        peer: dict[str, int] | None = None,
        awaits: WaitTarget | None = None,
    ) -> Any:
        """Run an operation on the fast path: run(argument), then finish(), whose value is returned. run returns
        nanoseconds waited and bytes moved without a message. peer: as in `Request`. awaits: its target; None: all."""
        counters.calls += 1
        before, around, began, waits = counters.bytes, activity.operation, activity.since, activity.awaits
        activity.since = start = clock()
        activity.operation, activity.awaits = name, awaits or self._everyone
        activity.last = name
        flight = activity.flight
        record = flight.begin(self, name, start, ALL if awaits is None else awaits.other) if flight is not None else 0
        try:
            checker = self.checker if awaits is None else None
            compared = checker.before(self, self._latest_call) if checker is not None else 0
            waited, written = run(argument)
            result = finish() if finish is not None else None
        except BaseException:
            if flight is not None:
                flight.end(record, clock(), 0, FAILED)
            raise
        finally:
            activity.operation, activity.since, activity.awaits = around, began, waits  # as `leave` does
        counters.bytes += written
        stop = clock()
        if flight is not None:
            flight.end(record, stop, counters.bytes - before)
        counters.seconds += (stop - start) / 1e9
        counters.blocked_seconds += (waited + compared) / 1e9
        timeline = self.timeline
        if timeline.limit:  # as `add` does; once the deque is full, this is all the time
            sent = {"bytes sent": counters.bytes - before}
            timeline.spans.append((name, start, stop, sent | peer if peer else sent))
            timeline.ended += 1
        return result

    def send_through(self, kind: type[CountingIntracomm]) -> None:
        """Send the messages of later operations through communicators of class `kind`, as a fault drill does."""
        self._intracomm = kind
        self._counting.clear()
        self._fast_calls.clear()

    def _counted(self, name: str, comm: MPI.Intracomm) -> CountingIntracomm:
        counting = self._counting.get(name)
        if counting is None:
            counting = self._counting[name] = self._intracomm(comm)
            counting.sent = self._routes
        counting.counters = self.traffic[name]
        return counting

    def _lane(self, call: Call, reused: bool = False) -> CountingIntracomm:
        """Begin a collective call; return a communicator with tags of its own. reused: the next call may reuse it."""
        self._begin_call(call)
        name = "all_reduce" if call[0] == "all_reduce_compressed" else call[0]
        if reused:
            comm = self._counting.get(name) or self._counted(name, self._collective)
        else:
            comm = self._intracomm(self._collective)
            comm.sent = self._routes
        comm.lane, comm.counters = self._lane_of(number(call)), self.traffic[name]
        return comm

    def _wait_target(self, other: int) -> WaitTarget:
        found = self._others.get(other)
        if found is None:
            found = self._others[other] = WaitTarget(self, other)
        return found

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Context of a collective call of the MPI library; counts the call in the sequence of this communicator."""
        self._begin_call((name, None, 0, "", 0))
        if self.checker is not None:
            self.checker.before(self, self._latest_call)
        flight = activity.flight
        with activity.inside(name, self._everyone):
            record = flight.begin(self, name, activity.since, ALL) if flight is not None else 0
            try:
                yield
            finally:
                if flight is not None:
                    flight.end(record, clock(), 0)

    @property
    def in_flight(self) -> list[Request]:
        """The operations of this communicator that are not complete."""
        return [request for request in activity.in_flight if request.communicator is self]

    @property
    def _latest_call(self) -> Call:
        return self._calls[self.sequence % REMEMBERED]  # type: ignore[return-value]

    def algorithm_of(self, call: Call) -> str:
        """Return the name of an all_reduce's algorithm, which the ranks compare; "" for other calls."""
        return self.allreduce if call[0] == "all_reduce" else ""

    def _begin_call(self, call: Call) -> None:
        self.sequence += 1
        self._calls[self.sequence % REMEMBERED] = call

    def _lane_of(self, what: int) -> int:
        return 1 + self.sequence % OWN_LANES + what * LANES

    def call_text(self, sequence: int) -> str | None:
        """Return the text of this rank's call with this sequence number; None if not made yet, or forgotten."""
        call = self._calls[sequence % REMEMBERED]
        known = call is not None and self.sequence - REMEMBERED < sequence <= self.sequence
        return describe_call(call) if known else None  # type: ignore[arg-type]

    def _peer(self, direction: str, rank: int) -> dict[str, int] | None:
        return {direction: self._world_ranks[rank]} if self.timeline.limit else None

    @functools.cached_property
    def _world_ranks(self) -> list[int]:
        """The number of each rank in `timeline.comm`, the communicator from which this one is split."""
        return translate_ranks(self.mpi, self.timeline.comm)

    @property
    def sent_to(self) -> list[list[int]]:
        """[rank, bytes, messages] for each rank of this communicator to which this rank has sent messages."""
        rows, places = self.traffic.sent, self._world_ranks
        totals = [[rank, rows[place][-1], sum(rows[place][:-1])] for rank, place in enumerate(places) if place in rows]
        return [total for total in totals if total[2]]

    def _known(self, rank: int, tag: int = 0) -> bool:
        """True if rank and tag are valid; if not, the request path raises the error."""
        return 0 <= rank < self.size and 0 <= tag <= MOST_TAG

    def _check(self, rank: int, tag: int = 0) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank} in a group of {self.size} (0 to {self.size - 1})")
        if not 0 <= tag <= MOST_TAG:
            raise UsageError(f"a tag is a number from 0 to {MOST_TAG}, not {tag}")
