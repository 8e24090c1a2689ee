"""Microseconds of each all-reduce by size: mpiexec -n 4 python scripts/bench_allreduce.py --json allreduce.json

Each algorithm is measured twice. The full call: `Communicator.all_reduce` as a training run calls it, which checks,
counts and times, under a watchdog and with a trace. Bare: the algorithm alone on an mpi4py communicator. Vectors are
from `comm.empty`, as a training run has them; `shared, copied` is `shared` on a vector that is not in shared memory,
`mpi` the library's own, and `gloo` (--gloo) PyTorch's all-reduce in the same processes. For each size all take turns,
so that they see the same machine. Every rank fills its vector anew; then, from a barrier on, come as many calls as take
about 100 us (one for long vectors); a turn's time is the slowest rank's, for one call. Medians, and the spread between
the first and the third quartile of what each algorithm takes by the full call relative to the library's own, bare, in
the same turn, whose order is drawn by lot.

The last column, `copy`, is no all-reduce: every rank copies its vector to another, all at the same time, which moves
the bytes that `shared` moves (N K values read, N K written), and so is what the memory or the caches allow.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.comm.allreduce import algorithm
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.launch.benchmark_table import (
    Contender,
    benchmark,
    bytes_of,
    print_table,
    quartile_text,
    quartiles,
    race,
    write_json,
)
from hpcdl.runs.folder import environment
from hpcdl.runs.options import option

BARE = ", bare"  # ends the name of a contender that is the algorithm alone
HOUR, SPANS = 3600.0, 2000  # the watchdog's patience; spans that are kept, as in a training run


@dataclass
class AllReduceBenchOptions:
    """Which algorithms and sizes are measured, and how often."""

    algorithms: str = option(
        "naive,direct,ring,tree,recursive,shared,hierarchical,auto", "names, with commas between; mpi is added"
    )
    gloo: bool = option(False, "measure PyTorch's gloo, too")
    sizes: str = option("4,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB", "bytes of the vector (float32)")
    seconds: float = option(0.5, "seconds to spend on each size and algorithm, at least 5 turns")
    json: str = option("", "file for the result")

    def __post_init__(self):
        for name in self.names:
            algorithm(name)
        if self.gloo:
            find_torch()
        for text in self.sizes.split(","):
            bytes_of(text)
        if self.seconds <= 0:
            raise UsageError(f"--seconds must be greater than 0, not {self.seconds}")

    @property
    def names(self) -> list[str]:
        """The algorithms but for the library's own."""
        return [name for name in self.algorithms.split(",") if name and name != "mpi"]


