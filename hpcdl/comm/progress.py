"""Progress engine: what this process holds of communication (`activity`), and how it waits.

    activity.in_flight            the requests (requests.py) that are not complete
    activity.advance()            advance all of them as far as messages have arrived
    activity.waiting()            the current wait and its length, for the watchdog
    activity.watchdogs, .flight   the watchdogs and the flight recorder (hpcdl/comm/diagnostics/)
    activity.survives             True if the others go on when a rank dies

    with activity.inside("split"): ...       an MPI call outside of requests
    with activity.exempt(): ...               work that all ranks know of: no wait for this rank counts as a hang

MPI progresses a message only inside its calls, and another rank may need this rank's part of one operation before it
starts the next. So a wait advances all operations in flight. MPI's own waiting may keep the core (MPICH's does); then
the other processes on it, perhaps the awaited one, run only after a preemption, some milliseconds later. So a wait
gives up the core between two polls, by these rules:

    activity.block(condition)         nothing else is in flight: 50 polls, some 20 us, then a yield after each. After a
                                      preemption 1,000 polls of this process sleep 20 us instead: a yield has no effect
                                      across sessions if the kernel groups processes by session, and a process that has
                                      slept is scheduled first
    activity.advance_others()         operations in flight advance, then a yield: their work looks like a preemption
    nap_until(condition, "wait")      `pause`: yields for 200 us, then naps of an eighth of the wait, at most 1 ms
    flags in the memory of a node     2,000 polls, or 1 if ranks share cores, then a yield; MPI's turn after 50 yields
    meet(comm, "split")               all ranks, before a call of MPI that blocks
"""

import contextlib
import functools
import os
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from hpcdl.comm.diagnostics.call_signature import ALL
from hpcdl.comm.diagnostics.call_site import refuse
from hpcdl.comm.diagnostics.flight_recorder import FlightRecorder

POLLS = 50  # polls before the core is yielded
PREEMPTED = 500_000  # nanoseconds between two polls from which the core counts as preempted
NAP, NAPS = 2e-5, 1000  # seconds of a nap after a preemption, and the polls that nap
AWAKE, LONGEST = 200e-6, 1e-3  # seconds: polling before the first nap; the longest nap
SPINS = 2000  # polls of a node's flags between two yields, if every rank has its own core
YIELDS = 50  # before MPI and signal handlers get a turn; each yield may cost a time slice of some ms
RECENT_TEST = 0.25  # seconds since the last `test` within which a testing loop counts as a wait
clock = time.perf_counter_ns


@functools.cache
def attribute_key(name: str) -> int:
    """Return the key of an attribute of communicators; created on first use, as MPI has started by then."""
    return MPI.Comm.Create_keyval()


class WaitTarget(NamedTuple):
    """The target of a wait: one rank of a `Communicator`, some rank, or all ranks in a collective call."""

    group: Any
    other: int = ALL
    call: int | None = None  # its sequence number (call_path.py); None: the last one


class Wait(NamedTuple):
    """The current wait of a process: operation, seconds, start, target if known, and True if it may take any time."""

    operation: str
    seconds: float
    since: int
    awaits: WaitTarget | None
    patient: bool
    blocked: bool  # False in a testing loop, beside which it may compute


WaitContext: TypeAlias = tuple[str | None, int, WaitTarget | None, bool]


