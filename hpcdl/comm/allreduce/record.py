"""What there is to know of an all-reduce algorithm, in one record."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.call_matching import SameCall, turn
from hpcdl.comm.collective_schedule import Step, Until, complete
from hpcdl.comm.operations import SUM, Reduction


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce algorithm: `algorithm(comm, vector, op)` reduces a flat contiguous vector in place, and blocks.

    comm is a bare mpi4py communicator, op(into, values) the reduction of two vectors. All but the name and one of steps
    and blocking may be left out.

    name        by which it is chosen
    steps       (comm, vector, op): its schedule, a generator (collective_schedule.py); without, it is done at once
    blocking    (comm, vector, op): the blocking call, where that is more than the steps one after the other
    prepare     (comm): a collective call before the first all-reduce, which returns the memory of the node that the
                algorithm works in (hpcdl/comm/node_memory.py)
    choose      (comm, vector): the algorithm to take instead, which depends on the length of the vector and its type
    bind        (comm, vector, op): the blocking call for vectors of this length and type, with all at hand that it
                looks up: a function of the vector that returns the nanoseconds for which it waited and the bytes
                that it wrote to shared memory or copied from there; or None
    direct      whether it only hands its vector on to the MPI library, which may take one on a GPU
    meets       whether its blocking call matches no asynchronous one and takes nothing else forward: all ranks wait for
                all before they make it
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
        """The steps of a blocking call, beside others in flight, of an algorithm that `meets`."""
        with turn(comm) as mine:
            yield mine
            same = SameCall(comm, vector, op)
            yield [same.start()]
            same.check()
            yield Until(lambda: self.blocking(comm, vector, op) is None, lambda: self.blocking(comm, vector, op))  # type: ignore[misc]
