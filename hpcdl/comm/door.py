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

from hpcdl.comm.counting import LANES, Counters, CountingIntracomm
from hpcdl.comm.progress import activity, clock
from hpcdl.comm.requests import Request
from hpcdl.comm.steps import Step
from hpcdl.comm.trace import Timeline, Traffic
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array, on_device

NUMBERS = frozenset(map(np.dtype, np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"))  # that MPI knows

OWN_LANES = LANES - 1  # for operations that take one; lane 0 is for tags that the caller names
MOST_TAG = 32767  # what MPI guarantees


def flat(array: np.ndarray) -> np.ndarray:
    """A flat view of a contiguous array, which is what travels; anything else is refused."""
    if not isinstance(array, np.ndarray) and not on_device(array):
        raise UsageError(f"a message is a numpy array, not {type(array).__name__}")
    if not array.flags.c_contiguous:
        raise UsageError(
            f"a buffer of shape {array.shape} is not contiguous; pass np.ascontiguousarray(...) or a contiguous part"
        )
    if array.dtype not in NUMBERS:
        raise UsageError(f"messages hold numbers that MPI knows, not {array.dtype}; convert the array first")
    return array.reshape(-1)


class Door:
    """What all operations of a communicator share."""

    mpi: MPI.Intracomm  # for messages between two ranks
    rank: int
    size: int
    traffic: Traffic
    timeline: Timeline

    def _open_door(self, collective: MPI.Intracomm) -> None:
        self._collective = collective  # for operations of all ranks
        self._sequence = 0  # of those operations
        self._counting: dict[str, CountingIntracomm] = {}  # by operation, for those that go the short way or name tags
        self._places: list[int] | None = None

    # -- the plain way -----------------------------------------------------------------------------------------------

    def _request(
        self,
        name: str,
        steps: Iterator[Step],
        comm: CountingIntracomm,
        finish: Callable[[], Any] | None = None,
        statuses: list[MPI.Status] | None = None,
        peer: dict[str, int] | None = None,
    ) -> Request:
        return Request(self, name, steps, comm.counters, finish, statuses, peer)

    def _lane(self, name: str) -> CountingIntracomm:
        """A counting communicator with tags of its own; all ranks start the same operations in the same order."""
        return self._next_lane(CountingIntracomm(self._collective), name)

    # -- the short way -----------------------------------------------------------------------------------------------

    def _short_vector(self, array: Array) -> np.ndarray | None:
        """The array as a flat vector, where a blocking call may go the short way; else None."""
        if activity.in_flight or type(array) is not np.ndarray:
            return None
        if array.dtype not in NUMBERS or not array.flags.c_contiguous:
            return None  # the plain way says what is wrong with it
        return array if array.ndim == 1 else array.reshape(-1)

    def _short_lane(self, name: str) -> CountingIntracomm:
        """As `_lane`, for an operation that is over before the next one starts."""
        return self._next_lane(self._counting.get(name) or self._counted(name, self._collective), name)

    def _short_way(
        self,
        name: str,
        counters: Counters,
        run: Callable[[Any], tuple[int, int]],
        argument: Any,
        finish: Callable[[], object] | None = None,
        peer: dict[str, int] | None = None,
    ) -> None:
        """The short way: run(argument), then finish().

        run returns the nanoseconds for which it waited, and the bytes that passed without a message.
        """
        counters.calls += 1
        before, around = counters.bytes, activity.operation
        activity.since = start = clock()
        activity.operation = activity.last = name
        try:
            waited, written = run(argument)
            if finish is not None:
                finish()
        finally:
            activity.operation = around
        counters.bytes += written
        stop = clock()
        counters.seconds += (stop - start) / 1e9
        counters.blocked_seconds += waited / 1e9
        timeline = self.timeline
        if len(timeline.spans) < timeline.limit:
            timeline.add(name, start, stop, **{"bytes sent": counters.bytes - before}, **(peer or {}))
        else:
            timeline.dropped += 1

    # -- both --------------------------------------------------------------------------------------------------------

    def _counted(self, name: str, comm: MPI.Intracomm) -> CountingIntracomm:
        """The counting communicator of an operation whose tags are the caller's, or those of one lane after another."""
        counting = self._counting.get(name)
        if counting is None:
            counting = self._counting[name] = CountingIntracomm(comm)
        counting.counters = self.traffic[name]
        return counting

    def _next_lane(self, comm: CountingIntracomm, name: str) -> CountingIntracomm:
        self._sequence += 1
        comm.lane, comm.counters = 1 + self._sequence % OWN_LANES, self.traffic[name]
        return comm

    def _peer(self, direction: str, rank: int) -> dict[str, int] | None:
        """What the trace says of the other rank of a message: its number among the rows of the trace."""
        if not self.timeline.limit:
            return None
        if self._places is None:
            ours, rows = self.mpi.Get_group(), self.timeline.comm.Get_group()
            self._places = ours.Translate_ranks(None, rows)
            ours.Free()
            rows.Free()
        return {direction: int(self._places[rank])}

    def _known(self, rank: int, tag: int = 0) -> bool:
        """Whether there are such a rank and such a tag; if not, the plain way says which there are."""
        return 0 <= rank < self.size and 0 <= tag <= MOST_TAG

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= MOST_TAG:
            raise UsageError(f"a tag is a number from 0 to {MOST_TAG}, not {tag}")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank} in a group of {self.size} (0 to {self.size - 1})")
