"""The two ways by which an operation passes through a communicator; they send the same messages with the same tags.

    the plain way    a `Request` (requests.py): may be in flight beside others, and takes them forward while it waits
    the short way    for a blocking call while nothing is in flight: the same steps, one after the other, in place

What is in flight differs from rank to rank, so one rank may go the plain way and another the short one. Both check,
count and time the same, both tell the watchdog, and both leave the same span. The plain way costs several us more.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.call_matching import number
from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.counting import LANES, Counters, CountingIntracomm, Routes, places_among
from hpcdl.comm.diagnostics.call_signature import ALL, TYPES, Call, told
from hpcdl.comm.diagnostics.collective_checker import Checking
from hpcdl.comm.diagnostics.flight_recorder import FAILED, REMEMBERED
from hpcdl.comm.progress import Awaits, activity, clock
from hpcdl.comm.requests import Request
from hpcdl.comm.trace import Timeline, Traffic
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array, on_device

OWN_LANES = LANES - 1  # for operations that take one; lane 0 is for tags that the caller names
MOST_TAG = 32767  # what MPI guarantees


def flat(array: np.ndarray, written: bool = False) -> np.ndarray:
    """A flat view of a contiguous array, which is what travels; anything else is refused. written: it is written to."""
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


class Door:
    """What all operations of a communicator share."""

    mpi: MPI.Intracomm  # for messages between two ranks
    rank: int
    size: int
    traffic: Traffic
    timeline: Timeline
    allreduce: str
    _checking: Checking | None

    def _open_door(self, collective: MPI.Intracomm) -> None:
        self._collective = collective  # for operations of all ranks
        self._everyone = Awaits(self)
        self._others: dict[int, Awaits] = {}
        self.sequence = 0  # of calls of all ranks
        self._calls: list[Call | None] = [None] * REMEMBERED  # the last ones
        self._counting: dict[str, CountingIntracomm] = {}  # by operation, for those that go the short way or name tags
        self._routes = Routes(self.traffic.sent, self._among_all)  # looked up at the first message to a rank
        self._places: list[int] | None = None

    # -- the plain way -----------------------------------------------------------------------------------------------

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
        if other == ALL and self._checking is not None and not compared:
            steps = self._checking.first(self, self._latest, steps)
        return Request(self, name, steps, comm.counters, finish, peer, other)

    def _lane(self, call: Call) -> CountingIntracomm:
        """A counting communicator with tags of its own; all ranks start the same operations in the same order."""
        comm = CountingIntracomm(self._collective)
        comm.sent = self._routes
        return self._next_lane(comm, call)

    # -- the short way -----------------------------------------------------------------------------------------------

    def _short_vector(self, array: Array, written: bool = False) -> np.ndarray | None:
        """The array as a flat vector, where a blocking call may go the short way; else None. written: as in `flat`."""
        if activity.in_flight or type(array) is not np.ndarray:
            return None
        flags = array.flags
        if array.dtype not in TYPES or not (flags.carray if written else flags.c_contiguous and flags.aligned):
            return None  # the plain way says what is wrong with it, or copies it
        return array if array.ndim == 1 else array.reshape(-1)

    def _short_lane(self, call: Call) -> CountingIntracomm:
        """As `_lane`, for an operation that is over before the next one starts."""
        return self._next_lane(self._counting.get(call[0]) or self._counted(call[0], self._collective), call)

    def _short_way(
        self,
        name: str,
        counters: Counters,
        run: Callable[[Any], tuple[int, int]],
        argument: Any,
        finish: Callable[[], object] | None = None,
        peer: dict[str, int] | None = None,
        awaits: Awaits | None = None,
    ) -> None:
        """The short way: run(argument), then finish(). awaits: all ranks of the group where it is not given.

        run returns the nanoseconds for which it waited, and the bytes that passed without a message.
        """
        counters.calls += 1
        before, around, began, waits = counters.bytes, activity.operation, activity.since, activity.awaits
        activity.since = start = clock()
        activity.operation, activity.awaits = name, awaits or self._everyone
        activity.last = name
        flight = activity.flight
        record = flight.begin(self, name, start, ALL if awaits is None else awaits.other) if flight is not None else 0
        try:
            compared = self._checking.before(self, self._latest) if awaits is None and self._checking is not None else 0
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

    def _counted(self, name: str, comm: MPI.Intracomm) -> CountingIntracomm:
        """The counting communicator of an operation whose tags are the caller's, or those of one lane after another."""
        counting = self._counting.get(name)
        if counting is None:
            counting = self._counting[name] = CountingIntracomm(comm)
            counting.sent = self._routes
        counting.counters = self.traffic[name]
        return counting

    def _next_lane(self, comm: CountingIntracomm, call: Call) -> CountingIntracomm:
        self._next(call)
        name = "all_reduce" if call[0] == "all_reduce_compressed" else call[0]
        comm.lane, comm.counters = self._lane_of(number(call)), self.traffic[name]
        return comm

    def _awaits(self, other: int) -> Awaits:
        """What a wait for this rank is for."""
        found = self._others.get(other)
        if found is None:
            found = self._others[other] = Awaits(self, other)
        return found

    def calls(self, name: str) -> Awaits:
        """All ranks make a call of MPI's of this name, which is counted among those of all ranks."""
        self._next((name, None, 0, "", 0))
        if self._checking is not None:
            self._checking.before(self, self._latest)
        return self._everyone

    @property
    def _latest(self) -> Call:
        """The call of all ranks that has begun last."""
        return self._calls[self.sequence % REMEMBERED]  # type: ignore[return-value]

    @property
    def checked(self) -> bool:
        """Whether the ranks compare what they call together."""
        return self._checking is not None

    def algorithm_of(self, call: Call) -> str:
        """By what name the ranks compare the algorithm of a call."""
        return self.allreduce if call[0] == "all_reduce" else ""

    def _next(self, call: Call) -> None:
        """One more operation of all ranks begins."""
        self.sequence += 1
        self._calls[self.sequence % REMEMBERED] = call

    def _lane_of(self, what: int) -> int:
        """The lane of the operation that has begun last; what: the number of its call."""
        return 1 + self.sequence % OWN_LANES + what * LANES

    def called(self, sequence: int) -> str | None:
        """What this rank's call of this number was, in words; None where it is to come, or forgotten."""
        call = self._calls[sequence % REMEMBERED]
        known = call is not None and self.sequence - REMEMBERED < sequence <= self.sequence
        return told(call) if known else None  # type: ignore[arg-type]

    def _peer(self, direction: str, rank: int) -> dict[str, int] | None:
        """What the trace says of the other rank of a message: its number among the rows of the trace."""
        if not self.timeline.limit:
            return None
        return {direction: self._among_all()[rank]}

    def _among_all(self) -> list[int]:
        """Of each rank, its number in the communicator that was made first, of which this one is a group."""
        if self._places is None:
            self._places = places_among(self.mpi, self.timeline.comm)
        return self._places

    @property
    def sent_to(self) -> list[list[int]]:
        """What this rank has sent: for each rank of this communicator that got something, [rank, bytes, messages]."""
        rows, places = self.traffic.sent, self._among_all()
        found = [[rank, rows[place][-1], sum(rows[place][:-1])] for rank, place in enumerate(places) if place in rows]
        return [each for each in found if each[2]]

    def _known(self, rank: int, tag: int = 0) -> bool:
        """Whether there are such a rank and such a tag; if not, the plain way says which there are."""
        return 0 <= rank < self.size and 0 <= tag <= MOST_TAG

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= MOST_TAG:
            raise UsageError(f"a tag is a number from 0 to {MOST_TAG}, not {tag}")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank} in a group of {self.size} (0 to {self.size - 1})")
