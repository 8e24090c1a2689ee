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

from hpcdl.errors import UsageError, unknown
from hpcdl.kernels.cases import CASES, KernelCase
from hpcdl.kernels.device import CPU
from hpcdl.launch.benchmark_table import benchmark, bytes_of, print_table, quartile_text, quartiles, write_json
from hpcdl.runs.folder import environment
from hpcdl.runs.options import option

SAMPLE = 20e-6  # seconds that one turn of a call lasts at least; shorter calls are repeated in it


@dataclass
class KernelBenchOptions:
    """Which kernels, sizes and element type are measured, and for how long."""

    kernels: str = option("", "names, with commas between (default: all)")
    sizes: str = option("64,64KiB,1MiB,16MiB,256MiB", "bytes of the first array (or of the embedded rows)")
    dtype: str = option("float32", "float32 or float64")
    seconds: float = option(0.5, "seconds to spend on each size of each kernel, at least 5 turns")
    json: str = option("", "file for the result")

    def __post_init__(self):
        if self.dtype not in ("float32", "float64"):
            raise UsageError(f"--dtype is float32 or float64, not {self.dtype}")
        if self.seconds <= 0:
            raise UsageError(f"--seconds must be greater than 0, not {self.seconds}")
        for name in self.names:
            if name not in CASES:
                raise unknown("kernel", name, CASES)
        for text in self.sizes.split(","):
            bytes_of(text)

    @property
    def names(self) -> list[str]:
        return [name for name in self.kernels.split(",") if name]


def main(arguments=None):
    alone = "bench-kernels measures one thread; start it on one rank"
    with benchmark("bench-kernels", KernelBenchOptions, __doc__, arguments, one_rank=alone) as (_, options, _):
        rows = []
        for name in options.names or CASES:
            for text in options.sizes.split(",") if options.dtype in CASES[name].dtypes else ():
                taken = measure(CASES[name], bytes_of(text), options.dtype, options.seconds)
                rows.append({"kernel": name, "size": text, **taken})
                print_row(rows[-1], first=len(rows) == 1, dtype=options.dtype)
        write_json("bench-kernels", options, [record(row, options.dtype) for row in rows])


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


def record(row: dict, dtype: str) -> dict:
    """A row of the file."""
    about = {"kernel": row["kernel"], "dtype": dtype, "bound_by": row["limit"], "size_bytes": bytes_of(row["size"])}
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
    middle = np.median(row["microseconds"]["kernel"])
    cells = {"kernel": row["kernel"], "bound by": row["limit"], "size": row["size"], "microseconds": f"{middle:,.2f}"}
    cells["GB/s"] = f"{row['bytes'] / middle / 1e3:.1f}"
    for other in ("copy", "numpy"):
        cells[f"kernel / {other}"] = quartile_text(
            np.divide(*(row["microseconds"][name] for name in ("kernel", other)))
        )
    print_table([cells], first)


if __name__ == "__main__":
    main()
