"""Microseconds of each all-reduce by size: mpiexec -n 4 hpcdl bench-allreduce --json allreduce.json

Each algorithm is measured twice. The full call: `Communicator.all_reduce` as a training run calls it, which checks,
counts and times, under a watchdog and with a trace. Bare: the algorithm alone on an mpi4py communicator. Vectors are
from `comm.empty`, as a training run has them; `shared, copied` is `shared` on a vector that is not in shared memory,
`mpi` is MPI's own all-reduce, and `gloo` (--gloo) PyTorch's in the same processes. For each size all take turns, in an
order drawn by lot, so that they see the same machine. In a turn every rank fills its vector, waits at a barrier, and
makes as many calls as take about 100 us (one for long vectors); the turn's time is that of the slowest rank, for one
call. The first table has medians. The second divides the time of the full call by that of `mpi`, bare, in the same
turn: the median, with the first and the third quartile.

The last column, `copy`, is no all-reduce: every rank copies its vector, all at the same time. The copies move as many
bytes as `shared` (N K values read, N K written), so their time shows what the memory or the caches allow. `plain ring`
is a ring of twenty lines of mpi4py and numpy in this program, as one would write it without hpcdl.

With --ranks the program starts its own runs, on each of these numbers of ranks, and prints one table of them:

    hpcdl bench-allreduce --ranks 2,3,4 --beside 0,1,2 --sizes 1KiB,64KiB,1MiB --json allreduce.json

--beside 0,1,2 makes all runs three times: alone, and beside one and two busy processes, each in a session of its own as
another user's job. They end with the program, also if it is killed."""

import json
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.launch import benchmark_table as bench
from hpcdl.launch.launched_run import run_program
from hpcdl.machine.busy_processes import busy
from hpcdl.runs.options import option, positive

RING = "plain ring"
BARE = ", bare"  # ends the name of a contender that is the algorithm alone
# A function of a vector, and one that makes vectors of a length and dtype where it works best; None: in private memory.
VectorCall = tuple[Callable[[np.ndarray], None], Callable[[int, np.dtype], np.ndarray | None] | None]
HOUR, SPANS = 3600.0, 2000  # the watchdog's seconds; spans that a trace keeps, as in a run


@dataclass
class AllReduceBenchOptions:
    """Options of bench-allreduce: algorithms, sizes, and time of each measurement."""

    algorithms: str = option(
        "naive,direct,ring,tree,recursive,shared,hierarchical,auto", "names, with commas between; mpi is added"
    )
    gloo: bool = option(False, "measure PyTorch's gloo, too")
    sizes: str = option("4,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB", "bytes of the vector (float32)")
    seconds: float = option(0.5, "seconds to spend on each size and algorithm, at least 5 turns")
    ranks: str = option("", "start runs on these numbers of ranks, as 2,4; without mpiexec")
    beside: str = option("0", "with --ranks: numbers of busy processes beside the runs, as 0,1,2")
    json: str = option("", "file for the result")

    def __post_init__(self):
        from hpcdl.comm.allreduce import algorithm

        for name in self.names:
            algorithm(name)
        if self.gloo:
            bench.find_torch("--gloo: ")
        for text in self.sizes.split(","):
            bench.bytes_of(text)
        positive(self, "seconds")
        if self.ranks:
            bench.whole_numbers("ranks", self.ranks)
        elif self.beside != "0":
            raise UsageError("--beside is for runs that this program starts; give --ranks, too, as in --ranks 2,4")
        if not all(word.isdecimal() for word in self.beside.split(",")):
            raise UsageError(f"--beside: whole numbers with commas between, not {self.beside!r}")

    @property
    def names(self) -> list[str]:
        """The algorithms to measure, except MPI's own."""
        return [name for name in self.algorithms.split(",") if name and name != "mpi"]


def check_launch(options: AllReduceBenchOptions, ranks: int) -> None:
    if options.ranks and ranks > 1:
        raise UsageError("--ranks starts the runs itself: start bench-allreduce without mpiexec, or leave out --ranks")


