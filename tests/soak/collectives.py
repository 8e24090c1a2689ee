"""Random operations, many in flight: mpiexec -n 4 python tests/soak/collectives.py SEED FIRST LAST

Case i draws from (SEED, i) and the number of ranks a group of ranks, an all-reduce algorithm, and up to a dozen
operations of all ranks or of pairs, each with its length, type, reduction, root, and whether its vector lies in memory
that the node shares. All ranks start them in this order, some blocking and some not, and then wait for them in an order
of their own, with naps and tests between. Values are small whole numbers, so each result is known to the bit. A hang is
ended after a minute."""

import sys
import time

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunk
from hpcdl.comm import Communicator
from hpcdl.comm.allreduce import ALGORITHMS
from hpcdl.comm.compression import compressed
from hpcdl.comm.progress import activity
from hpcdl.random import Random

KINDS = (
    *(3 * ["all_reduce"]),
    "all_reduce_compressed",
    "reduce",
    "broadcast",
    "reduce_scatter",
    "all_gather",
    "barrier",
    "pair",
)
TO_ALL = "all_reduce", "all_reduce_compressed", "all_gather"
TYPES = "float32", "float64", "int32", "int64", "uint8"
LENGTHS = 0, 1, 2, 3, 5, 64, 1000, 2047, 2048, 2049, 5003, 100_003, 262_144, 262_145, 600_001
ALL_VALUES = "topk:1", "randomk:1"  # methods that leave nothing out
TIMEOUT = 60


def values(rank: int, number: int, length: int, kind: str) -> np.ndarray:
    """What a rank brings along to an operation."""
    return ((np.arange(length) * 7 + rank * 13 + number) % 10).astype(kind)


def wanted(kind: str, op: str, everyone: list[np.ndarray]) -> np.ndarray:
    if kind == "all_gather":
        size, length = len(everyone), everyone[0].size
        return np.concatenate([everyone[rank][chunk(length, size, rank)] for rank in range(size)])
    how = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}[op]
    total = how.reduce(everyone, axis=0, dtype=everyone[0].dtype)
    return total * total.dtype.type(1 / len(everyone)) if op == "mean" else total


class One:
    """One operation: start it, and check what came of it."""

    def __init__(self, comm: Communicator, number: int, draw: np.random.Generator):
        self.comm, self.number, self.kind = comm, number, KINDS[draw.integers(len(KINDS))]
        self.type, self.length = TYPES[draw.integers(len(TYPES))], int(LENGTHS[draw.integers(len(LENGTHS))])
        ops = ("sum", "max", "min", "mean")[: 4 if self.type.startswith("float") else 3]
        self.op, self.root = ops[draw.integers(len(ops))], int(draw.integers(comm.size))
        if self.kind == "all_reduce_compressed":
            self.type, self.op = self.type if self.type.startswith("float") else "float32", ("sum", "mean")[number % 2]
            spec = ALL_VALUES[draw.integers(len(ALL_VALUES))]
            self.state = compressed(spec, self.length, self.type, number)
        self.blocking, shared, self.shift = draw.random() < 0.4, draw.random() < 0.4, int(draw.integers(comm.size))
        self.vector = comm.empty(self.length, self.type) if shared else np.empty(self.length, self.type)
        self.vector[:] = values(comm.rank, number, self.length, self.type)
        self.before = self.vector.copy()
        self.requests: list = []

    def start(self) -> None:
        arguments = {"all_reduce": (self.op,), "reduce": (self.root, self.op), "reduce_scatter": (self.op,)}
        arguments |= {"broadcast": (self.root,), "all_gather": (), "barrier": (), "pair": ()}
        if self.kind == "all_reduce_compressed":
            arguments[self.kind] = self.state, self.op
        if self.kind == "pair":
            rank, size = self.comm.rank, self.comm.size
            self.got = np.empty_like(self.vector)
            self.requests = [
                self.comm.iwait(self.got, (rank - self.shift) % size, self.number),
                self.comm.ipush(self.vector, (rank + self.shift) % size, self.number),
            ]
            return
        vector = () if self.kind == "barrier" else (self.vector,)
        if self.blocking:
            getattr(self.comm, self.kind)(*vector, *arguments[self.kind])
        else:
            self.requests = [getattr(self.comm, f"i{self.kind}")(*vector, *arguments[self.kind])]

    def check(self) -> None:
        comm = self.comm
        everyone = [values(rank, self.number, self.length, self.type) for rank in range(comm.size)]
        found, right = self.vector, self.before
        if self.kind == "pair":
            found, right = self.got, everyone[(comm.rank - self.shift) % comm.size]
        elif self.kind == "broadcast":
            right = everyone[self.root]
        elif self.kind in TO_ALL or (self.kind == "reduce" and comm.rank == self.root):
            right = wanted(self.kind, self.op, everyone)
        elif self.kind == "reduce_scatter":
            mine = chunk(self.length, comm.size, comm.rank)
            found, right = self.vector[mine], wanted(self.kind, self.op, everyone)[mine]
        assert np.array_equal(found, right), f"{self}: {np.flatnonzero(found != right)[:5]}"

    def __str__(self) -> str:
        where = f"{self.comm.allreduce}, {self.comm.size} ranks"
        return f"{self.number} {self.kind} of {self.length} {self.type} ({self.op}, root {self.root}), {where}"


def case(comm: Communicator, seed: int, i: int) -> None:
    """Run case i on some of the ranks."""
    draw, naps = Random(seed)("collectives", i, comm.size), Random(seed)("naps", i, comm.rank)
    name = list(ALGORITHMS)[draw.integers(len(ALGORITHMS))]
    first = int(draw.integers(comm.size))
    group = comm.split(int(comm.rank < first) if draw.random() < 0.5 else 0, name="some", allreduce=name)
    draw = Random(seed)("operations", i, group.size)
    operations = [One(group, number, draw) for number in range(int(draw.integers(1, 13)))]
    for one in operations:
        if naps.random() < 0.1:
            time.sleep(float(naps.random()) / 200)
        one.start()
    under_way = [request for one in operations for request in one.requests]
    for at in naps.permutation(len(under_way)):
        if naps.random() < 0.3:
            under_way[naps.integers(len(under_way))].test()
        under_way[at].wait()
    for one in operations:
        one.check()
    assert not activity.in_flight and not group.mpi.Iprobe() and not group._collective.Iprobe(), "a message is left"
    group.free()


def main(case, seed: str, first: str, last: str) -> None:
    """Run case(comm, seed, i) on all ranks for each i from `first` to `last`, that one left out."""
    comm = Communicator(MPI.COMM_WORLD, "ring", timeout=TIMEOUT)
    for i in range(int(first), int(last)):
        case(comm, int(seed), i)
    comm.free()


if __name__ == "__main__":
    main(case, *sys.argv[1:])
