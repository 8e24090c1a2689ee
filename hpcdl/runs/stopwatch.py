"""Where the time of one rank's steps goes: what counts as step, data, communication, idle and bookkeeping.

|---------------------- step ----------------------|
| fetching |  computing  | communicating |computing|   apart   |
                         |...idle...                            boundaries: agreement, evaluation, checkpoint

step_seconds             all of a step except `fetching` and `apart`
data_seconds             waiting for a batch
communication_seconds    the part of step_seconds inside the communicator's calls
idle_seconds             the part of communication_seconds in which the rank was blocked until messages came
apart_seconds            bookkeeping between steps; neither its time nor its messages count as the step's"""

import contextlib
from collections.abc import Iterator

from hpcdl import drill
from hpcdl.comm.trace import Timeline, Traffic
from hpcdl.drill import nanoseconds as clock


class Stopwatch:
    """The seconds of one rank. earlier_seconds: of the run before a resumption."""

    def __init__(self, traffic: Traffic, timeline: Timeline):
        self.traffic, self.timeline = traffic, timeline
        self.step_seconds = self.data_seconds = self.apart_seconds = self.earlier_seconds = 0.0
        self.communication_seconds = self.idle_seconds = 0.0
        self.lap_begun = 0  # begin of this lap in nanoseconds; next line: the communicator's counters at that time
        self.communicated = self.idled = 0.0

    @contextlib.contextmanager
    def step(self, name: str = "step") -> Iterator[None]:
        """Time the body as a step, without what is `fetching` or `apart` in it; record it as a span of this name."""
        drill.current.step_begins(name)
        self._begin_lap()
        begun = self.lap_begun
        yield
        self._lap()
        self.timeline.add(name, begun, self.lap_begun)

    @contextlib.contextmanager
    def apart(self, seconds: str = "apart_seconds") -> Iterator[None]:
        """Within a step: add the body's time to the attribute `seconds`; its time and messages are not the step's."""
        self._lap()
        begun = self.lap_begun
        yield
        self._begin_lap()
        setattr(self, seconds, getattr(self, seconds) + (self.lap_begun - begun) / 1e9)

    def fetching(self) -> contextlib.AbstractContextManager[None]:
        """Within a step: time the body as waiting for data."""
        return self.apart("data_seconds")

    def fetched_since(self, begun: int) -> None:
        """Between two steps: count the time since `begun` (by `clock`) as waiting for a batch."""
        self.data_seconds += (clock() - begun) / 1e9

    def excuse(self, seconds: float) -> None:
        """Subtract a wait of `seconds` within the step, in which the rank that answers was busy with bookkeeping."""
        self.step_seconds -= seconds
        self.communication_seconds -= seconds
        self.idle_seconds -= seconds

    @property
    def seconds(self) -> float:
        """Seconds spent on steps and data up to the last lap, also before a resumption."""
        return self.earlier_seconds + self.step_seconds + self.data_seconds

    def now(self) -> float:
        """Return `seconds` plus the time since the last lap, within the current step."""
        return self.seconds + (clock() - self.lap_begun) / 1e9

    def _begin_lap(self) -> None:
        self.lap_begun = clock()
        self.communicated, self.idled = self.traffic.seconds, self.traffic.blocked_seconds

    def _lap(self) -> None:
        """Add the lap's time to that of steps, and begin another: the sums are up to date within a step, too."""
        begun, communicated, idled = self.lap_begun, self.communicated, self.idled
        self._begin_lap()
        self.step_seconds += (self.lap_begun - begun) / 1e9
        self.communication_seconds += self.communicated - communicated
        self.idle_seconds += self.idled - idled
