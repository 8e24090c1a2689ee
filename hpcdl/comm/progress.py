"""Progress engine: the state of this process's communication (`activity`), and how it waits.

MPI progresses a message only inside its calls, and another rank may need this rank's part of one operation before it
starts the next. So a wait advances all operations in flight. MPI's own wait may keep the core (MPICH's does); another
process on it, perhaps the awaited one, then runs only after a preemption, some milliseconds later. So a wait gives up
the core between two polls:

    activity.block(condition)         nothing else is in flight: a yield after every 50 polls; after each poll while a
                                      yield takes longer than one to nobody, as another process has run on this core,
                                      perhaps the awaited one. A wait for other nodes naps 20 us at a time after 1 ms
    activity.advance_others()         operations advance, then a yield; no sleep, as their work looks like preemption
    nap_until(condition, "wait")      `pause`: yields for 200 us, then naps of an eighth of the wait, at most 1 ms
    compiled_schedule.py,             the same in compiled code, with up to 64 polls of MPI or 2,000 of a flag between
    flags in the memory of a node     two yields; signal handlers (and MPI, for flags) get a turn after 50 yields
    meet(comm, "split")               all ranks, before a call of MPI that blocks

A yield has no effect across sessions if the kernel groups processes by session. So a rank asks for short time slices
(hpcdl/time_slice.py). Where the kernel gives none, 1,000 yields after a preemption sleep 20 us instead: a process that
has slept is scheduled first."""

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

POLLS = 50  # polls between two yields, at most
SHARED = 3_000  # nanoseconds of a yield from which on another process has run: a yield to nobody takes some 700
PREEMPTED = 500_000  # nanoseconds of a yield from which on the core counts as preempted
NAP, NAPS = 2e-5, 1000  # seconds of a nap after a preemption, and the yields that nap
PATIENT = 1_000_000  # nanoseconds of a wait for other nodes until it goes on in naps
AWAKE, LONGEST = 200e-6, 1e-3  # seconds: polling before the first nap; the longest nap
SPINS = 2000  # polls of a node's flags between two yields, at most
YIELDS = 50  # before MPI and signal handlers get a turn; each yield may cost a time slice of some ms
RECENT_TEST = 0.25  # seconds since the last `test` within which a testing loop counts as a wait
clock = time.perf_counter_ns


@functools.cache
def attribute_key(name: str) -> int:
    """Return the key of communicator attribute `name`; created on first use, as MPI has started by then."""
    return MPI.Comm.Create_keyval()


class WaitTarget(NamedTuple):
    """The target of a wait: one rank of a `Communicator`, some rank, or all ranks in a collective call."""

    group: Any
    other: int = ALL
    call: int | None = None  # its sequence number (call_path.py); None: the last one


class Wait(NamedTuple):
    """The current wait of a process. since: start (`clock`). awaits: None if unknown. patient: it may take any time."""

    operation: str
    seconds: float
    since: int
    awaits: WaitTarget | None
    patient: bool
    blocked: bool  # False in a testing loop, beside which it may compute


WaitContext: TypeAlias = tuple[str | None, int, WaitTarget | None, bool]


