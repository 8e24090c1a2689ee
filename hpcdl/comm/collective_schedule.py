"""Collective operations as generators: written once, they run blocking and asynchronously.

Where a blocking algorithm would wait for messages, the generator yields their requests instead, and continues when they
are complete:

    @collective
    def ring_all_reduce(comm, vector, op=SUM):
        ...
        yield comm.Irecv(inbox, left), comm.Isend(chunk, right)
        op(vector, inbox)

`ring_all_reduce(comm, vector)` then waits at each yield. `ring_all_reduce.steps(comm, vector, op)` is the generator
itself, which `hpcdl.comm.requests.Request` advances as messages arrive, while the caller computes.

A step is a list of MPI requests or, without messages (shared memory), an `Until`.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from mpi4py import MPI

clock = time.perf_counter_ns


class Until:
    """A step that waits for a condition; `block`, if given, waits for it faster than polling."""

    def __init__(self, condition: Callable[[], bool], block: Callable[[], None] | None = None):
        self.condition, self.block = condition, block


class Delivery(Until):
    """A step that waits for all requests, the receives first, and checks the lengths of the received messages.

    check(number, status): called for each of the first `receives` requests; status: None if the message is longer than
    its buffer (MPI gives no status then).
    """

    def __init__(self, requests: list[MPI.Request], receives: int, check: Callable[[int, MPI.Status | None], object]):
        super().__init__(self.arrived)
        self.requests, self.receives, self.check = requests, receives, check
        self.statuses: list[MPI.Status] = []

    def arrived(self) -> bool:
        """True if all messages have arrived. Raises what `check` raises."""
        try:
            with keep_requests(self.requests):
                if not MPI.Request.Testall(self.requests, self.statuses):
                    return False
        except MPI.Exception as error:
            for number, status in enumerate(self.statuses if error.Get_error_class() == MPI.ERR_IN_STATUS else []):
                if MPI.Get_error_class(status.Get_error()) == MPI.ERR_TRUNCATE:
                    self.check(number, None)
            raise
        for number in range(self.receives):
            self.check(number, self.statuses[number])
        return True


Step: TypeAlias = Sequence[MPI.Request] | Until
NAP = 2e-5  # seconds
NAPS = 1000  # polls with a nap after a preemption
PREEMPTED = 500_000  # nanoseconds between two polls from which the core counts as preempted
POLLS = 50  # polls before the core is yielded; some 20 us
test_singly = False  # True if requests are tested one by one, as ranks may be dead (recovery/ulfm_recovery.py)
failed_steps: list[Step] = []  # steps with a failed request; MPI may still use their other requests


@contextlib.contextmanager
def keep_requests(step: Step) -> Iterator[None]:
    """Keep the requests of a step alive if the body raises.

    Open MPI's Waitall frees them when one has failed, and ends the process when another one fails later.
    """
    try:
        yield
    except MPI.Exception:
        failed_steps.append(step)
        raise


def ready(step: Step) -> bool:
    """True if the step is complete; does not block."""
    if isinstance(step, Until):
        return step.condition()
    if test_singly:
        with keep_requests(step):
            return all([each.Test() for each in step])
    return MPI.Request.Testall(step)


def block(arrived: Callable[[], bool]) -> None:
    """Poll until `arrived()` is true, and yield the core between polls, after the first few.

    MPI's own waiting may keep the core (MPICH's does). Other processes on it, perhaps the awaited one, then run only
    after a preemption, some milliseconds later. After a preemption the polls sleep for a while instead of yielding: a
    yield has no effect across sessions if the kernel groups processes by session, and a process that has slept is
    scheduled first.
    """
    for _ in range(POLLS):
        if arrived():
            return
    before = clock()
    while not arrived():
        if contention.naps:
            contention.naps -= 1
            time.sleep(NAP)
        else:
            os.sched_yield()
        now = clock()
        if now - before > PREEMPTED:
            contention.naps = NAPS
        before = now


class CoreContention:
    """Core contention: polls left that sleep first."""

    naps = 0


contention = CoreContention()


def complete(step: Step) -> None:
    """Block until the step is complete."""
    if not isinstance(step, Until):
        if not test_singly:
            block(lambda: MPI.Request.Testall(step))
            return
        with keep_requests(step):
            for each in step:
                block(each.Test)
    elif step.block is not None:
        step.block()
    else:
        block(step.condition)


class Collective:
    """A collective operation given by its generator `steps`; a call blocks until the last step is complete."""

    def __init__(self, steps: Callable[..., Iterator[Step]]):
        self.steps = steps
        functools.update_wrapper(self, steps)

    def __call__(self, *arguments: Any, **options: Any) -> None:
        for step in self.steps(*arguments, **options):
            complete(step)


def collective(steps: Callable[..., Iterator[Step]]) -> Collective:
    """Decorate a generator: the result is the blocking function, and its `.steps` is the generator."""
    return Collective(steps)
