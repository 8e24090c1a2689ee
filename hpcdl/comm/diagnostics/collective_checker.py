"""Before each call of all ranks: whether all of them call the same (--check collectives, or HPCDL_CHECK=1).

    rank 0    all_reduce of 100 float32 (sum)    code c0  |  largest of c and of -c, by MPI's own all-reduce
    rank 1    all_reduce of 100 float64 (sum)    code c1  |  on a communicator for nothing else
    all       where c0 = c1 = ... the call goes on; else all ranks are told what each has called, and from which line

A code is made of operation, type, length, reduction, root and all-reduce algorithm. That it is the same call in order
follows from the communicator: the nth comparison is that of the nth call. Nothing of the call itself has been sent when
they are compared, so all ranks may go on after the error. An asynchronous call is compared when it is waited for or
tested, so that starting one still waits for nobody.

Where a rank does not come at all there is nothing to compare. Who waits here says so to the watchdog, as in every call
of all ranks: it ends a job in which ranks wait for each other in calls of different communicators, or for one that has
left, and with --timeout one in which a rank does not come (watchdog.py).

cost      an all-reduce of 16 bytes by the library before each call, none of it counted; where it is off, one comparison
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.collective_schedule import Step, Until, ready
from hpcdl.comm.diagnostics.call_signature import Call, by_words, differ, told
from hpcdl.comm.diagnostics.call_site import caller, place
from hpcdl.comm.progress import activity, clock
from hpcdl.errors import AgreedError, UsageError

VARIABLE = "HPCDL_CHECK"
OFF, ON = ("", "0"), ("1", "collectives")
MOST = 1000  # codes that are kept
WORDS = "S500"  # what a rank tells of its call
TAGS = 32768  # that MPI guarantees


def wanted() -> bool:
    """Whether the environment asks for it. Raises UsageError where it says anything else."""
    value = os.environ.get(VARIABLE, "")
    if value not in OFF + ON:
        raise UsageError(f"{VARIABLE}={value}: it is 1 to compare what ranks call together, or 0")
    return value in ON


class Checking:
    """Of one communicator: the comparisons of its calls, on a duplicate of it; making one is a collective call."""

    def __init__(self, comm: MPI.Intracomm):
        self.comm = comm.Dup()
        self.codes: dict[tuple[Call, str], int] = {}
        self.beginning: deque[np.ndarray] = deque()  # asynchronous calls that are compared, in the order of the calls

    def code(self, call: Call, algorithm: str) -> int:
        """A number of 56 bits, the same on all ranks for the same call."""
        found = self.codes.get((call, algorithm))
        if found is None:
            if len(self.codes) == MOST:
                self.codes.clear()
            text = f"{told(call)} {call} {algorithm}"
            found = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
            self.codes[call, algorithm] = found
        return found

    def start(self, call: Call, algorithm: str) -> tuple[np.ndarray, MPI.Request]:
        code = self.code(call, algorithm)
        largest = np.array([code, -code])
        return largest, self.comm.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX)

    def before(self, group: Any, call: Call) -> int:
        """Wait until all have come to this call, taking forward what is in flight; returns the nanoseconds waited.

        Raises AgreedError, on all ranks, where they have come to different calls.
        """
        around = activity.enter(call[0], group._everyone)
        start = activity.since
        try:
            largest, come = self.start(call, group.algorithm_of(call))
            while not come.Test():
                activity.advance()
                os.sched_yield()
            if largest[0] != -largest[1]:
                for step in self.refuse(group, call, group.sequence, place(caller())):
                    while not ready(step):
                        activity.advance()
                        os.sched_yield()
        finally:
            activity.leave(around)
        return clock() - start

    def first(self, group: Any, call: Call, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps of an asynchronous call, with the comparison before the first.

        Such calls begin in the order in which they were made, as ever: those in the memory of a node take turns by it.
        """
        where, number = place(caller()), group.sequence

        def compared() -> Iterator[Step]:
            try:
                yield [come]
                if largest[0] != -largest[1]:
                    yield from self.refuse(group, call, number, where)
                yield Until(lambda: self.beginning[0] is largest)
                begun = next(steps, None)
            finally:
                self.beginning = deque(each for each in self.beginning if each is not largest)
            if begun is not None:
                yield begun
                yield from steps

        largest, come = self.start(call, group.algorithm_of(call))
        self.beginning.append(largest)
        return compared()

    def refuse(self, group: Any, call: Call, number: int, where: str) -> Iterator[Step]:
        """Tell each other who has called what, and from where: the steps. Raises AgreedError, on all ranks.

        The call's number is the tag of the messages: of several calls in flight, each rank sees in an order of its own
        that they differ, and has begun other comparisons; what the library has for all ranks would meet another call's.
        """
        everyone, tag = np.zeros((self.comm.size, 3), WORDS), number % TAGS
        everyone[self.comm.rank] = [each.encode() for each in (told(call), group.algorithm_of(call), where)]
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        mine = everyone[self.comm.rank].view(np.uint8)
        coming = [self.comm.Irecv(everyone[other].view(np.uint8), other, tag) for other in others]
        yield [*coming, *(self.comm.Isend(mine, other, tag) for other in others)]
        words, algorithms, lines = ([each.decode(errors="replace") for each in row] for row in everyone.T)
        if len({*words}) == 1:
            words = [f"{each} by {name}" for each, name in zip(words, algorithms, strict=True)]
        at = by_words(dict(enumerate(lines)))
        raise AgreedError(f"{differ(dict(enumerate(words)))} (call number {number} of {group.name!r}, from {at})")

    def free(self) -> None:
        self.comm.Free()