def main(arguments=None):
    with benchmark("bench-allreduce", AllReduceBenchOptions, __doc__, arguments) as (world, options, _):
        everyone, names = Communicator(world, "tree", HOUR, SPANS), options.names
        contenders = []
        for name in [*names, *(["shared, copied"] if "shared" in names else []), "mpi"]:
            contenders += [full_call(everyone, name), bare(world, name)]
        if options.gloo:
            contenders.insert(-2, VectorCall("gloo", gloo(world)))
        contenders.append(VectorCall("copy", copy))
        rows = {text: measure(world, contenders, bytes_of(text) // 4, options) for text in options.sizes.split(",")}
        if world.rank == 0:
            report(options, world.size, rows)


@dataclass
class VectorCall:
    """A function of a vector; empty(length, dtype) makes vectors where it works best, or None: in private memory."""

    name: str
    call: Callable[[np.ndarray], None]
    empty: Callable[[int, np.dtype], np.ndarray | None] | None = None

    def vector(self, length: int) -> np.ndarray:
        """A vector of zeros."""
        found = None if self.empty is None else self.empty(length, np.dtype(np.float32))
        found = np.empty(length, np.float32) if found is None else found
        found[:] = 0
        return found


def full_call(everyone: Communicator, column: str) -> VectorCall:
    """Communicator.all_reduce, with the watchdog and the trace of `everyone`."""
    name, copied, _ = column.partition(",")
    comm = everyone.split(0, name=name, allreduce=name)
    return VectorCall(column, comm.all_reduce, None if copied else comm.empty)


def bare(world: MPI.Intracomm, column: str) -> VectorCall:
    """The algorithm on a communicator of MPI's, and nothing around it."""
    name, copied, _ = column.partition(",")
    found, comm = algorithm(name), world.Dup()
    memory, call = found.prepare(comm) if found.prepare else None, found.blocking or found
    return VectorCall(column + BARE, lambda vector: call(comm, vector), None if copied or not memory else memory.empty)


def copy(vector: np.ndarray) -> None:
    """Read and write as much as an all-reduce in shared memory does."""
    if len(copies) != 1 or copies[0].size != vector.size:
        copies[:] = [np.zeros_like(vector)]
    np.copyto(copies[0], vector)


copies: list[np.ndarray] = []


def find_torch():
    """PyTorch's distributed package. Raises UsageError where it is not installed."""
    try:
        import torch.distributed
    except ImportError:
        raise UsageError("--gloo: PyTorch is not installed; pip install 'hpcdl[torch]'") from None
    return torch


def gloo(world):
    """PyTorch's all-reduce over gloo among the ranks of this world."""
    torch = find_torch()
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = world.bcast((socket.gethostname(), probe.getsockname()[1]))
    store = torch.distributed.TCPStore(*address, world.size, is_master=world.rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    return lambda vector: torch.distributed.all_reduce(torch.from_numpy(vector))


def measure(
    world: MPI.Intracomm, calls: list[VectorCall], length: int, options: AllReduceBenchOptions
) -> dict[str, list[float]]:
    """Microseconds of a call in each turn, by name; on all ranks, the slowest rank's."""

    def contender(each: VectorCall) -> Contender:
        vector, call = each.vector(length), each.call
        return Contender(lambda: call(vector), lambda: vector.fill(1))

    repeats = max(1, min(20, (64 << 10) // max(1, 4 * length)))
    return race(world, {each.name: contender(each) for each in calls}, options.seconds, length, repeats)


def report(options: AllReduceBenchOptions, ranks: int, rows: dict) -> None:
    """Print medians, and each algorithm's time by the full call relative to the library's own, turn by turn."""
    about = environment()
    names = [name for name in next(iter(rows.values())) if not name.endswith(BARE)]
    print(f"all-reduce of float32 in place on {counted(ranks, 'rank')}, microseconds, median: full call / bare")
    print(f"{about['mpi']}, numpy {about['numpy']}, numba {about['numba']}, {about['machine']}\n")
    print_table([{"size": text} | {name: both(taken, name) for name in names} for text, taken in rows.items()])
    print("\ntime of the full call divided by that of mpi, bare, in the same turn: median (first to third quartile)\n")
    print_table(
        [
            {"size": text} | {name: quartile_text(np.divide(taken[name], taken[f"mpi{BARE}"])) for name in names}
            for text, taken in rows.items()
        ]
    )
    if "shared" in names:
        print(f"\nshared: memory traffic of all {ranks} ranks, GB/s (part of what the copies reach in the same turn)\n")
        for text, taken in rows.items():
            traffic = 2 * ranks * bytes_of(text) / np.median(taken["shared"]) / 1e3
            part = np.median(np.divide(taken["copy"], taken["shared"]))
            print(f"    {text:>8}  {traffic:7.1f}  ({part:.0%})")
    write_json("bench-allreduce", options, records(ranks, rows))


def records(ranks: int, rows: dict) -> list[dict]:
    """The rows of the file: one for each size and algorithm, the full call and bare."""
    return [
        {
            "ranks": ranks,
            "size_bytes": bytes_of(text),
            "algorithm": name.removesuffix(BARE),
            "bare": name.endswith(BARE) or name in ("gloo", "copy"),
            **quartiles("microseconds", times),
        }
        for text, taken in rows.items()
        for name, times in taken.items()
    ]


def both(taken: dict[str, list[float]], name: str) -> str:
    """The median of the full call and, where there is one, the bare one."""
    ways = [taken[name], *([taken[f"{name}{BARE}"]] if f"{name}{BARE}" in taken else [])]
    return " / ".join(microseconds(np.median(times)) for times in ways)


def microseconds(value: float) -> str:
    """With a digit behind the point where it says something."""
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
