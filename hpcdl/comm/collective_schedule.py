"""Collective operations as generators: written once, they run blocking and asynchronously.

A generator under `@collective` yields a step where a blocking algorithm would wait: a sequence of MPI requests, as in
`yield comm.Irecv(inbox, left), comm.Isend(chunk, right)`, or, for shared memory, an `Until`. A call,
`ring_all_reduce(comm, vector)`, waits at each yield. `ring_all_reduce.steps(comm, vector, op)` is the generator itself,
which `hpcdl.comm.requests.Request` advances as messages arrive, while the caller computes."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from mpi4py import MPI

from hpcdl.comm.progress import activity


class Until:
    """A step that waits for a condition. block(), if given, waits for the condition faster than polling does."""

    block: Callable[[], None] | None = None

    def __init__(self, condition: Callable[[], bool], block: Callable[[], None] | None = None):
        self.condition, self.block = condition, block


class Delivery(Until):
    """A step that waits for all `requests`, of which the first `receives` are receives. check(number, status) is called
    for each receive; its status is None if the message is longer than its buffer (MPI gives no status then)."""

    def __init__(self, requests: list[MPI.Request], receives: int, check: Callable[[int, MPI.Status | None], object]):
        self.requests, self.receives, self.check = requests, receives, check
        self.statuses: list[MPI.Status] = []

    def condition(self) -> bool:  # a method: kept in an attribute, it would keep the step, and its buffers, alive
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


@contextlib.contextmanager
def keep_requests(step: Step) -> Iterator[None]:
    """Keep a step's requests if the body raises: Open MPI would free them, and end the process at the next failure."""
    try:
        yield
    except MPI.Exception:
        activity.abandoned.append(step)  # MPI may still use its other requests
        raise


def ready(step: Step) -> bool:
    """True if the step is complete; does not block."""
    if isinstance(step, Until):
        return step.condition()
    if activity.survives:
        with keep_requests(step):
            return all([each.Test() for each in step])
    return MPI.Request.Testall(step)


def complete(step: Step) -> None:
    """Block until the step is complete."""
    if not isinstance(step, Until):
        if not activity.survives:
            activity.block(lambda: MPI.Request.Testall(step))
            return
        with keep_requests(step):
            for each in step:
                activity.block(each.Test)
    elif step.block is not None:
        step.block()
    else:
        activity.block(step.condition)


class Collective:
    """A collective operation made from its generator `steps` (`@collective`); a call blocks until the last step."""

    def __init__(self, steps: Callable[..., Iterator[Step]]):
        self.steps = steps
        functools.update_wrapper(self, steps)

    def __call__(self, *arguments: Any, **options: Any) -> None:
        for step in self.steps(*arguments, **options):
            complete(step)


collective = Collective
