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
    comm: a bare mpi4py communicator. op(into, values): combines two vectors. Required: name, and steps or blocking.

    steps       (comm, vector, op): the schedule, a generator (collective_schedule.py); None: no steps, it blocks
    blocking    (comm, vector, op): the blocking call, if it differs from executing the steps
    prepare     (comm): a collective call before the first all-reduce; returns the shared memory used (node_memory.py)
    choose      (comm, vector): returns the algorithm to use instead, by the length and type of the vector
    bind        (comm, vector, op): returns None, or the blocking call for vectors of this length and type, with all
                look-ups done: a function of the vector, which returns the nanoseconds waited and the bytes written to
                or copied from shared memory
    fixed       True if the steps are messages and calls of op only, and depend on the ranks and on the vector's length
                and type only: the fast path then executes them in compiled code (compiled_schedule.py)
    direct      True if the algorithm passes its vector to the MPI library unread: the vector may then lie on a GPU
    meets       True if the blocking call matches no asynchronous one and advances no other operation: before it, all
                ranks wait for each other"""

    name: str
    steps: Callable[..., Iterator[Step]] | None = None
    blocking: Callable[..., None] | None = None
    prepare: Callable[..., Any] | None = None
    choose: "Callable[..., Algorithm] | None" = None
    bind: Callable[..., Callable[[np.ndarray], tuple[int, int]] | None] | None = None
    fixed: bool = False
    direct: bool = False
    meets: bool = False

    def __call__(self, comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> None:
        if self.blocking is not None:
            self.blocking(comm, vector, op)
        else:
            for step in self.steps(comm, vector, op):  # type: ignore[misc]
                complete(step)

    def meeting(self, comm: MPI.Intracomm, vector: np.ndarray, op: Reduction) -> Iterator[Step]:
        """Yield the steps of a blocking call beside operations in flight; for algorithms with `meets`."""
        with turn(comm) as mine:
            yield mine
            same = CallComparison(comm, vector, op)
            yield [same.start()]
            same.check()
            yield Until(lambda: self.blocking(comm, vector, op) is None, lambda: self.blocking(comm, vector, op))  # type: ignore[misc]
