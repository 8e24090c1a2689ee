"""How a collective operation is written once and runs both ways, blocking and asynchronous.

The algorithm is a generator. Where its blocking form would wait for messages it yields their requests instead, and goes
on when they are complete:

    @collective
    def ring(comm, vector, op=SUM):
        ...
        yield comm.Irecv(inbox, left), comm.Isend(chunk, right)
        op(vector, inbox)

`ring(comm, vector)` then waits at each yield. `ring.steps(comm, vector, op)` is the generator itself, which
`hpcdl.comm.Request` takes forward whenever its messages have arrived, while the caller computes.

What is yielded is a list of MPI requests, or, where no message comes (shared memory), an `Until`.
"""

import functools
import os
from collections.abc import Callable

from mpi4py import MPI


class Until:
    """A step that waits for a condition; `block`, where given, waits for it faster than asking again and again."""

    def __init__(self, condition: Callable[[], bool], block: Callable[[], None] | None = None):
        self.condition, self.block = condition, block


def ready(step, statuses=None) -> bool:
    """Whether the step is complete; does not block."""
    if isinstance(step, Until):
        return step.condition()
    return MPI.Request.Testall(step, statuses)


def complete(step, statuses=None) -> None:
    """Block until the step is complete."""
    if not isinstance(step, Until):
        MPI.Request.Waitall(step, statuses)
    elif step.block is not None:
        step.block()
    else:
        while not step.condition():
            os.sched_yield()


def collective(steps):
    """Make the generator `steps` callable as a blocking function; the generator stays at hand as `.steps`."""

    @functools.wraps(steps)
    def blocking(*arguments, **options):
        for step in steps(*arguments, **options):
            complete(step)

    blocking.steps = steps
    return blocking
