"""The forecast of each rank's memory by kind.

    parameters gradients optimizer activations    as hpcdl/memory.py counts them: peaks of a step
    buffers        receive buffers of an all-reduce or a compression; NaN: a library's own, which are unknown
    data           rows that the rank holds, or its part of what a node holds once, and the batches that it makes
    interpreter    Python, its libraries and MPI, as this process has them before any data

    float32 (or float64)       as the strategy holds it
    16 bit, master weights     2 bytes an element of parameters, gradients, activations, buffers; 4 bytes an element of
                               optimizer, and 4 more for each parameter that this rank updates

A strategy declares what a rank holds (strategies/description.py), or cuts the model: then a dry run finds it
(dry_run.py)."""

import contextlib
import functools
import math
import resource
from typing import NamedTuple

from hpcdl.chunks import chunks
from hpcdl.comm.allreduce import double_tree
from hpcdl.comm.compression import make_codec, plain_lengths
from hpcdl.memory import KINDS, Memory
from hpcdl.planning.dry_run import dry_run_step
from hpcdl.strategies.workload import Workload

OTHER_KINDS = "buffers", "data", "interpreter"
MASTER = 4  # bytes of a master weight
ALL_REDUCES = "train-allreduce", "train-svrg", "train-local-sgd", "train-sgld"


class RankMemory(NamedTuple):
    """The memory of a rank: bytes by kind, OTHER_KINDS included. updated: number of parameters that it updates."""

    rank: int
    role: str
    bytes: dict[str, float]
    updated: int

    @property
    def total(self) -> float:
        """Bytes of all kinds; an unknown kind (NaN) counts 0."""
        return sum(value for value in self.bytes.values() if not math.isnan(value))

    def half(self, itemsize: int) -> dict[str, float]:
        """Return the bytes by kind in 16 bit with master weights. itemsize: bytes of an element now."""
        of = dict(self.bytes)
        for kind in ("parameters", "gradients", "activations", "buffers"):
            of[kind] *= 2 / itemsize
        of["optimizer"] = of["optimizer"] * 4 / itemsize + MASTER * self.updated
        return of


def forecast(case: Workload, only: list[int] | None = None) -> list[RankMemory]:
    """Return the memory of each rank, or of those in `only`."""
    interpreter, forecasts = resident(), []
    for rank in range(case.ranks) if only is None else only:
        role, memory, updated = case.roles.of(rank), Memory(), 0
        if role != "data server":
            training = rank if role == "parameter server" else rank - len(case.roles.data_servers)
            if case.strategy.held is None:
                memory, updated = dry_run_step(case, training)
            else:
                case.strategy.held(case, training, memory)
                if role == "worker":
                    case.hold(memory, "optimizer", 1, case.workspace)
                updated = case.length
        more = dict(zip(OTHER_KINDS, (buffers(case, rank), data(case, rank, role), interpreter), strict=True))
        forecasts.append(RankMemory(rank, role, {kind: float(memory.peak[kind]) for kind in KINDS} | more, updated))
    return forecasts


def buffers(case: Workload, rank: int) -> float:
    """Return the bytes of receive buffers for an all-reduce of all parameters (hpcdl/comm/allreduce); 0 without one."""
    options, size, item = case.options, case.size, case.dtype.itemsize
    if case.program not in ALL_REDUCES or size == 1:
        return 0.0
    if getattr(options, "compress", "none") != "none":  # a message of each chunk, and of this one from each other rank
        factors = plain_lengths(options.compress, case.model.layout, slice(0, case.length))
        if factors:  # what is reduced first, and the receive buffer for it
            return (factors[0] + scratch(options.allreduce, factors[0], rank, size, item)) * item
        codec = make_codec(options.compress, case.dtype)
        lengths = [part.stop - part.start for part in chunks(case.length, size)]
        return float(sum(map(codec.message_bytes, lengths)) + (size - 1) * codec.message_bytes(lengths[rank]))
    return scratch(options.allreduce, case.length, rank, size, item) * item


def scratch(algorithm: str, length: int, rank: int, size: int, item: int) -> float:
    """Return how many elements a rank's receive buffer has for a vector of `length`; auto: like ring; NaN: unknown."""
    cut = [each.stop - each.start for each in chunks(length, size)]
    half, trees = -(-length // 2), double_tree.double_tree(rank, size)
    own, halves = float(cut[0]), float(sum([*cut, *cut][rank : rank + size // 2]))
    return {
        "naive": float(length) if rank == 0 else 0.0,
        "direct": float(size * length),
        "ring": own,
        "auto": own,
        "tree": float(length) if rank % 2 == 0 and rank + 1 < size else 0.0,
        "recursive": halves if size & (size - 1) else float(sum(cut[: size // 2])),
        "circulant": halves,
        "double_tree": 2.0
        * sum(len(tree.children) for tree in trees)
        * -(-half // double_tree.segment_count(half * item)),
        "shared": 0.0,
        "hierarchical": 0.0,
    }.get(algorithm, math.nan)


def data(case: Workload, rank: int, role: str) -> float:
    """Return the bytes of a rank's rows and two batches. If data are shared, the first rank with data has all."""
    shape, options = case.data, case.options
    row = shape.row + shape.target
    batch = 2 * case.share(0, len(case.roles.workers)) * (math.prod(shape.features) * case.dtype.itemsize + 8)
    if role == "parameter server":
        return 0.0
    if options.placement == "streamed":
        reads = role == "data server" or not case.roles.data_servers
        return float(batch + reads * sum((min(options.shuffle_window, n) + 1) * block for block, n in shape.blocks))
    holders = case.roles.data_servers or case.roles.workers
    examples = shape.rows if rank == holders[0] else 0
    if options.placement == "partitioned":
        examples = case.share(holders.index(rank), len(holders), shape.examples) if rank in holders else 0
    rows = examples + shape.test * (examples > 0)
    return float(batch * (role == "worker") + rows * row)


@functools.cache
def resident() -> float:
    """Return the bytes of this process at the first call: numpy, Numba, HDF5 and MPI, without data.
    This is not the peak, in which Linux counts the memory of the process that started this one."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return float(file.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
