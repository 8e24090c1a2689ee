"""The two paths of an operation through a communicator; both send the same messages with the same tags.

    request path    a `Request` (requests.py): may be in flight beside others, and advances them while it waits
    fast path       for a blocking call while nothing is in flight: the same steps, executed one after the other

The operations in flight differ from rank to rank, so one rank may take the request path and another the fast path. Both
check, count and time the operation, report it to the watchdog and record its span. The request path costs several us
more.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.call_matching import number
from hpcdl.comm.collective_schedule import Step
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
    """Return a flat view of a contiguous array. Raises UsageError for any other buffer. written: it is written to."""
    if not isinstance(array, np.ndarray) and not on_device(array):
        raise UsageError(f"a message is a numpy array, not {type(array).__name__}")
    if not array.flags.c_contiguous:
        raise UsageError(
            f"a buffer of shape {array.shape} is not contiguous; pass np.ascontiguousarray(...) or a contiguous part"
        )
    if array.dtype not in TYPES:
        raise UsageError(f"messages hold numbers that MPI knows, not {array.dtype}; convert the array first")
    if written and isinstance(array, np.ndarray) and not array.flags.writeable:
        raise UsageError("the array is read-only, and the operation writes to it; pass array.copy()")
    return array.reshape(-1)


class CallPath:
    """Base of a communicator: the request path and the fast path of its operations."""

    mpi: MPI.Intracomm  # for point-to-point messages
    rank: int
    size: int
    traffic: Traffic
    timeline: Timeline
    allreduce: str
    _checker: CollectiveChecker | None
    _fast_calls: dict[Call, Callable[[np.ndarray], tuple[int, int]]]  # of all_reduce (collectives.py)

    def _open_call_path(self, collective: MPI.Intracomm) -> None:
        self._collective = collective  # for collective operations
        self._everyone = WaitTarget(self)
        self._others: dict[int, WaitTarget] = {}
        self.sequence = 0  # number of collective calls so far
        self._calls: list[Call | None] = [None] * REMEMBERED  # the last calls, a ring buffer
        self._intracomm = CountingIntracomm
        self._counting: dict[str, CountingIntracomm] = {}  # by operation, for the fast path and for named tags
        self._routes = TranslatedSentCounts(self.traffic.sent, self._world_ranks)  # ranks translated at first use
        self._places: list[int] | None = None

    # -- the request path --------------------------------------------------------------------------------------------

    def _request(
        self,
        name: str,
        steps: Iterator[Step],
        comm: CountingIntracomm,
        finish: Callable[[], Any] | None = None,
        peer: dict[str, int] | None = None,
        other: int = ALL,
        compared: bool = False,
    ) -> Request:
        if other == ALL and self._checker is not None and not compared:
            steps = self._checker.checked_steps(self, self._latest_call, steps)
        return Request(self, name, steps, comm.counters, finish, peer, other)

    def _lane(self, call: Call) -> CountingIntracomm:
        """Return a counting communicator with its own tags; all ranks start the same operations in the same order."""
        comm = self._intracomm(self._collective)
        comm.sent = self._routes
        return self._next_lane(comm, call)

    # -- the fast path -----------------------------------------------------------------------------------------------

    def _fast_vector(self, array: Array, written: bool = False) -> np.ndarray | None:
        """Return the array as a flat vector if a blocking call may take the fast path, else None (see `flat`)."""
        if activity.in_flight or type(array) is not np.ndarray:
            return None
        flags = array.flags
        if array.dtype not in TYPES or not (flags.carray if written else flags.c_contiguous and flags.aligned):
            return None  # the request path refuses or copies it
        return array if array.ndim == 1 else array.reshape(-1)

    def _fast_lane(self, call: Call) -> CountingIntracomm:
        """As `_lane`, for an operation that ends before the next one starts; its counting communicator is reused."""
        return self._next_lane(self._counting.get(call[0]) or self._counted(call[0], self._collective), call)

    def _fast_path(
        self,
        name: str,
        counters: Counters,
        run: Callable[[Any], tuple[int, int]],
        argument: Any,
        finish: Callable[[], object] | None = None,
        peer: dict[str, int] | None = None,
        awaits: WaitTarget | None = None,
    ) -> None:
        """Run an operation on the fast path: run(argument), then finish(). awaits: None for all ranks of the group.

        run returns the nanoseconds that it waited, and the bytes moved without a message.
        """
        counters.calls += 1
        before, around, began, waits = counters.bytes, activity.operation, activity.since, activity.awaits
        activity.since = start = clock()
        activity.operation, activity.awaits = name, awaits or self._everyone
        activity.last = name
        flight = activity.flight
        record = flight.begin(self, name, start, ALL if awaits is None else awaits.other) if flight is not None else 0
        try:
            compared = (
                self._checker.before(self, self._latest_call) if awaits is None and self._checker is not None else 0
            )
            waited, written = run(argument)
            if finish is not None:
                finish()
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

    # -- both --------------------------------------------------------------------------------------------------------

    def send_through(self, kind: type[CountingIntracomm]) -> None:
        """Send the messages of later operations through communicators of this class, as a fault drill does."""
        self._intracomm = kind
        self._counting.clear()
        self._fast_calls.clear()

    def _counted(self, name: str, comm: MPI.Intracomm) -> CountingIntracomm:
        """Return the reused counting communicator of an operation; it counts into the operation's counters."""
        counting = self._counting.get(name)
        if counting is None:
            counting = self._counting[name] = self._intracomm(comm)
            counting.sent = self._routes
        counting.counters = self.traffic[name]
        return counting

    def _next_lane(self, comm: CountingIntracomm, call: Call) -> CountingIntracomm:
        self._begin_call(call)
        name = "all_reduce" if call[0] == "all_reduce_compressed" else call[0]
        comm.lane, comm.counters = self._lane_of(number(call)), self.traffic[name]
        return comm

    def _wait_target(self, other: int) -> WaitTarget:
        """Return the target of a wait for this rank."""
        found = self._others.get(other)
        if found is None:
            found = self._others[other] = WaitTarget(self, other)
        return found

    def begin_library_call(self, name: str) -> WaitTarget:
        """Register a collective call of the MPI library by this name; return its wait target."""
        self._begin_call((name, None, 0, "", 0))
        if self._checker is not None:
            self._checker.before(self, self._latest_call)
        return self._everyone

    @property
    def _latest_call(self) -> Call:
        """The last collective call that has begun."""
        return self._calls[self.sequence % REMEMBERED]  # type: ignore[return-value]

    @property
    def checked(self) -> bool:
        """True if the ranks compare each collective call (collective_checker.py)."""
        return self._checker is not None

    def algorithm_of(self, call: Call) -> str:
        """Return the name of the call's algorithm, as the ranks compare it."""
        return self.allreduce if call[0] == "all_reduce" else ""

    def _begin_call(self, call: Call) -> None:
        """Register the next collective call."""
        self.sequence += 1
        self._calls[self.sequence % REMEMBERED] = call

    def _lane_of(self, what: int) -> int:
        """Return the lane of the last collective call; what: its call number."""
        return 1 + self.sequence % OWN_LANES + what * LANES

    def call_text(self, sequence: int) -> str | None:
        """Return the text of this rank's call with this sequence number; None if it is in the future or forgotten."""
        call = self._calls[sequence % REMEMBERED]
        known = call is not None and self.sequence - REMEMBERED < sequence <= self.sequence
        return describe_call(call) if known else None  # type: ignore[arg-type]

    def _peer(self, direction: str, rank: int) -> dict[str, int] | None:
        """Return the trace detail that names the other rank of a message, or None without a trace."""
        if not self.timeline.limit:
            return None
        return {direction: self._world_ranks()[rank]}

    def _world_ranks(self) -> list[int]:
        """Return, for each rank, its number in the communicator that this group was derived from first."""
        if self._places is None:
            self._places = translate_ranks(self.mpi, self.timeline.comm)
        return self._places

    @property
    def sent_to(self) -> list[list[int]]:
        """What this rank has sent: [rank, bytes, messages] for each receiving rank of this communicator."""
        rows, places = self.traffic.sent, self._world_ranks()
        totals = [[rank, rows[place][-1], sum(rows[place][:-1])] for rank, place in enumerate(places) if place in rows]
        return [total for total in totals if total[2]]

    def _known(self, rank: int, tag: int = 0) -> bool:
        """True if rank and tag are valid; if not, the request path raises the error."""
        return 0 <= rank < self.size and 0 <= tag <= MOST_TAG

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= MOST_TAG:
            raise UsageError(f"a tag is a number from 0 to {MOST_TAG}, not {tag}")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank} in a group of {self.size} (0 to {self.size - 1})")
