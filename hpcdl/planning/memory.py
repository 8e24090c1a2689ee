"""Bytes of each rank of a training before it runs, by what they are for; and of one that has run, beside what it held.

    parameters gradients optimizer activations    as hpcdl/memory.py counts them: peaks of a step
    buffers        what an all-reduce or a compression receives in; None: a library's own, which nobody knows
    data           rows that the rank holds, or its part of what a node holds once, and the batches that it makes
    interpreter    Python, its libraries and MPI, as this process has them before any data

    float32 (or float64)       as the strategy holds it
    16 bit, master weights     parameters, gradients, activations: 2 bytes an element; optimizer: 4 bytes an element,
                               and 4 more for each parameter that this rank updates

What a model's layers and a cut model hold is found by going through a step on arrays without memory (dry_run.py,
replicated_memory.py): chunks, shards and schedules are those that train.
"""

import contextlib
import functools
import math
import resource
from typing import NamedTuple

from hpcdl.chunks import chunk, chunks
from hpcdl.errors import UsageError
from hpcdl.memory import KINDS, Memory
from hpcdl.planning.dry_run import CUT, rehearse
from hpcdl.planning.replicated_memory import HOLDS
from hpcdl.planning.workload import Workload

MORE = "buffers", "data", "interpreter"
MASTER = 4  # bytes of a master weight
SCRATCH = 1 << 20  # of a rank, for vectors that do not lie in memory that a node shares
ALL_REDUCES = "train-allreduce", "train-svrg", "train-local-sgd", "train-sgld"


class RankMemory(NamedTuple):
    """What a rank holds: bytes by kind, of those of `MORE`, too; updated: the parameters that it updates."""

    rank: int
    role: str
    bytes: dict[str, float]
    updated: int

    @property
    def total(self) -> float:
        """All of it; what nobody knows counts nothing."""
        return sum(value for value in self.bytes.values() if not math.isnan(value))

    def half(self, itemsize: int) -> dict[str, float]:
        """The same in 16 bit with master weights, where elements have `itemsize` bytes by themselves."""
        of = dict(self.bytes)
        for kind in ("parameters", "gradients", "activations", "buffers"):
            of[kind] *= 2 / itemsize
        of["optimizer"] = of["optimizer"] * 4 / itemsize + MASTER * self.updated
        return of


def forecast(case: Workload, only: list[int] | None = None) -> list[RankMemory]:
    """What each rank of a training holds, or those with these numbers. UsageError for a program it knows nothing of."""
    if case.program not in (*CUT, *HOLDS):
        known = ", ".join(sorted((*CUT, *HOLDS)))
        raise UsageError(f"of {case.program} no memory is known; there are {known}")
    interpreter, found = resident(), []
    for rank in range(case.ranks) if only is None else only:
        role, memory, updated = case.roles.of(rank), Memory(), 0
        if role != "data server":
            training = rank if role == "parameter server" else rank - len(case.roles.data_servers)
            memory, updated = of_rank(case, training)
        more = dict(zip(MORE, (buffers(case, rank), data(case, rank, role), interpreter), strict=True))
        found.append(RankMemory(rank, role, {kind: float(memory.peak[kind]) for kind in KINDS} | more, updated))
    return found


def of_rank(case: Workload, rank: int) -> tuple[Memory, int]:
    """The four kinds of a rank among those that train, and the parameters that it updates."""
    if case.program in CUT:
        return rehearse(case, rank)
    memory = Memory()
    HOLDS[case.program](case, rank, memory)
    return memory, case.length


def buffers(case: Workload, rank: int) -> float:
    """What the all-reduce of a vector of all parameters receives in (hpcdl/comm/allreduce); elsewhere nothing is."""
    options, size, item = case.options, case.size, case.dtype.itemsize
    if case.program not in ALL_REDUCES or size == 1:
        return 0.0
    if getattr(options, "compress", "none") != "none":  # the codes, and a chunk of them from each other rank
        own = chunk(case.length, size, rank)
        return 2.0 * (case.length + (size - 1) * (own.stop - own.start))
    return scratch(options.allreduce, case.length, rank, size) * item


def scratch(algorithm: str, length: int, rank: int, size: int) -> float:
    """Elements that a rank receives in, of a vector of so many; `auto` may take any: as ring; NaN: nobody knows."""
    power = 1 << (size.bit_length() - 1)
    return {
        "naive": float(length) if rank == 0 else 0.0,
        "direct": float(size * length),
        "ring": float(chunks(length, size)[0].stop),
        "auto": float(chunks(length, size)[0].stop),
        "tree": float(length) if rank % 2 == 0 and rank + 1 < size else 0.0,
        "recursive": float(sum(part.stop - part.start for part in chunks(length, power)[: max(1, power // 2)])),
        "shared": 0.0,
        "hierarchical": 0.0,
    }.get(algorithm, math.nan)


def data(case: Workload, rank: int, role: str) -> float:
    """Rows of the training and test parts, and two batches; under placement shared, rank 0's are those of its node."""
    shape, options = case.data, case.options
    row = shape.row + shape.target
    batch = 2 * case.share(0, len(case.roles.workers)) * (math.prod(shape.features) * case.dtype.itemsize + 8)
    if role == "parameter server":
        return 0.0
    if options.placement == "streamed":
        return float(batch)
    holders = case.roles.data_servers or case.roles.workers
    examples = shape.examples if rank == holders[0] else 0
    if options.placement == "partitioned":
        examples = case.share(holders.index(rank), len(holders), shape.examples) if rank in holders else 0
    rows = examples + shape.test * (examples > 0)
    return float(batch * (role == "worker") + rows * row)


@functools.cache
def resident() -> float:
    """Bytes of this process when it is first asked: with numpy, Numba, HDF5 and MPI, and no data yet.

    Not its largest so far, in which Linux counts what the process that started it had.
    """
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return float(file.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
