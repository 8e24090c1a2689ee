"""An operation in flight: `wait()` until it is done, or `test()` to take it as far as its messages have come."""

import os
from collections.abc import Callable, Iterator
from typing import Any

from hpcdl.comm.collective_schedule import Step, complete, ready
from hpcdl.comm.counting import Counters
from hpcdl.comm.diagnostics.call_signature import ALL
from hpcdl.comm.diagnostics.flight_recorder import FAILED, STARTED
from hpcdl.comm.progress import Awaits, activity, clock, nap_until


class Request:
    """One asynchronous operation, driven through its generator (see hpcdl/comm/collective_schedule.py).

    The communicator's timeline gets its span, `counters` its seconds, and the watchdog learns what this rank waits for.
    finish() is called once, when the last message has arrived; what it returns is the result. peer: for the picture,
    the other rank of a message between two, as {"to": rank} or {"from": rank}; None: nothing. other: that rank in the
    communicator, SOME if any may be it; ALL where all make this call.

    Whoever waits for one operation, or tests it, takes all others of this rank forward meanwhile (progress.py): ranks
    may wait for their operations in different orders.
    """

    pending: Any  # Step | None: what it waits for; once it is done, None
    progressed: int  # when that was sent

    def __init__(
        self,
        communicator: Any,
        name: str,
        steps: Iterator[Step],
        counters: Counters,
        finish: Callable[[], Any] | None = None,
        peer: dict[str, int] | None = None,
        other: int = ALL,
    ):
        self.awaits = Awaits(communicator, other, communicator.sequence if other == ALL else None)
        self.communicator, self.name, self.steps, self.counters = communicator, name, steps, counters
        self.finish, self.peer = finish, peer or {}
        self.pending, self.done, self.result = (), False, None  # type: Any, bool, Any
        self.error: BaseException | None = None
        self.start, self.bytes = clock(), 0
        counters.calls += 1
        activity.in_flight.append(self)
        self.flight = activity.flight  # where it is recorded, as `record`
        self.record = (
            self.flight.begin(communicator, name, self.start, other, STARTED) if self.flight is not None else 0
        )
        self._next_step()
        counters.seconds += (clock() - self.start) / 1e9

    def _next_step(self) -> None:
        """Go on to the next set of messages to wait for, or end."""
        self.progressed, before = clock(), self.counters.bytes
        try:
            self.pending = next(self.steps, None)
        except BaseException as error:
            self._fail(error)
            raise
        if self.pending is None:
            self.done = True
            activity.in_flight.remove(self)
            if self.finish is not None:
                self.result = self.finish()
        self.bytes += self.counters.bytes - before  # others in flight may count on the same counters meanwhile
        if self.done:
            details, stop = {"bytes sent": self.bytes} | self.peer, clock()
            self.communicator.timeline.add(self.name, self.start, stop, **details)
            if self.flight is not None:
                self.flight.end(self.record, stop, self.bytes)

    def _fail(self, error: BaseException) -> None:
        """It is over: something in it went wrong, as a refused vector does; others in flight may go on."""
        self.done, self.error = True, error
        if self.flight is not None:
            self.flight.end(self.record, clock(), self.bytes, FAILED)
        activity.in_flight.remove(self)

    def then(self, follow: Callable[[Any], Any]) -> None:
        """Hand the result on to `follow` when the operation is complete; what that returns takes its place."""
        if self.done:
            self.result = follow(self.result)
        else:
            finish = self.finish
            self.finish = lambda: follow(finish() if finish is not None else None)

    def test(self) -> bool:
        """Advance without blocking; True when the operation is complete."""
        start = clock()
        if not self.advance():
            activity.advance()
        if self.error is not None:
            raise self.error
        if not self.done:
            activity.tested = self, clock()
        self.counters.seconds += (clock() - start) / 1e9
        return self.done

    def advance(self) -> bool:
        """Take it as far as its messages have come, and nothing else; True when the operation is complete."""
        while not self.done and self._sent_in(ready):
            self._next_step()
        return self.done

    def _sent_in(self, look: Callable) -> Any:
        """look(pending step); the step may be a call that sends (Algorithm.meeting)."""
        before = self.counters.bytes
        try:
            found = look(self.pending)
        except Exception as error:
            self._fail(error)
            raise
        self.bytes += self.counters.bytes - before
        return found

    def wait(self, doze: bool = False) -> Any:
        """Block until the operation is complete; returns its result, if it has one. doze: in naps."""
        if doze and not self.done:
            waited = nap_until(lambda: self.done, self.name, awaits=self.awaits)
            self.counters.seconds += waited
            self.counters.blocked_seconds += waited
        if self.error is not None:
            raise self.error
        if self.done:
            return self.result
        if self.flight is not None:
            self.flight.waits(self.record)
        start, blocked, around = clock(), 0, activity.enter(self.name, self.awaits)
        try:
            while not self.done:
                before = clock()
                if len(activity.in_flight) == 1:
                    self._sent_in(complete)
                    blocked += clock() - before
                    self._next_step()
                else:
                    activity.advance()
                    os.sched_yield()
                    blocked += clock() - before
        finally:
            activity.leave(around)
        self.counters.seconds += (clock() - start) / 1e9
        self.counters.blocked_seconds += blocked / 1e9
        if self.error is not None:
            raise self.error
        return self.result