def run(world, options: AllReduceBenchOptions, _) -> None:
    from hpcdl.comm import Communicator

    if options.ranks:
        start_runs(options)
        return

    everyone, names, calls = Communicator(world, "tree", HOUR, SPANS), options.names, dict[str, VectorCall]()
    for name in [*names, *["shared, copied"] * ("shared" in names), *["gloo"] * options.gloo, "mpi"]:
        if name == "gloo":
            calls[name] = gloo(world), None
        else:
            calls[name], calls[name + BARE] = full_call(everyone, name), bare(world, name)
    calls[RING] = plain_ring(world), None
    calls["copy"] = copy, None
    rows = {text: measure(world, calls, bench.bytes_of(text) // 4, options) for text in options.sizes.split(",")}
    if world.rank == 0:
        report(options, world.size, rows)


def full_call(everyone, column: str) -> VectorCall:
    """Return all_reduce of a communicator with the watchdog and trace of `everyone`, by the algorithm of a column."""
    name, copied, _ = column.partition(",")
    comm = everyone.split(0, name=name, allreduce=name)
    return comm.all_reduce, None if copied else comm.empty


def bare(world, column: str) -> VectorCall:
    """Return the algorithm of a column on a plain MPI communicator, without Communicator's watchdog and trace."""
    from hpcdl.comm.allreduce import algorithm

    name, copied, _ = column.partition(",")
    found, comm = algorithm(name), world.Dup()
    memory, call = found.prepare(comm) if found.prepare else None, found.blocking or found
    return lambda vector: call(comm, vector), None if copied or not memory else memory.empty


def plain_ring(world) -> Callable[[np.ndarray], None]:
    """Return a ring all-reduce that uses nothing of hpcdl."""
    from mpi4py import MPI

    comm = world.Dup()
    rank, size = comm.rank, comm.size
    left, right = (rank - 1) % size, (rank + 1) % size

    def call(vector: np.ndarray) -> None:
        parts = [vector[vector.size * i // size : vector.size * (i + 1) // size] for i in range(size)]
        inbox = np.empty(-(-vector.size // size), vector.dtype)
        for step in range(size - 1):
            send, own = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            part = inbox[: own.size]
            MPI.Request.Waitall([comm.Irecv(part, left), comm.Isend(send, right)])
            own += part
        for step in range(size - 1):
            send, part = parts[(rank + 1 - step) % size], parts[(rank - step) % size]
            MPI.Request.Waitall([comm.Irecv(part, left), comm.Isend(send, right)])

    return call


def copy(vector: np.ndarray) -> None:
    """Copy the vector, which reads and writes as many bytes as an all-reduce in shared memory."""
    if len(copies) != 1 or copies[0].size != vector.size:
        copies[:] = [np.zeros_like(vector)]
    np.copyto(copies[0], vector)


copies: list[np.ndarray] = []


def gloo(world):
    """Return PyTorch's all-reduce by gloo on the ranks of `world`."""
    torch = bench.find_torch()
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = world.bcast((socket.gethostname(), probe.getsockname()[1]))
    store = torch.distributed.TCPStore(*address, world.size, is_master=world.rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    return lambda vector: torch.distributed.all_reduce(torch.from_numpy(vector))


def measure(world, calls: dict[str, VectorCall], length: int, options: AllReduceBenchOptions) -> dict[str, list[float]]:
    """Return, by name of a call, its microseconds on the slowest rank in each turn; equal on all ranks."""

    def contender(call, empty) -> bench.Contender:
        shared = None if empty is None else empty(length, np.dtype(np.float32))
        vector = np.empty(length, np.float32) if shared is None else shared
        vector[:] = 0
        return bench.Contender(lambda: call(vector), lambda: vector.fill(1))

    repeats = max(1, min(20, (64 << 10) // max(1, 4 * length)))
    contenders = {name: contender(*each) for name, each in calls.items()}
    return bench.race(world, contenders, options.seconds, length, repeats)


def report(options: AllReduceBenchOptions, ranks: int, rows: dict) -> None:
    """Print medians, and the time of each algorithm's full call relative to MPI's bare all-reduce in the same turn."""
    from hpcdl.runs.folder import environment

    about = environment()
    names = [name for name in next(iter(rows.values())) if not name.endswith(BARE)]
    print(f"all-reduce of float32 in place on {counted(ranks, 'rank')}, microseconds, median: full call / bare")
    print(f"{about['mpi']}, numpy {about['numpy']}, numba {about['numba']}, {about['machine']}\n")
    bench.print_table([{"size": text} | {name: both(taken, name) for name in names} for text, taken in rows.items()])
    for other, text in ((f"mpi{BARE}", "mpi, bare,"), (RING, "the plain ring")):
        print(f"\ntime of the full call divided by that of {text} in the same turn: median (first to third quartile)\n")
        bench.print_table(
            [
                {"size": text} | {name: bench.quartile_text(np.divide(taken[name], taken[other])) for name in names}
                for text, taken in rows.items()
            ]
        )
    if "shared" in names:
        print(f"\nshared: memory traffic of all {ranks} ranks, GB/s (part of what the copies reach in the same turn)\n")
        for text, taken in rows.items():
            traffic = 2 * ranks * bench.bytes_of(text) / np.median(taken["shared"]) / 1e3
            part = np.median(np.divide(taken["copy"], taken["shared"]))
            print(f"    {text:>8}  {traffic:7.1f}  ({part:.0%})")
    bench.write_json("bench-allreduce", options, records(ranks, rows))


def records(ranks: int, rows: dict) -> list[dict]:
    def ratio(taken: dict, name: str, other: str) -> float:
        return float(np.median(np.divide(taken[name], taken[other])))

    return [
        {"ranks": ranks, "beside": 0, "size_bytes": bench.bytes_of(text), "algorithm": name.removesuffix(BARE)}
        | {"bare": name.endswith(BARE) or name in ("gloo", "copy", RING), **bench.quartiles("microseconds", times)}
        | {"over_mpi_median": ratio(taken, name, f"mpi{BARE}"), "over_plain_ring_median": ratio(taken, name, RING)}
        for text, taken in rows.items()
        for name, times in taken.items()
    ]


def start_runs(options: AllReduceBenchOptions) -> None:
    """Start a run of this program for each situation and number of ranks, and print their results as one table."""
    words = ["bench-allreduce", "--algorithms", options.algorithms, "--sizes", options.sizes]
    words += ["--seconds", str(options.seconds), *["--gloo"] * options.gloo]
    found: list[dict] = []
    print("full call: microseconds, median (divided by those of bare mpi, and of the plain ring, in the same turn)\n")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.json")
        for beside in map(int, options.beside.split(",")):
            for ranks in bench.whole_numbers("ranks", options.ranks):
                with busy(beside):
                    run_program([*words, "--json", str(file)], ranks)
                rows = [row | {"beside": beside} for row in json.loads(file.read_text())["rows"]]
                bench.print_table(list(map(summary, cells_of(rows))), first=not found)
                found += rows
    bench.write_json("bench-allreduce", options, found)


def cells_of(rows: list[dict]) -> list[list[dict]]:
    """Return the rows of each size, without those of bare algorithms, except mpi's, and of copies."""
    sizes = dict.fromkeys(row["size_bytes"] for row in rows)
    kept = [row for row in rows if row["bare"] == (row["algorithm"] in ("mpi", "gloo", RING))]
    return [[row for row in kept if row["size_bytes"] == size] for size in sizes]


def summary(rows: list[dict]) -> dict[str, str]:
    """Return a line of the table of all runs."""
    first = rows[0]
    line = {"beside": str(first["beside"]), "ranks": str(first["ranks"]), "bytes": str(first["size_bytes"])}
    for row in rows:
        over = [f"{row[f'over_{other}_median']:.2f}" for other in ("mpi", "plain_ring")]
        line[row["algorithm"]] = f"{number(row['microseconds_median'])} ({', '.join(over)})"
    return line


def both(taken: dict[str, list[float]], name: str) -> str:
    """Return the median of the full call as a text, with that of the bare call if it was measured."""
    ways = [taken[name], *([taken[f"{name}{BARE}"]] if f"{name}{BARE}" in taken else [])]
    return " / ".join(map(number, map(np.median, ways)))


def number(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


main = bench.benchmark("bench-allreduce", AllReduceBenchOptions, __doc__, run, check_launch)


if __name__ == "__main__":
    main()
