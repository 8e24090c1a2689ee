"""Speed of each kernel beside a copy and beside numpy: python scripts/bench_kernels.py --json kernels.json

Three calls take turns for each kernel and size: the kernel; numpy's copy of as many bytes as the kernel moves, half of
them read and half written; and the numpy expressions that do the same as the kernel (kernels/cases.py). All run on one
thread. The size is that of the kernel's first array (of the embedded rows, where that one holds tokens); GB/s counts
every byte that is read or written, once each time. A ratio is that of two times of the same turn: its median, and the
spread between the first and the third quartile. The kernel is as fast as the copy at 1, and faster than numpy below 1.
"""

import time
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from hpcdl.comm import refuse_together
from hpcdl.errors import UsageError, unknown
from hpcdl.kernels.cases import CASES, KernelCase
from hpcdl.kernels.device import CPU
from hpcdl.launch.benchmark_table import check_files, quartiles, write_json
from hpcdl.launch.program import ended, quiet
from hpcdl.runs.folder import environment
from hpcdl.runs.options import option, parse
from hpcdl.scripts.bench_allreduce import bytes_of

SAMPLE = 20e-6  # seconds that one turn of a call lasts at least; shorter calls are repeated in it


@dataclass
class KernelBenchOptions:
    """Which kernels, sizes and element type are measured, and for how long."""

    kernels: str = option("", "names, with commas between (default: all)")
    sizes: str = option("64,64KiB,1MiB,16MiB,256MiB", "bytes of the first array (or of the embedded rows)")
    dtype: str = option("float32", "float32 or float64")
    seconds: float = option(0.5, "seconds to spend on each size of each kernel, at least 5 turns")
    json: str = option("", "file for the result")


def main(arguments=None):
    world = MPI.COMM_WORLD
    with ended("bench-kernels", world.rank):
        with refuse_together(world), quiet(world.rank > 0):
            options = parse(KernelBenchOptions, "bench-kernels", __doc__, arguments)
            cases, sizes = chosen(options), {text: bytes_of(text) for text in options.sizes.split(",")}
            check_files(options, world.rank)
            if world.size > 1:
                raise UsageError("bench-kernels measures one thread; start it on one rank")
        rows = []
        for name, case in cases.items():
            for text, size in sizes.items():
                rows.append({"kernel": name, "size": text, **measure(case, size, options.dtype, options.seconds)})
                print_row(rows[-1], first=len(rows) == 1, dtype=options.dtype)
        write_json("bench-kernels", options, [record(row, options.dtype, sizes) for row in rows])


def chosen(options: KernelBenchOptions) -> dict[str, KernelCase]:
    """The cases of the named kernels that know the element type."""
    if options.dtype not in ("float32", "float64"):
        raise UsageError(f"--dtype is float32 or float64, not {options.dtype}")
    if options.seconds <= 0:
        raise UsageError(f"--seconds must be greater than 0, not {options.seconds}")
    names = [name for name in options.kernels.split(",") if name]
    for name in names:
        if name not in CASES:
            raise unknown("kernel", name, CASES)
    return {name: CASES[name] for name in names or CASES if options.dtype in CASES[name].dtypes}


def measure(case: KernelCase, size: int, dtype: str, seconds: float) -> dict:
    """Microseconds of the kernel, the copy and numpy in each turn, and the bytes that a call moves."""
    random = np.random.default_rng(0)
    columns = min(case.columns, max(1, size // np.dtype(dtype).itemsize))
    row = case.make(1, columns, dtype, random)[case.main]
    args, same = (
        [aligned(arg) for arg in case.make(max(1, size // row.nbytes), columns, dtype, random)] for _ in range(2)
    )
    moved = case.traffic(*args)
    source, target = (CPU.zeros(max(1, moved // 2), np.uint8) for _ in range(2))
    calls = {
        "kernel": lambda: case.kernel(*args),
        "copy": lambda: np.copyto(target, source),
        "numpy": lambda: case.reference(*same),
    }
    repeats = {name: max(1, round(SAMPLE / duration(call, 3))) for name, call in calls.items()}
    turns = int(min(1000, max(5, seconds / sum(repeats[name] * duration(call, 1) for name, call in calls.items()))))
    times = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(1e6 * duration(call, repeats[name]))
    return {"limit": case.limit, "bytes": moved, "microseconds": times}


def record(row: dict, dtype: str, sizes: dict[str, int]) -> dict:
    """A row of the file."""
    about = {"kernel": row["kernel"], "dtype": dtype, "bound_by": row["limit"], "size_bytes": sizes[row["size"]]}
    found = about | {"moved_bytes": row["bytes"]}
    for name, taken in row["microseconds"].items():
        found |= quartiles(f"{name}_microseconds", taken)
    return found


def aligned(argument):
    """An array as those of a training run lie, aligned to cache lines; anything else as it is."""
    if not isinstance(argument, np.ndarray):
        return argument
    made = CPU.empty(argument.shape, argument.dtype)
    made[...] = argument
    made.flags.writeable = argument.flags.writeable
    return made


def duration(call, repeats: int) -> float:
    """Seconds of one call, when it is called so often in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def print_row(row: dict, first: bool, dtype: str) -> None:
    """Print a line of the table, as soon as it is known; a copy's bytes are compared for what memory bounds."""
    if first:
        about = environment()
        print(f"kernels on one thread, {dtype}; ratios of times: median (first to third quartile)")
        print(f"numpy {about['numpy']}, numba {about['numba']}, {about['machine']}\n")
        print(
            "| kernel | bound by | size | microseconds | GB/s | kernel / copy | kernel / numpy |\n" + "|---" * 7 + "|"
        )
    times = row["microseconds"]
    middle = np.median(times["kernel"])
    cells = [row["kernel"], row["limit"], row["size"], f"{middle:,.2f}", f"{row['bytes'] / middle / 1e3:.1f}"]
    for other in ("copy", "numpy"):
        ratio, low, high = np.percentile(np.divide(times["kernel"], times[other]), (50, 25, 75))
        cells.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
