"""Recursive halving and doubling: the bytes of a ring in the steps of a tree.

    4 ranks, chunks 0 to 3       with       sends       keeps and adds
    halving, distance 2          r ^ 2      2 3 | 0 1   0 1 | 2 3         ranks 0 and 1 | 2 and 3
    halving, distance 1          r ^ 1      1 | 0 ...   0 | 1 | 2 | 3     now rank r has the sum of chunk r
    doubling, distance 1         r ^ 1      its chunk   0 1 | 0 1 | 2 3 | 2 3
    doubling, distance 2         r ^ 2      both        0 1 2 3 on all ranks

In each halving step a rank exchanges half of its current chunks with the rank at that distance, the farthest first; the
doubling runs the steps backwards. This needs P ranks, a power of two. The N - P excess ranks fold first: of the first
2 (N - P) ranks each odd one sends its vector to the even one below, and receives the result from it at the end.
(Rabenseifner, "Optimization of collective reduction operations", ICCS 2004)

    cost, N ranks              messages             values sent               steps
    N = P, every rank          2 log2 P             2 (P - 1) K / P           2 log2 P
    else, folded away (odd)    1                    K                         2 log2 P + 2
    else, its partner (even)   2 log2 P + 1         2 (P - 1) K / P + K       2 log2 P + 2"""

from collections.abc import Callable, Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.collective_schedule import Step, collective
from hpcdl.comm.operations import SUM, Reduction


@collective
def recursive_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place, by halving and doubling."""
    rank, size = comm.Get_rank(), comm.Get_size()
    power = 1 << (size.bit_length() - 1)  # the largest power of two that is not larger than size
    extra = size - power
    folded = rank < 2 * extra
    if folded and rank % 2:
        yield [comm.Isend(vector, rank - 1)]
        yield [comm.Irecv(vector, rank - 1)]
        return
    if folded:
        inbox = np.empty_like(vector)
        yield [comm.Irecv(inbox, rank + 1)]
        op(vector, inbox)
    place = rank // 2 if folded else rank - extra  # number among the P ranks
    yield from halve_and_double(comm, vector, op, place, power, lambda p: 2 * p if p < extra else p + extra)
    if folded:
        yield [comm.Isend(vector, rank + 1)]


def halve_and_double(
    comm: MPI.Intracomm, vector: np.ndarray, op: Reduction, place: int, power: int, rank_of: Callable[[int], int]
) -> Iterator[Step]:
    """Yield the steps among `power` ranks; place: this rank's number among them; rank_of(p): the rank of number p."""
    cut = chunks(vector.size, power)

    def part(first: int, count: int) -> "np.ndarray":
        return vector[cut[first].start : cut[first + count - 1].stop]

    first, distance = 0, power // 2  # this rank still works on 2 * distance chunks, from `first` on
    inbox = np.empty(part(0, max(1, distance)).size, vector.dtype)
    while distance:
        keep, send = (first + distance, first) if place & distance else (first, first + distance)
        partner, mine = rank_of(place ^ distance), part(keep, distance)
        arrived = inbox[: mine.size]
        yield comm.Irecv(arrived, partner), comm.Isend(part(send, distance), partner)
        op(mine, arrived)
        first, distance = keep, distance // 2
    distance = 1
    while distance < power:
        partner, other = rank_of(place ^ distance), first ^ distance
        yield comm.Irecv(part(other, distance), partner), comm.Isend(part(first, distance), partner)
        first, distance = min(first, other), 2 * distance


ALGORITHM = Algorithm("recursive", recursive_all_reduce.steps, fixed=True)
