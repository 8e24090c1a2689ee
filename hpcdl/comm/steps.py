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
"""

import functools

from mpi4py import MPI


def collective(steps):
    """Make the generator `steps` callable as a blocking function; the generator stays at hand as `.steps`."""

    @functools.wraps(steps)
    def blocking(*arguments, **options):
        for requests in steps(*arguments, **options):
            MPI.Request.Waitall(requests)

    blocking.steps = steps
    return blocking
