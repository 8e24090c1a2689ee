"""Clocks of a parameter store, and what they allow: grants, rounds, staleness. Pure: no messages, no values.

    a client's clock     the number of its pushes
    the store's clock    the clock of its slowest open client; under async, the number of pushes received
    version              the number of updates applied
    a pull at clock c    is answered when the store's clock has reached c - bound, unless its step has to wait
    step t               is complete when the store's clock has passed it: then its round is applied, and it is counted
    a push               was computed from the store at its client's pull: the updates it missed are its staleness

No client waits for one that has closed (is not in `open`). Steps wait for the horizon that rank 0 sets."""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from hpcdl.errors import UsageError
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.parameter_server.store_messages import ENDED, NO_STEP, Push


class Horizon(NamedTuple):
    """How far clients may go, set by rank 0; infinity: no limit. steps: no step from this one on is given out. limit:
    steps from this one on wait for a higher limit. apart_seconds: rank 0's time for other work than steps."""

    steps: float = math.inf
    limit: float = math.inf
    apart_seconds: float = 0.0


class ClockProgress(NamedTuple):
    """Position of a store, for its successor. of_client: clock by client; counted to staleness: as in `Clocks`.
    losses: (sum of losses, examples) received so far, by step from `counted` on."""

    of_client: dict[int, int]
    counted: int
    granted: int
    pushes: int
    version: int
    low: int
    beyond: frozenset[int]
    staleness: dict[int, int]
    losses: dict[int, tuple[float, float]]


class Clocks:
    """The clocks as one server knows them, from clock `start` on. horizon(), on rank 0: how far clients may go.
    version: updates applied. pushes: pushes received. counted: steps below it are complete and counted. granted: steps
    below it have been given out. broadcast_at: the store's clock at the last broadcast. staleness: applied pushes by
    staleness. Under async, steps below `low` and in `beyond` have been pushed; steps in `again` are given out again."""

    def __init__(
        self,
        clients: Iterable[int],
        consistency: Consistency,
        start: int = 0,
        horizon: Callable[[], Horizon] | None = None,
    ):
        self.consistency, self.led, self.stopped = consistency, horizon is not None, False
        self.horizon: Callable[[], Horizon] = horizon or Horizon
        self.of_client = dict.fromkeys(clients, start)
        self.open = set(self.of_client)  # clients that may still push
        self.start = self.version = self.pushes = self.counted = self.granted = self.broadcast_at = start
        self.low, self.beyond, self.again = start, set(), deque()  # type: int, set[int], deque[int]
        self.staleness: Counter[int] = Counter()

    def progress(self, losses: dict[int, tuple[float, float]]) -> ClockProgress:
        """Return the position of this store. losses: (sum of losses, examples) by incomplete step."""
        counts = self.counted, self.granted, self.pushes, self.version, self.low, frozenset(self.beyond)
        return ClockProgress(dict(self.of_client), *counts, dict(self.staleness), dict(losses))

    def go_on_from(self, progress: ClockProgress) -> None:
        """Continue from another store's position; under async, steps given out but not pushed are given out again."""
        self.of_client |= progress.of_client
        self.counted, self.granted, self.pushes, self.version, self.low, beyond, staleness, _ = progress[1:]
        self.beyond, self.staleness = set(beyond), Counter(staleness)
        if not self.consistency.clocked:
            self.granted = max(beyond, default=self.low - 1) + 1
            self.again = deque(step for step in range(self.low, self.granted) if step not in beyond)

    @property
    def of_store(self) -> int:
        """The store's clock."""
        if not self.consistency.clocked:
            return self.pushes
        return min((self.of_client[client] for client in self.open), default=max(self.of_client.values()))

    # -- pushes ------------------------------------------------------------------------------------------------------

    def step_of(self, push: Push) -> int:
        """Return the step of a push that has just arrived."""
        return push.clock if self.consistency.clocked else self.pushes

    def pushed(self, push: Push) -> None:
        """Advance the clock of the push's client; UsageError if it computed from older values than the bound allows."""
        behind = push.clock - push.seen
        if self.consistency.clocked and behind > self.consistency.bound:
            raise UsageError(
                f"rank {push.client} pushed at clock {push.clock} values computed from parameters of clock "
                f"{push.seen}: more than {self.consistency.bound:g} behind; pull before each push"
            )
        self.of_client[push.client] += 1
        self.pushes += 1
        if not self.consistency.clocked:
            self.beyond.add(push.drawn)
            while self.low in self.beyond:
                self.beyond.remove(self.low)
                self.low += 1

    def stop(self) -> None:
        """Give out no new step; steps that are given out already are computed without effect."""
        last, apart = self.granted, self.horizon().apart_seconds
        self.stopped, self.horizon = True, lambda: Horizon(last, last, apart)

    def complete(self) -> Iterator[int]:
        """Count the complete steps that are not counted yet, and yield each."""
        while self.counted < self.of_store:
            self.counted += 1
            yield self.counted - 1

    # -- updates -----------------------------------------------------------------------------------------------------

    def described(self, push: Push) -> Push:
        """Return the push with the step and staleness it has if it is applied now (consistency.py)."""
        step = push.clock if self.consistency.clocked else self.version
        return push._replace(step=step, staleness=self._stale(push))

    def applied(self, pushes: Iterable[Push]) -> None:
        """Count an update made of these pushes."""
        self.staleness.update(map(self._stale, pushes))
        self.version += 1

    def _stale(self, push: Push) -> int:
        return push.clock - push.seen if self.consistency.name == "ssp" else self.version - push.version

    # -- grants ------------------------------------------------------------------------------------------------------

    def grant(self, clock: int) -> int | None:
        """Return the step for a client that pulls at `clock`; ENDED: no step is left; None: the client has to wait."""
        clocked = self.consistency.clocked
        if self.again:
            return self.again.popleft()
        step = clock if clocked else self.granted
        steps, limit, _ = self.horizon()
        if step >= steps:
            return ENDED
        if step >= limit or (clocked and self.of_store < clock - self.consistency.bound):
            return None
        self.granted = max(self.granted, step + 1)
        return step

    def grant_unasked(self) -> tuple[int, float]:
        """Return ENDED or NO_STEP for subscribers, and the limit: the first step that has to wait."""
        if not self._some_wait:
            return NO_STEP, math.inf
        limit = int(min(self._limit, self.of_store + self.consistency.bound + 1))
        self.granted = max(self.granted, limit)
        return ENDED if self.of_store >= self.horizon().steps else NO_STEP, limit

    def broadcast_due(self, every: int) -> bool:
        """True if a broadcast is due: after `every` clocks, or if subscribers have done all steps they may do."""
        now, before = self.of_store, self.broadcast_at
        idle = self._some_wait and now >= self.granted
        return (now - self.start) // every > (before - self.start) // every or (idle and now > before)

    @property
    def _limit(self) -> float:
        return min(self.horizon()[:2])

    @property
    def _some_wait(self) -> bool:
        """True if subscribers wait for a limit; under async they draw their steps instead."""
        return self.consistency.clocked and self._limit < math.inf
