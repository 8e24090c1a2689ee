"""How a collective operation is written once and runs both ways, blocking and asynchronous.

The algorithm is a generator. Where its blocking form would wait for messages it yields their requests instead, and goes
on when they are complete:

    @collective
    def ring_all_reduce(comm, vector, op=SUM):
        ...
        yield comm.Irecv(inbox, left), comm.Isend(chunk, right)
        op(vector, inbox)

`ring_all_reduce(comm, vector)` then waits at each yield. `ring_all_reduce.steps(comm, vector, op)` is the generator
itself, which `hpcdl.comm.requests.Request` takes forward whenever its messages have arrived, while the caller computes.

What is yielded is a list of MPI requests, or, where no message comes (shared memory), an `Until`.
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
    """A step that waits for a condition; `block`, where given, waits for it faster than asking again and again."""

    def __init__(self, condition: Callable[[], bool], block: Callable[[], None] | None = None):
        self.condition, self.block = condition, block


class Delivery(Until):
    """A step of messages whose lengths are looked at: until all requests, the receives first, are complete.

    check(number, status): called for each of the first `receives` requests; status: None where what came is longer than
    the place for it, of which MPI says no more.
    """

    def __init__(self, requests: list[MPI.Request], receives: int, check: Callable[[int, MPI.Status | None], object]):
        super().__init__(self.come)
        self.requests, self.receives, self.check = requests, receives, check
        self.statuses: list[MPI.Status] = []

    def come(self) -> bool:
        """Whether all have come. Raises what `check` raises."""
        try:
            with kept(self.requests):
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
NAPS = 1000  # after the core was taken away
TAKEN = 500_000  # nanoseconds between two looks: the core was taken away
POLLS = 50  # looks for messages before the core is offered to others; some 20 us
one_by_one = False  # whether requests are waited for by themselves: where ranks may be gone (recovery/ulfm_recovery.py)
failed: list[Step] = []  # steps of which a request has failed; MPI may still know the others


@contextlib.contextmanager
def kept(step: Step) -> Iterator[None]:
    """Requests are kept where the body raises.

    Open MPI's Waitall frees them where one has failed, and ends the process when another one fails later.
    """
    try:
        yield
    except MPI.Exception:
        failed.append(step)
        raise


def ready(step: Step) -> bool:
    """Whether the step is complete; does not block."""
    if isinstance(step, Until):
        return step.condition()
    if one_by_one:
        with kept(step):
            return all([each.Test() for each in step])
    return MPI.Request.Testall(step)


def block(come: Callable[[], bool]) -> None:
    """Look until it has come, and offer the core to others between two looks, after the first few.

    MPI's own waiting may keep the core (MPICH's does), and then the others that work there, among them who is waited
    for, come on when the kernel takes it away: after some milliseconds. Where that has happened, looks are in naps for
    a while: to yield does nothing for another session where the kernel groups processes by them, and who has slept is
    the first to come on.
    """
    for _ in range(POLLS):
        if come():
            return
    before = clock()
    while not come():
        if crowd.naps:
            crowd.naps -= 1
            time.sleep(NAP)
        else:
            os.sched_yield()
        now = clock()
        if now - before > TAKEN:
            crowd.naps = NAPS
        before = now


class Crowd:
    """Others on the core: how many looks are yet in naps."""

    naps = 0


crowd = Crowd()


def complete(step: Step) -> None:
    """Block until the step is complete."""
    if not isinstance(step, Until):
        if not one_by_one:
            block(lambda: MPI.Request.Testall(step))
            return
        with kept(step):
            for each in step:
                block(each.Test)
    elif step.block is not None:
        step.block()
    else:
        block(step.condition)


class Collective:
    """An operation written as the generator `steps`; called, it blocks until the last step."""

    def __init__(self, steps: Callable[..., Iterator[Step]]):
        self.steps = steps
        functools.update_wrapper(self, steps)

    def __call__(self, *arguments: Any, **options: Any) -> None:
        for step in self.steps(*arguments, **options):
            complete(step)


def collective(steps: Callable[..., Iterator[Step]]) -> Collective:
    """Decorator: make the generator callable, as a function that blocks; the generator itself is its `.steps`."""
    return Collective(steps)
