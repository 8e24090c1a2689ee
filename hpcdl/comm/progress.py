"""What this process has in flight and what it waits in; and to wait without leaving the rest behind.

    activity.in_flight            the requests (requests.py) whose messages have not all come
    activity.advance()            take all of them as far as their messages have come
    activity.waiting()            what this process waits in, and how long: what the watchdog reads

    with activity.inside("split"): ...       a call of MPI's that no request makes
    meet(comm, "split")                      until all ranks have come, while all in flight goes on
    nap_until(condition, "wait")             until the condition holds, in naps, while all in flight goes on

MPI takes a message forward only while somebody calls it, and another rank may need our part of one operation before it
comes to the next: so whoever waits here takes forward whatever else this process has in flight.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI

AWAKE, LONGEST = 200e-6, 1e-3  # seconds: looking out before the first nap; the longest nap
TESTED_LATELY = 0.25  # seconds since the last `test` for which a loop of them is taken to go on
clock = time.perf_counter_ns


class Activity:
    """What this process is doing now. Times are those of `clock`, nanoseconds."""

    def __init__(self) -> None:
        self.in_flight: list = []
        self.operation: str | None = None  # what it waits in
        self.since = 0  # since when
        self.last: str | None = "none yet"  # the one before
        self.tested: tuple[Any, int] | None = None  # the request whose last `test` was without success, and when

    def advance(self) -> None:
        """Take all that is in flight as far as its messages have come."""
        for request in list(self.in_flight):
            request.advance()

    def enter(self, name: str) -> None:
        """Wait in this operation from now on."""
        self.since = clock()
        self.operation = name

    def leave(self) -> None:
        """The wait is over."""
        self.last, self.operation = self.operation, None

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """`with activity.inside("split"): ...`, for calls of MPI that are not made by a request."""
        around = self.operation, self.since
        self.enter(name)
        try:
            yield
        finally:
            self.leave()
            self.operation, self.since = around

    def waiting(self) -> tuple[str, float] | None:
        """The operation that this process waits in and for how many seconds: blocked in it, or testing it in a loop."""
        operation, tested, now = self.operation, self.tested, clock()
        if operation is not None:
            return operation, (now - self.since) / 1e9
        if tested is not None and not tested[0].done and (now - tested[1]) / 1e9 < TESTED_LATELY:
            return tested[0].name, (now - tested[0].progressed) / 1e9
        return None


activity = Activity()


def meet(comm: MPI.Intracomm, name: str) -> None:
    """Wait until all ranks of `comm` have come, and take forward what this rank has in flight meanwhile.

    It stands before calls of MPI that block and take nothing else forward: another rank may need our part of an
    operation in flight before it comes to the same call. name: of that call, for the watchdog.
    """
    with activity.inside(name):
        come = comm.Ibarrier()
        while not come.Test():
            activity.advance()
            os.sched_yield()


def nap_until(
    condition: Callable[[], object], name: str, meanwhile: Callable[[], bool] | None = None, patient: bool = False
) -> float:
    """Wait until the condition holds, in naps that leave the core to others; returns the seconds spent waiting.

    MPI's own waiting looks out all the time, which is fastest but takes a core. A nap here is an eighth of the time
    waited so far, at most a millisecond, and so is what it adds to the wait. name: of what is waited in, for the
    watchdog. meanwhile(): something to do while waiting, which returns whether it has done anything; its time is not
    counted. patient: this may last for any time, as where a server waits for requests: no watchdog ends it.
    """
    begun = quiet = clock()
    busy = 0
    with activity.inside(name):
        while not condition():
            activity.advance()
            before = clock()
            if patient:
                activity.since = before
            if meanwhile is not None and meanwhile():
                quiet = activity.since = clock()
                busy += quiet - before
            elif (before - quiet) / 1e9 < AWAKE:
                os.sched_yield()
            elif not condition():
                time.sleep(min((before - quiet) / 8e9, LONGEST))
    return (clock() - begun - busy) / 1e9