class Activity:
    """What this process holds of communication, and its current wait. Times are nanoseconds of `clock`."""

    def __init__(self) -> None:
        self.in_flight: list = []
        self.watchdogs: list = []  # open ones
        self.watch_thread: Any = None  # the thread that polls for them
        self.survives = False  # True if the others go on when a rank dies: see `survive`
        self.naps = 0  # polls left that sleep first
        self.operation: str | None = None  # operation that it waits in
        self.since = 0  # start of the wait
        self.awaits: WaitTarget | None = None  # target of the wait
        self.patient = False  # True if the wait may take any time
        self.exemptions = 0  # nesting depth of `exempt`
        self.exempt_until = -(1 << 62)  # end of the last one
        self.last: str | None = "none yet"  # the operation before
        self.flight: FlightRecorder | None = (
            None  # where operations are recorded (hpcdl/comm/diagnostics/flight_recorder.py)
        )
        self.tested: tuple[Any, int] | None = None  # the request of the last unsuccessful `test`, and its time
        self.failure: Exception | None = None  # of a request, when ranks may be dead: ends every nap
        self.abandoned: list = []  # given up, with buffers that MPI may still write to: requests, steps with a failure

    def advance(self) -> None:
        """Advance all operations in flight as far as their messages have arrived."""
        for request in list(self.in_flight):
            try:
                request.advance()
            except Exception as error:  # the request keeps it for its waiter
                if self.survives:
                    self.failure = error

    def advance_others(self) -> None:
        """Between two polls of a wait: advance all operations in flight, and yield the core."""
        self.advance()
        os.sched_yield()

    def block(self, condition: Callable[[], object]) -> None:
        """Poll until the condition holds, while nothing else is in flight."""
        for _ in range(POLLS):
            if condition():
                return
        before = clock()
        while not condition():
            if self.naps:
                self.naps -= 1
                time.sleep(NAP)
            else:
                os.sched_yield()
            now = clock()
            if now - before > PREEMPTED:
                self.naps = NAPS
            before = now

    def check(self) -> None:
        """Raise the error of a failed request in flight, when ranks may be dead."""
        if self.failure is not None:
            raise self.failure

    def survive(self) -> None:
        """From now on the others go on when a rank dies (recovery/ulfm_recovery.py).

        Requests are then tested one by one, a failed one ends every nap, and a rank that fails exits alone.
        """
        self.survives = True

    def record_with(self, recorder: FlightRecorder | None) -> FlightRecorder | None:
        """Record operations with this recorder, which is returned, from now on; None: no longer."""
        self.flight = recorder
        return recorder

    def abandon(self) -> None:
        """Abandon all operations in flight and the current wait."""
        self.abandoned.extend(self.in_flight)
        self.in_flight.clear()
        self.operation = self.awaits = self.tested = self.failure = None

    def enter(self, name: str, awaits: WaitTarget | None = None) -> WaitContext:
        """Begin a wait in this operation; return the surrounding wait, for `leave`."""
        around = self.operation, self.since, self.awaits, self.patient
        self.since, self.awaits = clock(), awaits
        self.operation = name
        return around

    def leave(self, around: WaitContext) -> None:
        """End the wait; the surrounding one, with its own start, continues."""
        self.last = self.operation
        self.operation, self.since, self.awaits, self.patient = around

    @contextlib.contextmanager
    def inside(self, name: str, comm: Any = None) -> Iterator[None]:
        """Context of an MPI call outside of requests: `with activity.inside("split"): ...`.

        comm: the `Communicator` of a collective call, which is counted in its sequence; None for other calls.
        """
        around = self.enter(name, None if comm is None else comm.begin_library_call(name))
        flight = self.flight if comm is not None else None
        record = flight.begin(comm, name, self.since, ALL) if flight is not None else 0
        try:
            yield
        finally:
            self.leave(around)
            if flight is not None:
                flight.end(record, clock(), 0)

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """Context of work that all ranks know of, such as a checkpoint: a wait for this rank does not count as a hang.

        Its own waits within the body count as usual.
        """
        self.exemptions += 1
        try:
            yield
        finally:
            self.exemptions -= 1
            self.exempt_until = clock()

    def busy(self, within: float) -> bool:
        """True if this process is inside `exempt`, or was within the last `within` seconds."""
        return self.operation is None and bool(self.exemptions or (clock() - self.exempt_until) / 1e9 < within)

    def waiting(self) -> Wait | None:
        """Return the current wait, blocked in an operation or testing it in a loop; None if there is none."""
        operation, awaits, tested, now = self.operation, self.awaits, self.tested, clock()
        if operation is not None:
            return Wait(operation, (now - self.since) / 1e9, self.since, awaits, self.patient, True)
        if tested is not None and not tested[0].done and (now - tested[1]) / 1e9 < RECENT_TEST:
            request = tested[0]
            seconds = (now - request.progressed) / 1e9
            return Wait(request.name, seconds, request.progressed, request.awaits, self.patient, False)
        return None


activity = Activity()


def meet(comm: Any, name: str) -> None:
    """Wait until all ranks of a `Communicator` have entered, and advance this rank's operations in flight meanwhile.

    Use it before MPI calls that block without progress: another rank may need this rank's part of an operation in
    flight before it reaches the same call. name: of that call, for the watchdog. Raises AgreedError, on all ranks, if
    they enter different calls.
    """
    code = zlib.crc32(name.encode())
    largest = np.array([code, -code])
    with activity.inside(name, comm):
        entered = comm.mpi.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX)
        while not entered.Test():
            activity.advance_others()
        if largest[0] != -largest[1]:
            refuse(comm.mpi, name)


def pause(waited: float) -> None:
    """Give up the core between two polls of a wait that has lasted `waited` seconds: yield it at first, then nap."""
    if waited < AWAKE:
        os.sched_yield()
    else:
        time.sleep(min(waited / 8, LONGEST))


def nap_until(
    condition: Callable[[], object],
    name: str,
    meanwhile: Callable[[], bool] | None = None,
    patient: bool = False,
    awaits: WaitTarget | None = None,
) -> float:
    """Wait until the condition holds, in naps that free the core; return the seconds spent waiting.

    The added latency is at most a nap. name: of the operation, for the watchdog. meanwhile():
    work to do while waiting; returns True if it did any; its time is not counted. patient: the wait may take any time,
    as in a server that waits for requests; --timeout then applies only if a rank does not answer at all. awaits: the
    ranks that make the condition true; if all of them have left, the job ends.
    """
    begun = quiet = clock()
    busy, around = 0, activity.enter(name, awaits)
    try:
        activity.patient = activity.patient or patient
        while not condition():
            activity.advance()
            activity.check()
            before = clock()
            if meanwhile is not None and meanwhile():
                quiet = activity.since = clock()
                busy += quiet - before
            elif (waited := (before - quiet) / 1e9) < AWAKE or not condition():
                pause(waited)
        activity.check()  # a failed request is also done
    finally:
        activity.leave(around)
    return (clock() - begun - busy) / 1e9
