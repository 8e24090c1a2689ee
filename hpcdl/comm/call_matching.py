"""Comparison of collective calls: do all ranks of a group make the same call?

Ranks whose collective calls differ in length, type or operation would add unrelated values, or wait for ever. So each
rank shows its call to the others, at no measurable cost:

    in the memory of a node   beside the flag of each rank (kernels/shared.py): all ranks see it before they add
    by messages               a number derived from the call is part of the tags (`number`): messages of different calls
                              never match, and the watchdog asks waiting ranks for their calls (watchdog.py)
    by MPI's own all-reduce   a second all-reduce gives the largest and smallest code of all calls (`CallComparison`)"""

import contextlib
import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.collective_schedule import Until
from hpcdl.comm.diagnostics.call_signature import TYPES, Call, describe_call
from hpcdl.comm.diagnostics.call_site import refuse
from hpcdl.comm.operations import OPERATIONS, Reduction
from hpcdl.comm.progress import activity, attribute_key

OTHERS = ("all_reduce_compressed", "reduce", "broadcast", "reduce_scatter", "all_gather", "barrier")
BROUGHT = ("gather", "scatter", "all_to_all", "product", "and", "or", "xor")  # steps given to `irun`
CODES = {name: i for i, name in enumerate(("all_reduce", *OTHERS, "", *OPERATIONS, *BROUGHT))}


@functools.cache
def numbers() -> int:
    """Return how many call numbers (`number`) there are: 1 if MPI has too few tags to tell calls apart."""
    most_tag: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    return 1 << 13 if most_tag >= (1 << 28) - 1 else 1


def number(call: Call) -> int:
    """Return a hash of the call, below `numbers()`: equal on all ranks, and different for most other calls."""
    name, kind, size, op, root = call
    return hash((CODES[name], -1 if kind is None else TYPES[kind], size, CODES[op], root)) % numbers()


TURNS = "turns"  # attribute of a communicator: the queue of operations that make library collectives


@contextlib.contextmanager
def turn(comm: MPI.Intracomm) -> Iterator[Until]:
    """Context that orders MPI's own collectives: in `with turn(comm) as mine: yield mine; ...` step `mine` waits for
    its turn. MPI matches collectives by their order on each rank, and operations may advance at different times."""
    turns: Any = comm.Get_attr(attribute_key(TURNS))
    if turns is None:
        turns = deque()
        comm.Set_attr(attribute_key(TURNS), turns)
    me = object()
    turns.append(me)
    try:
        yield Until(lambda: turns[0] is me)
    finally:
        turns.remove(me)


class CallComparison:
    """Checks that an MPI_Allreduce has equal length, type and operation on all ranks, by a second one. As a context of
    blocking calls it compares before the first call, as MPICH ends the job if calls differ, and during later calls."""

    def __init__(self, comm: MPI.Intracomm, vector: Any, op: Reduction):
        self.comm, self.call = comm, ("all_reduce", vector.dtype, vector.size, op.name, 0)
        exact = (vector.size * 64 + TYPES[vector.dtype]) * 16 + CODES[op.name]
        self.mine, self.values = np.array([exact, -exact]), np.empty(2, np.int64)
        self.checked = False

    def start(self) -> MPI.Request:
        """Start the comparison and return its request. It is not counted as traffic, because it has no payload."""
        return MPI.Intracomm.Iallreduce(self.comm, self.mine, self.values, MPI.MAX)

    def check(self) -> None:
        """Raise AgreedError, on all ranks, if the calls differ; for use after the comparison is complete."""
        if self.values[0] != -self.values[1]:
            refuse(self.comm, describe_call(self.call))

    def __enter__(self) -> None:
        self.compared = self.start()
        if not self.checked:
            activity.block(self.compared.Test)
            self.check()

    def __exit__(self, *error: object) -> None:
        if self.checked:
            activity.block(self.compared.Test)
            self.check()
        self.checked = self.checked or error[0] is None
