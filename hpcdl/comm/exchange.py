"""Collectives in one step: every rank sends directly to each other rank.

    with 3 ranks              rank 0                   rank 1                   rank 2
    holds                     a0 a1 a2                 b0 b1 b2                 c0 c1 c2
    sends                     a1 -> 1, a2 -> 2         b2 -> 2, b0 -> 0         c0 -> 0, c1 -> 1
    folds                     S0 = (a0, b0, c0)        S1 = (a1, b1, c1)        S2 = (a2, b2, c2)
    sends (all-reduce)        S0 to all                S1 to all                S2 to all

    cost, N ranks             messages       values sent                               steps
    folded_reduce_scatter     N - 1          K - k(r)                                  1
    folded_all_reduce         2 (N - 1)      K - k(r) + (N - 1) k(r)                   2

A fold gets all values of an element at once, in the order of the ranks: so values of 16 bits are added in float32 and
rounded once, any operation can be a fold, and all ranks get the same bits."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm.collective_schedule import Delivery, Step, collective
from hpcdl.comm.compression.sixteen import KERNELS as CODERS
from hpcdl.errors import UsageError
from hpcdl.kernels import reduce as kernels

Fold: TypeAlias = Callable[[np.ndarray, np.ndarray], None]  # (rows of all ranks, into): into <- fold of the rows
Message: TypeAlias = tuple[np.ndarray, int]  # a flat vector, and the rank that it goes to or comes from

BY_NAME: dict[str, np.ufunc] = {
    "sum": np.add,
    "product": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@collective
def exchange(comm: MPI.Intracomm, sends: Sequence[Message], receives: Sequence[Message]) -> Iterator[Step]:
    """Send and receive these vectors; between two ranks they match in list order. UsageError if lengths differ.
    A rank that receives nothing waits until its messages are being received, so that differing calls are detected."""

    def check(number: int, status: MPI.Status | None) -> None:
        vector, other = receives[number]
        if status is None or status.Get_elements(MPI.BYTE) != vector.nbytes:
            what = "more bytes" if status is None else f"{status.Get_elements(MPI.BYTE)} bytes"
            expected = f"{vector.size} {vector.dtype} ({vector.nbytes} bytes) from rank {other}, which has sent {what}"
            raise UsageError(f"rank {comm.rank} expects {expected}; receive as many elements as are sent")

    send = comm.Isend if receives else comm.Issend
    coming = [comm.Irecv(vector.view(np.uint8), other) for vector, other in receives]
    yield Delivery([*coming, *(send(vector, to) for vector, to in sends)], len(receives), check)


@collective
def folded_reduce_scatter(
    comm: MPI.Intracomm, parts: Sequence[np.ndarray], into: np.ndarray, fold: Fold
) -> Iterator[Step]:
    """Fold all ranks' vectors for this rank, of equal length, into `into`; parts: this rank's vector for each rank."""
    rank, size = comm.Get_rank(), comm.Get_size()
    others = [(rank + i) % size for i in range(1, size)]
    rows = np.empty((size, into.size), into.dtype)
    rows[rank] = parts[rank]
    yield from exchange.steps(comm, [(parts[each], each) for each in others], [(rows[each], each) for each in others])
    fold(rows, into)


@collective
def folded_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, fold: Fold) -> Iterator[Step]:
    """Replace `vector` (flat, contiguous) by the fold of all ranks' vectors, element by element."""
    rank, size = comm.Get_rank(), comm.Get_size()
    parts = [vector[each] for each in chunks(vector.size, size)]
    others = [(rank + i) % size for i in range(1, size)]
    yield from folded_reduce_scatter.steps(comm, parts, parts[rank], fold)
    yield from exchange.steps(comm, [(parts[rank], each) for each in others], [(parts[each], each) for each in others])


@collective
def folded_reduce(comm: MPI.Intracomm, vector: np.ndarray, fold: Fold, root: int) -> Iterator[Step]:
    """Replace the `vector` of rank `root` by the fold of all ranks' vectors; other ranks keep theirs."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if rank != root:
        yield from exchange.steps(comm, [(vector, root)], [])
        return
    rows = np.empty((size, vector.size), vector.dtype)
    rows[rank] = vector
    yield from exchange.steps(comm, [], [(rows[other], other) for other in range(size) if other != rank])
    fold(rows, vector)


def folding(name: str, kind: str | None = None) -> Fold:
    """Return the fold `name` (BY_NAME). kind: float16 or bfloat16 if vectors hold 16-bit codes (uint16); else None."""
    function = BY_NAME[name]

    def fold(rows: np.ndarray, into: np.ndarray) -> None:
        if name == "sum" and rows.dtype in (np.float32, np.float64):
            np.copyto(into, rows[0])
            for row in rows[1:]:
                kernels.add_into(into, row)
        else:
            function.reduce(rows, axis=0, out=into)

    if kind is None:
        return fold
    encode, decode, add = CODERS[kind]

    def fold_codes(rows: np.ndarray, into: np.ndarray) -> None:
        total, value = np.empty(into.size, np.float32), np.empty(into.size, np.float32)
        decode(total, rows[0])
        for row in rows[1:]:
            if name == "sum":
                add(total, row)
            else:
                decode(value, row)
                function(total, value, out=total)
        value[:] = 0  # no error feedback here
        encode(total, value, into)

    return fold_codes
