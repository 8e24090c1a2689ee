"""Collective checker: do all ranks make the same collective call? (--check collectives, or HPCDL_CHECK=1)

    rank 0    all_reduce of 100 float32 (sum)    code c0  |  largest of c and of -c, by MPI's own all-reduce
    rank 1    all_reduce of 100 float64 (sum)    code c1  |  on a communicator for nothing else
    all       if c0 = c1 = ... the call goes on; else all ranks report every rank's call and its line

A code is a hash of operation, type, length, reduction, root and all-reduce algorithm. The comparison, an uncounted
all-reduce of 16 bytes, precedes the call's own messages, so all ranks may continue after the error. An asynchronous
call is compared when it is waited for or tested, so that its start still does not block.

If a rank never makes the call, the watchdog sees the others wait: it ends a job whose ranks deadlock in calls of
different communicators, or wait for a rank that has left, and a job that waits longer than --timeout (watchdog.py)."""

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.collective_schedule import Step, Until, ready
from hpcdl.comm.diagnostics.call_signature import Call, describe_call, group_by_text, mismatch_message
from hpcdl.comm.diagnostics.call_site import caller, location
from hpcdl.comm.progress import activity, clock
from hpcdl.errors import AgreedError, UsageError

VARIABLE = "HPCDL_CHECK"
OFF, ON = ("", "0"), ("1", "collectives")
MOST = 1000  # codes in the cache
WORDS = "S500"  # type of the texts that ranks exchange
TAGS = 32768  # guaranteed by MPI


def enabled_by_environment() -> bool:
    """True if $HPCDL_CHECK turns the checker on. Raises UsageError for an unknown value."""
    value = os.environ.get(VARIABLE, "")
    if value not in OFF + ON:
        raise UsageError(f"{VARIABLE}={value}: set 1 to compare the collective calls of all ranks, or 0")
    return value in ON


class CollectiveChecker:
    """Compares the calls on one communicator, by messages on its duplicate; the constructor is a collective call."""

    def __init__(self, comm: MPI.Intracomm):
        self.comm = comm.Dup()
        self.codes: dict[tuple[Call, str], int] = {}
        self.beginning: deque[np.ndarray] = deque()  # comparisons of asynchronous calls, in order

    def code(self, call: Call, algorithm: str) -> int:
        """Return a hash of 56 bits of a call and its algorithm: equal on all ranks if both are equal."""
        found = self.codes.get((call, algorithm))
        if found is None:
            if len(self.codes) == MOST:
                self.codes.clear()
            text = f"{describe_call(call)} {call} {algorithm}"
            found = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
            self.codes[call, algorithm] = found
        return found

    def start(self, call: Call, algorithm: str) -> tuple[np.ndarray, MPI.Request]:
        code = self.code(call, algorithm)
        largest = np.array([code, -code])
        return largest, self.comm.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX)

    def before(self, group: Any, call: Call) -> int:
        """Compare a blocking call before it is made; return the nanoseconds waited. AgreedError if calls differ."""
        around = activity.enter(call[0], group._everyone)
        start = activity.since
        try:
            largest, come = self.start(call, group.algorithm_of(call))
            while not come.Test():
                activity.advance_others()
            if largest[0] != -largest[1]:
                for step in self.refuse(group, call, group.sequence, location(caller())):
                    while not ready(step):
                        activity.advance_others()
        finally:
            activity.leave(around)
        return clock() - start

    def checked_steps(self, group: Any, call: Call, steps: Iterator[Step]) -> Iterator[Step]:
        """Return the comparison of an asynchronous call of `group`, then its `steps`, as one generator. Calls begin in
        the order in which they are made; the turns in a node's shared memory rely on it."""
        where, number = location(caller()), group.sequence

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
        """Yield the steps that exchange all ranks' calls and call sites (`where`); then raise AgreedError on all ranks.
        The tag is the call's `number`: ranks with several calls in flight find differences in different orders."""
        everyone, tag = np.zeros((self.comm.size, 3), WORDS), number % TAGS
        everyone[self.comm.rank] = [each.encode() for each in (describe_call(call), group.algorithm_of(call), where)]
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        mine = everyone[self.comm.rank].view(np.uint8)
        coming = [self.comm.Irecv(everyone[other].view(np.uint8), other, tag) for other in others]
        yield [*coming, *(self.comm.Isend(mine, other, tag) for other in others)]
        words, algorithms, lines = ([each.decode(errors="replace") for each in row] for row in everyone.T)
        if len({*words}) == 1:
            words = [f"{each} by {name}" for each, name in zip(words, algorithms, strict=True)]
        at, told = group_by_text(dict(enumerate(lines))), mismatch_message(dict(enumerate(words)))
        raise AgreedError(f"{told} (call number {number} of {group.name!r}, called from {at})")
