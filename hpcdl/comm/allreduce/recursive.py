"""Recursive halving and doubling: the bytes of a ring in the steps of a tree.

    4 ranks, chunks 0 to 3       with       sends       keeps and adds
    halving, distance 2          r ^ 2      2 3 | 0 1   0 1 | 2 3         ranks 0 and 1 | 2 and 3
    halving, distance 1          r ^ 1      1 | 0 ...   0 | 1 | 2 | 3     now rank r has the sum of chunk r
    doubling, distance 1         r ^ 1      its chunk   0 1 | 0 1 | 2 3 | 2 3
    doubling, distance 2         r ^ 2      both        0 1 2 3 on all ranks

In each halving step a rank exchanges half of its current chunks with the rank at that distance, the farthest first; the
doubling runs the steps backwards. This needs a power of two. Other numbers of ranks take the steps of circulant.py,
which halve them with rounding. (Rabenseifner, "Optimization of collective reduction operations", ICCS 2004)

    cost, N ranks              messages             values sent               steps
    N = 2^h, every rank        2 h                  2 (N - 1) K / N           2 h
    else                       as circulant.py      2 (N - 1) K / N           2 ceil(log2 N)"""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm.allreduce.circulant import circulant_all_reduce
from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.collective_schedule import Step, collective
from hpcdl.comm.operations import SUM, Reduction


@collective
def recursive_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Reduce `vector` (flat, contiguous) over all ranks of `comm`, in place, by halving and doubling."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if size & (size - 1):
        yield from circulant_all_reduce.steps(comm, vector, op)
        return
    cut = chunks(vector.size, size)

    def part(first: int, count: int) -> "np.ndarray":
        return vector[cut[first].start : cut[first + count - 1].stop]

    first, distance = 0, size // 2  # this rank still works on 2 * distance chunks, from `first` on
    inbox = np.empty(part(0, max(1, distance)).size, vector.dtype)
    while distance:
        keep, send = (first + distance, first) if rank & distance else (first, first + distance)
        partner, mine = rank ^ distance, part(keep, distance)
        arrived = inbox[: mine.size]
        yield comm.Irecv(arrived, partner), comm.Isend(part(send, distance), partner)
        op(mine, arrived)
        first, distance = keep, distance // 2
    distance = 1
    while distance < size:
        partner, other = rank ^ distance, first ^ distance
        yield comm.Irecv(part(other, distance), partner), comm.Isend(part(first, distance), partner)
        first, distance = min(first, other), 2 * distance


ALGORITHM = Algorithm("recursive", recursive_all_reduce.steps, fixed=True)
