"""Microseconds of each all-reduce by size: mpiexec -n 4 python scripts/bench_allreduce.py --json allreduce.json

All algorithms run on the bare communicator, the library's own (`mpi`) among them. For each size they take turns, so
that all see the same machine; a time is that of the slowest rank, from a barrier on; medians, and the spread
between the first and the third quartile of what each algorithm takes relative to the library in the same turn.
"""

import json
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

    algorithms: str = option("naive,direct,ring,tree,recursive,mpi", "names, with commas between; mpi is added")
    sizes: str = option("1KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB", "bytes of the vector (float32)")
    seconds: float = option(0.5, "seconds to spend on each size and algorithm, at least 5 turns")
    json: str = option("", "file for the result")


def main(arguments=None):
    world = MPI.COMM_WORLD
    with ended("bench-allreduce", world.rank):
        with agreement(world), quiet(world.rank > 0):
            options = parse(BenchOptions, "bench-allreduce", __doc__.split("\n")[0], arguments)
            names = [name for name in options.algorithms.split(",") if name and name != "mpi"] + ["mpi"]
            functions = {name: algorithm(name) for name in names}
            sizes = {text: bytes_of(text) for text in options.sizes.split(",")}
            if options.seconds <= 0:
                raise UsageError(f"--seconds must be greater than 0, not {options.seconds}")
        rows = {text: measure(world, functions, size // 4, options.seconds) for text, size in sizes.items()}
        if world.rank == 0:
            report(options, world.size, names, rows)


def bytes_of(text: str) -> int:
    """Read 64KiB, 4MiB, 1GiB or a number of bytes."""
    for power, unit in enumerate(("KiB", "MiB", "GiB"), 1):
        if text.endswith(unit) and text.removesuffix(unit).isdecimal():
            return int(text.removesuffix(unit)) << (10 * power)
    if not text.isdecimal():
        raise UsageError(f"--sizes: write 64KiB, 4MiB, 1GiB or a number of bytes, not {text!r}")
    return int(text)


def measure(world, functions: dict, length: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds of each turn, by algorithm; on all ranks, the slowest rank's."""
    vector = np.zeros(length, np.float32)

    def turn(function) -> float:
        world.Barrier()
        start = time.perf_counter()
        function(world, vector)
        return world.allreduce(time.perf_counter() - start, MPI.MAX)

    for function in functions.values():  # compile, and touch the memory
        turn(function)
    slowest = max(turn(function) for function in functions.values())
    turns = int(min(1000, max(5, seconds / max(1e-7, slowest))))
    taken = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            taken[name].append(1e6 * turn(function))
    return taken


def report(options: BenchOptions, ranks: int, names: list[str], rows: dict) -> None:
    """Print medians, and each algorithm's time relative to the library's own, turn by turn."""
    about = environment()
    print(f"all-reduce of float32 in place on {ranks} ranks, microseconds, median")
    print(f"{about['mpi']}, numpy {about['numpy']}, numba {about['numba']}, {about['machine']}\n")
    print("| size | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    for text, taken in rows.items():
        print(f"| {text} | " + " | ".join(f"{np.median(taken[name]):,.0f}" for name in names) + " |")
    print("\ntime divided by that of mpi in the same turn: median (first to third quartile)\n")
    print("| size | " + " | ".join(names[:-1]) + " |\n|" + "---|" * len(names))
    for text, taken in rows.items():
        ratios = [np.divide(taken[name], taken["mpi"]) for name in names[:-1]]
        quartiles = [np.percentile(ratio, (50, 25, 75)) for ratio in ratios]
        print(f"| {text} | " + " | ".join(f"{m:.2f} ({low:.2f} to {high:.2f})" for m, low, high in quartiles) + " |")
    if options.json:
        result = {"ranks": ranks, "microseconds": rows, "environment": about}
        Path(options.json).write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
