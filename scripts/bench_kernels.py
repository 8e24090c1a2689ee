"""Speed of each kernel beside a copy and beside numpy: hpcdl bench-kernels --json kernels.json

Three calls take turns for each kernel and size: the kernel; numpy's copy of as many bytes as the kernel moves, half of
them read and half written; and the numpy expressions that do the same as the kernel (kernels/cases.py). All run on one
thread. The size is that of the kernel's first array (of the embedded rows, if that array holds tokens); GB/s counts
every byte each time that it is read or written. A ratio divides the kernel's time by another one of the same turn; the
table has its median with the first and the third quartile. Below 1 the kernel is faster than the copy or than numpy.
"""

import time
from dataclasses import dataclass

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels.cases import CASES, KernelCase
from hpcdl.kernels.device import CPU
from hpcdl.launch import benchmark_table as bench
from hpcdl.runs.options import option, positive

SAMPLE = 20e-6  # seconds that one turn of a call lasts at least; shorter calls are repeated in it


@dataclass
class KernelBenchOptions:
    """Options of bench-kernels: kernels, sizes, element type, and time of each measurement."""

    kernels: str = option("", "names, with commas between (default: all)")
    sizes: str = option("64,64KiB,1MiB,16MiB,256MiB", "bytes of the first array (or of the embedded rows)")
    dtype: str = option("float32", "float32 or float64")
    seconds: float = option(0.5, "seconds to spend on each size of each kernel, at least 5 turns")
    json: str = option("", "file for the result")

    def __post_init__(self):
        if self.dtype not in ("float32", "float64"):
            raise UsageError(f"--dtype is float32 or float64, not {self.dtype}")
        positive(self, "seconds")
        bench.chosen("kernel", self.kernels, CASES)
        for text in self.sizes.split(","):
            bench.bytes_of(text)


def run(world, options: KernelBenchOptions, _) -> None:
    rows = []
    for name in bench.chosen("kernel", options.kernels, CASES) or CASES:
        for text in options.sizes.split(",") if options.dtype in CASES[name].dtypes else ():
            taken = measure(CASES[name], bench.bytes_of(text), options.dtype, options.seconds)
            rows.append({"kernel": name, "size": text, **taken})
            print_row(rows[-1], first=len(rows) == 1, dtype=options.dtype)
    bench.write_json("bench-kernels", options, [record(row, options.dtype) for row in rows])


def measure(case: KernelCase, size: int, dtype: str, seconds: float) -> dict:
    """Return microseconds of the kernel, the copy and numpy in each turn, and the bytes that a call moves."""
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
    ways = {name: lambda turn, name=name: 1e6 * duration(calls[name], repeats[name]) for name in calls}
    return {"limit": case.limit, "bytes": moved, "microseconds": bench.in_turns(turns, ways)}


def record(row: dict, dtype: str) -> dict:
    found = {"kernel": row["kernel"], "dtype": dtype, "bound_by": row["limit"]}
    found |= {"size_bytes": bench.bytes_of(row["size"]), "moved_bytes": row["bytes"]}
    for name, taken in row["microseconds"].items():
        found |= bench.quartiles(f"{name}_microseconds", taken)
    return found


def aligned(argument):
    """Return an array aligned to cache lines, as in a training run; anything else unchanged."""
    if not isinstance(argument, np.ndarray):
        return argument
    made = CPU.empty(argument.shape, argument.dtype)
    made[...] = argument
    made.flags.writeable = argument.flags.writeable
    return made


def duration(call, repeats: int) -> float:
    """Return the seconds of one call, the mean of `repeats` in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def print_row(row: dict, first: bool, dtype: str) -> None:
    """Print a row of the table as soon as it is measured. first: print the header before it."""
    from hpcdl.runs.folder import environment

    if first:
        about = environment()
        print(f"kernels on one thread, {dtype}; ratios of times: median (first to third quartile)")
        print(f"numpy {about['numpy']}, numba {about['numba']}, {about['machine']}\n")
    middle = np.median(row["microseconds"]["kernel"])
    cells = {"kernel": row["kernel"], "bound by": row["limit"], "size": row["size"], "microseconds": f"{middle:,.2f}"}
    cells["GB/s"] = f"{row['bytes'] / middle / 1e3:.1f}"
    for other in ("copy", "numpy"):
        ratios = np.divide(row["microseconds"]["kernel"], row["microseconds"][other])
        cells[f"kernel / {other}"] = bench.quartile_text(ratios)
    bench.print_table([cells], first)


main = bench.benchmark("bench-kernels", KernelBenchOptions, __doc__, run, one_rank=True)


if __name__ == "__main__":
    main()
