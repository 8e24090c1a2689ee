"""Where the time of one rank's steps goes: what counts as step, data, communication, idle and bookkeeping.

    |---------------------- step ----------------------|
    | fetching |  computing  | communicating |computing|   apart   |
                             |...idle...                            boundaries: agreement, evaluation, checkpoint

    step_seconds             all of a step but what is fetched and what is apart
    data_seconds             waiting for a batch
    communication_seconds    the part of the steps that was spent inside the communicator's calls
    idle_seconds             the part of that in which the rank was blocked until messages had come
    apart_seconds            bookkeeping between steps, which is no part of them: neither its time nor its messages'

It knows nothing of a run: it is handed the communicator's counters of seconds and the timeline for its spans.
"""

import contextlib
from collections.abc import Callable, Iterator

from hpcdl.comm.trace import Timeline, Traffic
from hpcdl.faults.clock import nanoseconds as clock


class Stopwatch:
    """The seconds of one rank. earlier: of a run that is gone on with, the seconds before. watcher: is told the name of
    each step before it begins (hpcdl/faults/inject.py).
    """

    watcher: Callable[[str], object] | None = None

    def __init__(self, traffic: Traffic, timeline: Timeline):
        self.traffic, self.timeline = traffic, timeline
        self.step_seconds = self.data_seconds = self.apart_seconds = self.earlier_seconds = 0.0
        self.communication_seconds = self.idle_seconds = 0.0
        self.lap_begun = 0  # when what is counted now began, in nanoseconds, and the communicator's counters then
        self.communicated = self.idled = 0.0

    @contextlib.contextmanager
    def step(self, name: str = "step") -> Iterator[None]:
        """What is inside is a step, and a span of this name, but for what is `fetching` or `apart` in it."""
        if self.watcher is not None:
            self.watcher(name)
        self._begin_lap()
        begun = self.lap_begun
        yield
        self._lap()
        self.timeline.add(name, begun, self.lap_begun)

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Within a step: what is inside is waiting for data."""
        with self._no_step():
            begun = self.lap_begun
            yield
        self.data_seconds += (self.lap_begun - begun) / 1e9

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Within a step: what is inside is bookkeeping."""
        with self._no_step():
            begun = self.lap_begun
            yield
        self.apart_seconds += (self.lap_begun - begun) / 1e9

    def fetched_since(self, begun: int) -> None:
        """Between two steps: since `begun`, by `clock`, a batch was waited for."""
        self.data_seconds += (clock() - begun) / 1e9

    def excuse(self, seconds: float) -> None:
        """Take off a wait within the step that was due to bookkeeping on the rank that answers."""
        self.step_seconds -= seconds
        self.communication_seconds -= seconds
        self.idle_seconds -= seconds

    @property
    def seconds(self) -> float:
        """Spent on steps and data so far, up to the last lap, those before a resumption included."""
        return self.earlier_seconds + self.step_seconds + self.data_seconds

    def now(self) -> float:
        """The same, with what has passed of the step that is under way."""
        return self.seconds + (clock() - self.lap_begun) / 1e9

    @contextlib.contextmanager
    def _no_step(self) -> Iterator[None]:
        """What is inside is no part of the step, neither its time nor its messages."""
        self._lap()
        yield
        self._begin_lap()

    def _begin_lap(self) -> None:
        """From now on what passes is the step's."""
        self.lap_begun = clock()
        self.communicated, self.idled = self.traffic.seconds, self.traffic.blocked_seconds

    def _lap(self) -> None:
        """Add the time since the lap began to the steps', and begin another: what is added up is true in the middle."""
        begun, communicated, idled = self.lap_begun, self.communicated, self.idled
        self._begin_lap()
        self.step_seconds += (self.lap_begun - begun) / 1e9
        self.communication_seconds += self.communicated - communicated
        self.idle_seconds += self.idled - idled
