"""Microseconds of each all-reduce by size: mpiexec -n 4 python scripts/bench_allreduce.py --json allreduce.json

All algorithms run on the bare communicator, the library's own (`mpi`) among them, each in vectors from `comm.empty` as
a training run has them; `shared, copied` is `shared` on a vector that is not in shared memory, and `gloo` (--gloo) is
PyTorch's all-reduce in the same processes. For each size they take turns, so that all see the same machine. Every rank
fills its vector anew; then, from a barrier on, come as many calls as take about 100 us (one for long vectors); a turn's
time is the slowest rank's, for one call. Medians, and the spread between the first and the third quartile of what each
algorithm takes relative to the library in the same turn, whose order is drawn by lot.

The last column, `copy`, is no all-reduce: every rank copies its vector to another, all at the same time, which moves
the bytes that `shared` moves (N K values read, N K written), and so is what the memory or the caches allow.
"""

import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpcdl.comm import agreement
from hpcdl.comm.allreduce import algorithm
from hpcdl.errors import UsageError
from hpcdl.runs.folder import environment
from hpcdl.runs.options import option, parse
from hpcdl.runs.program import ended, quiet


@dataclass
class BenchOptions:
    """Which algorithms and sizes are measured, and how often."""

    algorithms: str = option(
        "naive,direct,ring,tree,recursive,shared,hierarchical,auto", "names, with commas between; mpi is added"
    )
    gloo: bool = option(False, "measure PyTorch's gloo, too")
    sizes: str = option("1KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB", "bytes of the vector (float32)")
    seconds: float = option(0.5, "seconds to spend on each size and algorithm, at least 5 turns")
    json: str = option("", "file for the result")


def main(arguments=None):
    world = MPI.COMM_WORLD
    with ended("bench-allreduce", world.rank):
        with agreement(world), quiet(world.rank > 0):
            options = parse(BenchOptions, "bench-allreduce", __doc__.split("\n")[0], arguments)
            names = [name for name in options.algorithms.split(",") if name and name != "mpi"]
            functions = {name: algorithm(name) for name in names}
            if options.gloo:
                find_torch()
            sizes = {text: bytes_of(text) for text in options.sizes.split(",")}
            if options.seconds <= 0:
                raise UsageError(f"--seconds must be greater than 0, not {options.seconds}")
        contenders = [Contender(world, name, function) for name, function in functions.items()]
        if "shared" in functions:
            contenders.append(Contender(world, "shared, copied", functions["shared"], windows=False))
        if options.gloo:
            contenders.append(Contender(world, "gloo", gloo(world)))
        contenders += [Contender(world, "mpi", algorithm("mpi")), Contender(world, "copy", copy)]
        rows = {text: measure(world, contenders, size // 4, options.seconds) for text, size in sizes.items()}
        if world.rank == 0:
            report(options, world.size, rows)


class Contender:
    """An algorithm with a communicator of its own, and vectors where it works best (windows) or in private memory."""

    def __init__(self, world, name, function, windows=True):
        self.name, self.function, self.comm = name, function, world.Dup()
        prepare = getattr(function, "prepare", None)
        self.memory = prepare(self.comm) if prepare and windows else None

    def vector(self, length):
        """A vector of zeros."""
        found = self.memory.empty(length, np.dtype(np.float32)) if self.memory is not None else None
        found = np.empty(length, np.float32) if found is None else found
        found[:] = 0
        return found


def copy(comm, vector):
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
    return lambda comm, vector: torch.distributed.all_reduce(torch.from_numpy(vector))


def bytes_of(text: str) -> int:
    """Read 64KiB, 4MiB, 1GiB or a number of bytes."""
    for power, unit in enumerate(("KiB", "MiB", "GiB"), 1):
        if text.endswith(unit) and text.removesuffix(unit).isdecimal():
            return int(text.removesuffix(unit)) << (10 * power)
    if not text.isdecimal():
        raise UsageError(f"--sizes: write 64KiB, 4MiB, 1GiB or a number of bytes, not {text!r}")
    return int(text)


def measure(world, contenders: list, length: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds of a call in each turn, by contender; on all ranks, the slowest rank's."""
    vectors = {each.name: each.vector(length) for each in contenders}
    calls = max(1, min(20, (64 << 10) // max(1, 4 * length)))

    def turn(each) -> float:
        function, comm, vector = each.function, each.comm, vectors[each.name]
        vector[:] = 1
        world.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            function(comm, vector)
        return world.allreduce(time.perf_counter() - start, MPI.MAX) / calls

    for each in contenders:  # compile, and touch the memory
        turn(each)
    slowest = max(turn(each) for each in contenders) * calls
    turns = int(min(1000, max(5, seconds / max(1e-7, slowest))))
    taken, order = {each.name: [] for each in contenders}, np.random.default_rng(length)  # the same on all ranks
    for _ in range(turns):
        for each in order.permutation(contenders):  # each finds the caches as another one left them
            taken[each.name].append(1e6 * turn(each))
    return taken


def report(options: BenchOptions, ranks: int, rows: dict) -> None:
    """Print medians, and each algorithm's time relative to the library's own, turn by turn."""
    about = environment()
    names = list(next(iter(rows.values())))
    print(f"all-reduce of float32 in place on {ranks} ranks, microseconds, median")
    print(f"{about['mpi']}, numpy {about['numpy']}, numba {about['numba']}, {about['machine']}\n")
    print("| size | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    for text, taken in rows.items():
        print(f"| {text} | " + " | ".join(microseconds(np.median(taken[name])) for name in names) + " |")
    print("\ntime divided by that of mpi in the same turn: median (first to third quartile)\n")
    others = [name for name in names if name != "mpi"]
    print("| size | " + " | ".join(others) + " |\n|" + "---|" * len(names))
    for text, taken in rows.items():
        ratios = [np.divide(taken[name], taken["mpi"]) for name in others]
        quartiles = [np.percentile(ratio, (50, 25, 75)) for ratio in ratios]
        print(f"| {text} | " + " | ".join(f"{m:.2f} ({low:.2f} to {high:.2f})" for m, low, high in quartiles) + " |")
    if "shared" in names:
        print(f"\nshared: memory traffic of all {ranks} ranks, GB/s (part of what the copies reach in the same turn)\n")
        for text, taken in rows.items():
            traffic = 2 * ranks * bytes_of(text) / np.median(taken["shared"]) / 1e3
            part = np.median(np.divide(taken["copy"], taken["shared"]))
            print(f"    {text:>8}  {traffic:7.1f}  ({part:.0%})")
    if options.json:
        result = {"ranks": ranks, "microseconds": rows, "environment": about}
        Path(options.json).write_text(json.dumps(result, indent=2))


def microseconds(value: float) -> str:
    """With a digit behind the point where it says something."""
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