class Activity:
    """The state of this process's communication, and its current wait. Times are nanoseconds of `clock`."""

    def __init__(self) -> None:
        self.in_flight: list = []  # the requests (requests.py) that are not complete
        self.watchdogs: list = []  # that are open
        self.watch_thread: Any = None  # the thread that polls for them
        self.survives = False  # True if the others go on when a rank dies: see `survive`
        self.polls = POLLS  # between two yields now
        self.short_slices = False  # True if the kernel gives them: see `Communicator`
        self.between_nodes = False  # True if messages may come from other nodes
        self.naps = 0  # yields left that sleep instead
        self.operation: str | None = None  # the operation of the current wait
        self.since = 0  # start of the wait
        self.awaits: WaitTarget | None = None  # target of the wait
        self.patient = False  # True if the wait may take any time
        self.exemptions = 0  # nesting depth of `exempt`
        self.exempt_until = -(1 << 62)  # end of the last `exempt`
        self.last: str | None = "none yet"  # the operation of the last wait
        self.flight: FlightRecorder | None = None  # records operations
        self.tested: tuple[Any, int] | None = None  # the request of the last unsuccessful `test`, and its time
        self.failure: Exception | None = None  # of a request, when ranks may be dead: ends every nap
        self.signal_pipe: list[int] = []  # of SIGUSR2 (status_signal.py): read end, write end
        self.claims: list = []  # sockets: its claims to report why the job ends (failure.py), held until it exits
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
        """Advance all operations in flight, and yield the core, between two polls of a wait."""
        self.advance()
        os.sched_yield()

    def block(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds, by polling; only for use while nothing else is in flight."""
        polls, begun, patient = 0, clock(), False
        while not condition():
            polls += 1
            if patient or polls >= self.polls:
                polls, patient = 0, self.between_nodes and self.nap_for_network(begun)
                if not patient:
                    self.yield_core()

    def nap_for_network(self, begun: int) -> bool:
        """Nap if the wait since `begun` is long, and return True: messages of other nodes are not lost meanwhile, and
        each poll of a socket delays the kernel, which processes packets on these cores."""
        patient = clock() - begun > PATIENT
        if patient:
            time.sleep(NAP)  # longer ones would let the buffers of sockets run empty
        return patient

    def yield_core(self) -> None:
        """Yield the core, and set how many polls may pass before the next yield (as in kernels/shared.py)."""
        before = clock()
        if self.naps:
            self.naps -= 1
            time.sleep(NAP)
        else:
            os.sched_yield()
        taken = clock() - before
        if taken > PREEMPTED and not self.short_slices:
            self.naps = NAPS
        self.polls = 1 if taken > SHARED else min(2 * self.polls, POLLS)

    def check(self) -> None:
        """Raise the error of a request that has failed, if ranks may be dead (`survive`)."""
        if self.failure is not None:
            raise self.failure

    def survive(self) -> None:
        """Let the other ranks go on when a rank dies (recovery/ulfm_recovery.py): requests are tested one by one, a
        failed one ends every nap, and a rank that fails exits alone."""
        self.survives = True

    def record_with(self, recorder: FlightRecorder | None) -> FlightRecorder | None:
        """Record operations with this recorder from now on (None: no longer); return it."""
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
    def inside(self, name: str, awaits: WaitTarget | None = None) -> Iterator[None]:
        """Context of an MPI call outside of requests; for collective calls a `Communicator` has its own `inside`."""
        around = self.enter(name, awaits)
        try:
            yield
        finally:
            self.leave(around)

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """Context of work that all ranks know of, such as saving: a wait for this rank does not count as a hang."""
        self.exemptions += 1
        try:
            yield
        finally:
            self.exemptions -= 1
            self.exempt_until = clock()

    def busy(self, within: float) -> bool:
        """True if this process waits for nothing, and is in `exempt` or was in the last `within` seconds."""
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


# The state of this process, shared by its communicators; other rooms call the functions.
activity = Activity()
inside, exempt, advance = activity.inside, activity.exempt, activity.advance
survive, abandon, record_with = activity.survive, activity.abandon, activity.record_with


def meet(comm: Any, name: str) -> None:
    """Wait until all ranks of a `Communicator` have entered; advance operations in flight, which others may need first.
    For use before MPI calls that block without progress. AgreedError on all ranks if `name`, of the call, differs."""
    code = zlib.crc32(name.encode())
    largest = np.array([code, -code])
    with comm.inside(name):
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

    name: of the operation, for the watchdog. meanwhile(): work to do in between; True if it did any; its time is not
    counted. patient: the wait may take any time, as a server's for requests; --timeout then applies only if a rank does
    not answer at all. awaits: the ranks that make the condition true; if all of them have left, the job ends."""
    begun = quiet = clock()
    busy, around = 0, activity.enter(name, awaits)
    try:
        activity.patient |= patient
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
