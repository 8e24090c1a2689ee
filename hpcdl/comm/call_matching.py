"""What the ranks of a group call together: compared, and part of each message's tag.

Ranks that call an operation of all with different vectors, types or operations would add what does not belong together,
or wait for ever. So what each of them calls is known to the others, at no cost that can be measured:

    in the memory of a node   beside the flag of each rank (kernels/shared.py): all ranks see it before they add
    by messages               a number made of it is part of their tags (`number`): messages of different calls never
                              meet, and ranks that wait for them are asked what they call
                              (hpcdl/comm/diagnostics/watchdog.py)
    by MPI's own all-reduce   two more values are reduced beside it (`SameCall`): its largest and its smallest
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.collective_schedule import Until
from hpcdl.comm.diagnostics.call_signature import TYPES, Call, told
from hpcdl.comm.diagnostics.call_site import refuse
from hpcdl.comm.operations import OPERATIONS, Reduction

OTHERS = ("all_reduce_compressed", "reduce", "broadcast", "reduce_scatter", "all_gather", "barrier")
BROUGHT = ("gather", "scatter", "all_to_all", "product", "and", "or", "xor")  # with steps of the caller's: `irun`
CODES = {name: i for i, name in enumerate(("all_reduce", *OTHERS, "", *OPERATIONS, *BROUGHT))}
MOST_TAG: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
NUMBERS = 1 << 13 if MOST_TAG >= (1 << 28) - 1 else 1  # where there are no tags for them, none


def number(call: Call) -> int:
    """A number below NUMBERS that is the same on all ranks, and another one for most other calls."""
    name, kind, size, op, root = call
    return hash((CODES[name], -1 if kind is None else TYPES[kind], size, CODES[op], root)) % NUMBERS


TURNS = MPI.Comm.Create_keyval()  # of a communicator: whose turn it is to call what the library has for all ranks


@contextlib.contextmanager
def turn(comm: MPI.Intracomm) -> Iterator[Until]:
    """`with turn(comm) as mine: yield mine; ...`: what the body calls of the library stands together, in order.

    A library matches such calls in the order in which the ranks make them. Operations in flight go on at other times on
    each rank; so one that makes a second call makes it before a later operation makes its first.
    """
    turns: Any = comm.Get_attr(TURNS)
    if turns is None:
        turns = deque()
        comm.Set_attr(TURNS, turns)
    me = object()
    turns.append(me)
    try:
        yield Until(lambda: turns[0] is me)
    finally:
        turns.remove(me)


class SameCall:
    """Beside an all-reduce of the library's: whether length, type and operation are the same on all ranks."""

    def __init__(self, comm: MPI.Intracomm, vector: Any, op: Reduction):
        self.comm, self.call = comm, ("all_reduce", vector.dtype, vector.size, op.name, 0)
        exact = (vector.size * 64 + TYPES[vector.dtype]) * 16 + CODES[op.name]
        self.mine, self.values = np.array([exact, -exact]), np.empty(2, np.int64)

    def start(self) -> MPI.Request:
        """Until all have come; not counted, for it has no payload."""
        return MPI.Intracomm.Iallreduce(self.comm, self.mine, self.values, MPI.MAX)

    def check(self) -> None:
        """When they have. Raises AgreedError, on all ranks."""
        if self.values[0] != -self.values[1]:
            refuse(self.comm, told(self.call))
