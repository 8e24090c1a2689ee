"""The record of an all-reduce algorithm."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.call_matching import CallComparison, turn
from hpcdl.comm.collective_schedule import Step, Until, complete
from hpcdl.comm.operations import SUM, Reduction


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce algorithm: `algorithm(comm, vector, op)` reduces a flat contiguous vector in place, and blocks.

    comm is a bare mpi4py communicator, op(into, values) the reduction of two vectors. Required are the name and one of
    steps and blocking.

    name        the name that the user chooses
    steps       (comm, vector, op): its schedule, a generator (collective_schedule.py); None: it only blocks
    blocking    (comm, vector, op): the blocking call, if it differs from executing the steps
    prepare     (comm): a collective call before the first all-reduce; returns the shared memory that the algorithm uses
                (hpcdl/comm/node_memory.py)
    choose      (comm, vector): the algorithm to use instead, by the length and type of the vector
    bind        (comm, vector, op): the blocking call for vectors of this length and type, with all look-ups done: a
                function of the vector that returns the nanoseconds waited and the bytes written to or copied from
                shared memory; or None
    direct      True if it passes its vector to the MPI library unread, so that it may lie on a GPU
    meets       True if its blocking call matches no asynchronous one and advances no other operation: all ranks wait
                for all before they make it
    """

    name: str
    steps: Callable[..., Iterator[Step]] | None = None
    blocking: Callable[..., None] | None = None
    prepare: Callable[..., Any] | None = None
    choose: "Callable[..., Algorithm] | None" = None
    bind: Callable[..., Callable[[np.ndarray], tuple[int, int]] | None] | None = None
    direct: bool = False
    meets: bool = False

    def __call__(self, comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> None:
        if self.blocking is not None:
            self.blocking(comm, vector, op)
        else:
            for step in self.steps(comm, vector, op):  # type: ignore[misc]
                complete(step)

    def meeting(self, comm: MPI.Intracomm, vector: np.ndarray, op: Reduction) -> Iterator[Step]:
        """The steps of a blocking call of an algorithm that `meets`, beside operations in flight."""
        with turn(comm) as mine:
            yield mine
            same = CallComparison(comm, vector, op)
            yield [same.start()]
            same.check()
            yield Until(lambda: self.blocking(comm, vector, op) is None, lambda: self.blocking(comm, vector, op))  # type: ignore[misc]
