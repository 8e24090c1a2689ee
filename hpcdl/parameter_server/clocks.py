"""Who may start what: the clocks of a parameter store, and what follows from them. Pure: no message, no values.

    a client's clock     the pushes that it has made
    the store's clock    that of its slowest client that is open; under async, the pushes that have come
    version              the updates that have been applied

    a pull at clock c    is answered when the store's clock has reached c - bound, unless its step is to wait
    step t               is complete when the store's clock has passed it: then its round is applied, and it is counted
    a push               was computed from what the store was when its client pulled: what it missed is its staleness

A client that closes is waited for no longer: the others go on among themselves. The table of the consistencies is in
consistency.py; steps wait where a lead says so (step_coordinator.py).
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from hpcdl.errors import UsageError
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.parameter_server.step_coordinator import Lead
from hpcdl.parameter_server.store_messages import ENDED, NO_STEP, Push


class ClockProgress(NamedTuple):
    """How far a store is, for one that takes its place: its clocks, by client, and counts, as `Clocks` has them.

    losses: of the steps from `counted` on, what has come of them: the sum of losses, and the examples.
    """

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
    """The clocks as one server knows them, from clock `start` on; lead: what it says of the steps (default: nothing).

    version: the updates applied. pushes: how many have come. counted: steps below are complete, and were counted.
    granted: steps below have been given out. broadcast_at: the store's clock when subscribers were last sent the slice.
    staleness: of the pushes applied, how many were how stale. Under async steps below `low` have been pushed, and those
    in `beyond`; again: those that were given out to clients which are gone, and are to be given out again.
    """

    def __init__(self, clients: Iterable[int], consistency: Consistency, start: int = 0, lead: Lead | None = None):
        self.consistency, self.lead = consistency, lead or Lead()
        self.of_client = dict.fromkeys(clients, start)
        self.open = set(self.of_client)  # clients that may still push
        self.start = self.version = self.pushes = self.counted = self.granted = self.broadcast_at = start
        self.low, self.beyond, self.again = start, set(), deque()  # type: int, set[int], deque[int]
        self.staleness: Counter[int] = Counter()

    def progress(self, losses: dict[int, tuple[float, float]]) -> ClockProgress:
        """How far this store is; losses: of the steps under way."""
        counts = self.counted, self.granted, self.pushes, self.version, self.low, frozenset(self.beyond)
        return ClockProgress(dict(self.of_client), *counts, dict(self.staleness), dict(losses))

    def go_on_from(self, progress: ClockProgress) -> None:
        """Take the place of a store that was so far; what had been given out and was not pushed is given out again."""
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
        """The step that a push which has just come is a part of."""
        return push.clock if self.consistency.clocked else self.pushes

    def pushed(self, push: Push) -> None:
        """The client's clock goes on by one; UsageError where its parameters are older than the bound allows."""
        behind = push.clock - push.seen
        if self.consistency.clocked and behind > self.consistency.bound:
            raise UsageError(
                f"rank {push.client} pushed at clock {push.clock} what it computed from parameters of clock "
                f"{push.seen}: more than {self.consistency.bound:g} behind; pull before each push"
            )
        self.of_client[push.client] += 1
        self.pushes += 1
        if not self.consistency.clocked:
            self.beyond.add(push.drawn)
            while self.low in self.beyond:
                self.beyond.remove(self.low)
                self.low += 1

    def closed(self, client: int) -> None:
        """This client pushes no more."""
        self.open.discard(client)

    def complete(self) -> Iterator[int]:
        """The steps that are complete and have not been counted; each is when it is given."""
        while self.counted < self.of_store:
            self.counted += 1
            yield self.counted - 1

    # -- updates -----------------------------------------------------------------------------------------------------

    def described(self, push: Push) -> Push:
        """The push as it is when it is applied now: for which step, and how stale (consistency.py)."""
        step = push.clock if self.consistency.clocked else self.version
        return push._replace(step=step, staleness=self._stale(push))

    def applied(self, pushes: Iterable[Push]) -> None:
        """An update has been made of these pushes."""
        self.staleness.update(map(self._stale, pushes))
        self.version += 1

    def _stale(self, push: Push) -> int:
        return push.clock - push.seen if self.consistency.name == "ssp" else self.version - push.version

    # -- who may go on -----------------------------------------------------------------------------------------------

    def grant(self, clock: int) -> int | None:
        """The step that a client which pulls at this clock may compute, ENDED, or None while it has to wait."""
        clocked = self.consistency.clocked
        if self.again:
            return self.again.popleft()
        step = clock if clocked else self.granted
        if step >= self.lead.steps:
            return ENDED
        if step >= self.lead.limit or (clocked and self.of_store < clock - self.consistency.bound):
            return None
        self.granted = max(self.granted, step + 1)
        return step

    def grant_unasked(self) -> tuple[int, float]:
        """What subscribers are told: ENDED or NO_STEP, and before which step they may go on."""
        if not self._some_wait:
            return NO_STEP, math.inf
        limit = int(min(self._limit, self.of_store + self.consistency.bound + 1))
        self.granted = max(self.granted, limit)
        return ENDED if self.of_store >= self.lead.steps else NO_STEP, limit

    def broadcast_due(self, every: int) -> bool:
        """Whether it is time to send to subscribers: after `every` clocks, or when they can do nothing else."""
        now, before = self.of_store, self.broadcast_at
        idle = self._some_wait and now >= self.granted
        return (now - self.start) // every > (before - self.start) // every or (idle and now > before)

    @property
    def _limit(self) -> float:
        return min(self.lead.limit, self.lead.steps)

    @property
    def _some_wait(self) -> bool:
        """Whether subscribers wait to be told that they may go on; under async they draw their steps."""
        return self.consistency.clocked and self._limit < math.inf


class Delay:
    """A queue of updates, in which each waits until so many have come after it."""

    def __init__(self, versions: int):
        self.versions = versions
        self.waiting: deque = deque()

    def enter(self, update: Any) -> Iterator:
        """One more update; what is due then."""
        self.waiting.append(update)
        if len(self.waiting) > self.versions:
            yield self.waiting.popleft()

    def rest(self) -> Iterator:
        """All that waits: nothing is lost."""
        while self.waiting:
            yield self.waiting.popleft()
