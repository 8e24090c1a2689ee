"""Requests: operations in flight, with `wait()` and `test()`."""

from collections.abc import Callable, Iterator
from typing import Any

from hpcdl.comm.collective_schedule import Step, complete, ready
from hpcdl.comm.counting import Counters
from hpcdl.comm.diagnostics.call_signature import ALL
from hpcdl.comm.diagnostics.flight_recorder import FAILED, STARTED
from hpcdl.comm.progress import WaitTarget, activity, clock, nap_until


class Request:
    """An operation in flight, driven through its generator (collective_schedule.py). `wait` and `test`
    also advance all other operations of this rank (progress.py), so ranks may wait in any order.

    finish() is called once, when the last message has arrived; its value is the result. peer: the other rank of a
    point-to-point message, for the trace, as {"to": rank} or {"from": rank}; or None. other: that rank in the
    communicator; SOME: any rank; ALL: a collective call. counters: count the seconds of the operation."""

    pending: Any  # Step | None: the step it waits for; None when done
    progressed: int  # time of the last progress

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
        self.awaits = WaitTarget(communicator, other, communicator.sequence if other == ALL else None)
        self.communicator, self.name, self.steps, self.counters = communicator, name, steps, counters
        self.finish, self.peer = finish, peer or {}
        self.pending, self.done, self.result = (), False, None  # type: Any, bool, Any
        self.error: BaseException | None = None
        self.start, self.bytes = clock(), 0
        counters.calls += 1
        activity.in_flight.append(self)
        self.flight, self.record = activity.flight, 0
        if self.flight is not None:
            self.record = self.flight.begin(communicator, name, self.start, other, STARTED)
        self._next_step()
        counters.seconds += (clock() - self.start) / 1e9

    def _next_step(self) -> None:
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
        self.bytes += self.counters.bytes - before  # other operations share these counters
        if self.done:
            stop = clock()
            self.communicator.timeline.add(self.name, self.start, stop, **{"bytes sent": self.bytes} | self.peer)
            if self.flight is not None:
                self.flight.end(self.record, stop, self.bytes)

    def _fail(self, error: BaseException) -> None:
        """End this operation with an error, such as a refused vector; others in flight may go on."""
        self.done, self.error = True, error
        if self.flight is not None:
            self.flight.end(self.record, clock(), self.bytes, FAILED)
        activity.in_flight.remove(self)

    def then(self, follow: Callable[[Any], Any]) -> None:
        """Replace the result by follow(result) when the operation is complete."""
        if self.done:
            self.result = follow(self.result)
        else:
            finish = self.finish
            self.finish = lambda: follow(finish() if finish is not None else None)

    def test(self) -> bool:
        """Advance this operation and, unless it is then complete, all others, without blocking; True when complete."""
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
        """Advance this operation only, as far as its messages have arrived; True when it is complete."""
        while not self.done and self._poll_step(ready):
            self._next_step()
        return self.done

    def _poll_step(self, poll: Callable) -> Any:
        """Return poll(pending step), and count the bytes of a step that is itself a call (Algorithm.meeting)."""
        before = self.counters.bytes
        try:
            complete = poll(self.pending)
        except Exception as error:
            self._fail(error)
            raise
        self.bytes += self.counters.bytes - before
        return complete

    def wait(self, doze: bool = False) -> Any:
        """Block until the operation is complete; return its result, if it has one. doze: wait in naps."""
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
                    self._poll_step(complete)
                    blocked += clock() - before
                    self._next_step()
                else:
                    activity.advance_others()
                    blocked += clock() - before
        finally:
            activity.leave(around)
        self.counters.seconds += (clock() - start) / 1e9
        self.counters.blocked_seconds += blocked / 1e9
        if self.error is not None:
            raise self.error
        return self.result
