"""What this process has in flight and what it waits in; and to wait without leaving the rest behind.

    activity.in_flight            the requests (requests.py) whose messages have not all come
    activity.advance()            take all of them as far as their messages have come
    activity.waiting()            what this process waits in, and how long: what the watchdog reads

    with activity.inside("split"): ...       a call of MPI's that no request makes
    with activity.known(): ...               all ranks know that this rank works here: no wait for it counts as a hang
    meet(comm, "split")                      until all ranks have come, while all in flight goes on
    nap_until(condition, "wait")             until the condition holds, in naps, while all in flight goes on

MPI takes a message forward only while somebody calls it, and another rank may need our part of one operation before it
comes to the next: so whoever waits here takes forward whatever else this process has in flight.
"""

import contextlib
import os
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from hpcdl.comm import collective_schedule
from hpcdl.comm.diagnostics.call_signature import ALL
from hpcdl.comm.diagnostics.call_site import refuse
from hpcdl.comm.diagnostics.flight_recorder import FlightRecorder

AWAKE, LONGEST = 200e-6, 1e-3  # seconds: looking out before the first nap; the longest nap
TESTED_LATELY = 0.25  # seconds since the last `test` for which a loop of them is taken to go on
clock = time.perf_counter_ns


class Awaits(NamedTuple):
    """Whom a process waits for: a rank of a `Communicator`, some rank of it, or all to make this call."""

    group: Any
    other: int = ALL
    call: int | None = None  # its number (call_path.py); None: that of the last one


class Wait(NamedTuple):
    """What a process waits in: how many seconds, since when, for whom if known, whether it may take any time."""

    operation: str
    seconds: float
    since: int
    awaits: Awaits | None
    patient: bool
    blocked: bool  # and not testing in a loop, beside which it may compute


Around: TypeAlias = tuple[str | None, int, Awaits | None, bool]


class Activity:
    """What this process is doing now. Times are those of `clock`, nanoseconds."""

    def __init__(self) -> None:
        self.in_flight: list = []
        self.operation: str | None = None  # what it waits in
        self.since = 0  # since when
        self.awaits: Awaits | None = None  # for whom
        self.patient = False  # whether for any time
        self.knowing = 0  # bodies of `known` that it works in
        self.known_until = -(1 << 62)  # when the last one ended
        self.last: str | None = "none yet"  # the operation before
        self.flight: FlightRecorder | None = (
            None  # where operations are recorded (hpcdl/comm/diagnostics/flight_recorder.py)
        )
        self.tested: tuple[Any, int] | None = None  # the request whose last `test` was without success, and when
        self.failure: Exception | None = None  # of a request in flight, where ranks may be gone: whoever naps leaves
        self.abandoned: list = []  # requests that nobody waits for any more: MPI may still write to their buffers

    def advance(self) -> None:
        """Take all that is in flight as far as its messages have come."""
        for request in list(self.in_flight):
            try:
                request.advance()
            except Exception as error:  # the request keeps it, for who waits for that
                if collective_schedule.one_by_one:
                    self.failure = error

    def check(self) -> None:
        """Raise what a request in flight has failed with, where ranks may be gone."""
        if self.failure is not None:
            raise self.failure

    def abandon(self) -> None:
        """Nobody waits for what is in flight any more; what this process was doing is over."""
        self.abandoned.extend(self.in_flight)
        self.in_flight.clear()
        self.operation = self.awaits = self.tested = self.failure = None

    def enter(self, name: str, awaits: Awaits | None = None) -> Around:
        """Wait in this operation from now on; returns what it stands in, for `leave`."""
        around = self.operation, self.since, self.awaits, self.patient
        self.since, self.awaits = clock(), awaits
        self.operation = name
        return around

    def leave(self, around: Around) -> None:
        """The wait is over; what it stood in, which began when it did, goes on."""
        self.last = self.operation
        self.operation, self.since, self.awaits, self.patient = around

    @contextlib.contextmanager
    def inside(self, name: str, comm: Any = None) -> Iterator[None]:
        """`with activity.inside("split"): ...`, for calls of MPI that are not made by a request.

        comm: the `Communicator` all of whose ranks make this call, in the same order among those that it counts.
        """
        around = self.enter(name, None if comm is None else comm.calls(name))
        flight = self.flight if comm is not None else None
        record = flight.begin(comm, name, self.since, ALL) if flight is not None else 0
        try:
            yield
        finally:
            self.leave(around)
            if flight is not None:
                flight.end(record, clock(), 0)

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """All ranks know that this rank works here: it scores, or writes a checkpoint. Who waits for it does not hang.

        Its own waits within the body count as ever.
        """
        self.knowing += 1
        try:
            yield
        finally:
            self.knowing -= 1
            self.known_until = clock()

    def busy(self, within: float) -> bool:
        """Whether this process works at such a thing, or has within so many seconds."""
        return self.operation is None and bool(self.knowing or (clock() - self.known_until) / 1e9 < within)

    def waiting(self) -> Wait | None:
        """The operation that this process waits in: blocked in it, or testing it in a loop."""
        operation, awaits, tested, now = self.operation, self.awaits, self.tested, clock()
        if operation is not None:
            return Wait(operation, (now - self.since) / 1e9, self.since, awaits, self.patient, True)
        if tested is not None and not tested[0].done and (now - tested[1]) / 1e9 < TESTED_LATELY:
            request = tested[0]
            seconds = (now - request.progressed) / 1e9
            return Wait(request.name, seconds, request.progressed, request.awaits, self.patient, False)
        return None


activity = Activity()


def meet(comm: Any, name: str) -> None:
    """Wait until all ranks of a `Communicator` have come, and take forward what this rank has in flight meanwhile.

    It stands before calls of MPI that block and take nothing else forward: another rank may need our part of an
    operation in flight before it comes to the same call. name: of that call, for the watchdog. Raises AgreedError, on
    all ranks, where others come to another call.
    """
    code = zlib.crc32(name.encode())
    largest = np.array([code, -code])
    with activity.inside(name, comm):
        come = comm.mpi.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX)
        while not come.Test():
            activity.advance()
            os.sched_yield()
        if largest[0] != -largest[1]:
            refuse(comm.mpi, name)


def nap_until(
    condition: Callable[[], object],
    name: str,
    meanwhile: Callable[[], bool] | None = None,
    patient: bool = False,
    awaits: Awaits | None = None,
) -> float:
    """Wait until the condition holds, in naps that leave the core to others; returns the seconds spent waiting.

    MPI's own waiting looks out all the time, which is fastest but takes a core. A nap here is an eighth of the time
    waited so far, at most a millisecond, and so is what it adds to the wait. name: of what is waited in, for the
    watchdog. meanwhile(): something to do while waiting, which returns whether it has done anything; its time is not
    counted. patient: this may last for any time, as where a server waits for requests: --timeout counts it only where a
    rank does not answer at all. awaits: whom it waits for, who bring the condition about: where all of them have left,
    the job is ended.
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
            elif (before - quiet) / 1e9 < AWAKE:
                os.sched_yield()
            elif not condition():
                time.sleep(min((before - quiet) / 8e9, LONGEST))
        activity.check()  # a request that has failed is done, too
    finally:
        activity.leave(around)
    return (clock() - begun - busy) / 1e9
