"""Check and time this machine's GPU: python scripts/gpu_check.py --json gpu.json

Every kernel's CUDA twin is compared with numpy, at sizes that fill no block and at sizes that fill many, then timed at
each of --sizes beside a copy within the GPU that moves the same bytes; the updates beside PyTorch's fused ones (where
PyTorch with CUDA is installed), the reductions beside CuPy. What is compared takes turns; a time is that of calls in a
row between two CUDA events, divided by their number; medians. Then the same training runs on the GPU and on the CPU.
Exit status: 1 when a kernel or the training is wrong; 2, with one line, without a GPU.
"""

import math
import sys
import time
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator, refuse_together
from hpcdl.data import open_data
from hpcdl.errors import UsageError
from hpcdl.kernels.cases import CASES
from hpcdl.kernels.device import CPU, open_device
from hpcdl.launch.benchmark_table import bytes_of, check_files, print_table, quartiles, write_json
from hpcdl.launch.option_parser import parse
from hpcdl.launch.program import ended, quiet
from hpcdl.models import make_model
from hpcdl.runs import Options, Run
from hpcdl.runs.folder import environment
from hpcdl.runs.options import option
from hpcdl.strategies import sequential

TYPES = ("float32", "float64")
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
CURVE = {"float32": 1e-3, "float64": 1e-8}  # how far two loss curves may be apart: other orders of additions


@dataclass
class GPUCheckOptions:
    """What is compared and timed, and how long."""

    elements: str = option("1,77,5000,1000003", "elements of a kernel's first array, at least, when it is compared")
    sizes: str = option("1MiB,16MiB,256MiB", "bytes of a kernel's first array in the timings, with commas between")
    seconds: float = option(0.2, "seconds to spend on each kernel, type and size, at least 5 turns")
    steps: int = option(200, "updates of the training that is compared")
    model: str = option("mlp:256,128", "model of the training, on the digits")
    kernels: str = option("", "names of the kernels to look at, with commas between; default: all")
    json: str = option("", "file for the result")


def main(arguments=None):
    with ended("gpu-check", MPI.COMM_WORLD.rank), refuse_together(MPI.COMM_WORLD), quiet(MPI.COMM_WORLD.rank > 0):
        options = parse(GPUCheckOptions, "gpu-check", __doc__, arguments)
        if MPI.COMM_WORLD.size > 1:
            raise UsageError("this looks at one GPU: start it without mpiexec")
        sizes = {text: bytes_of(text) for text in options.sizes.split(",")}
        elements = whole_numbers("--elements", options.elements)
        cases = chosen(options.kernels)
        check_files(options, MPI.COMM_WORLD.rank)
        gpu = open_device("cuda")
    each = [(name, case, dtype) for name, case in cases.items() for dtype in case.dtypes]
    rows = [row for what in each for row in checked(gpu, *what, elements, sizes, options.seconds)]
    curves = {dtype: trained(gpu, options.model, dtype, options.steps) for dtype in TYPES}
    report(options, gpu, rows, curves)
    wrong = [f"{row['kernel']} ({row['dtype']})" for row in rows if row["wrong"]]
    wrong += [f"training in {dtype}" for dtype, curve in curves.items() if curve["wrong"]]
    if wrong:
        print(f"\nWRONG: {', '.join(dict.fromkeys(wrong))}")
        raise SystemExit(1)


def chosen(names: str) -> dict:
    """The cases of these kernels, all by default."""
    wanted = [name for name in names.split(",") if name]
    if unknown := set(wanted) - set(CASES):
        raise UsageError(f"--kernels: there is no {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    return {name: case for name, case in CASES.items() if not wanted or name in wanted}


def whole_numbers(name: str, text: str) -> list[int]:
    """Read 1,77,5000."""
    if not all(word.isdecimal() and int(word) > 0 for word in text.split(",")):
        raise UsageError(f"{name}: write positive whole numbers with commas between, not {text!r}")
    return [int(word) for word in text.split(",")]


def checked(gpu, name: str, case, dtype: str, elements: list[int], sizes: dict[str, int], seconds: float):
    """The rows of one kernel for one element type: one for each size, each with the largest error of all."""
    random = np.random.default_rng(1)
    error = max(compared(gpu, case, made(case, count, dtype, random)) for count in elements)
    wrong = not error <= TOLERANCE[dtype]
    for text, size in sizes.items():
        arguments = made(case, size // np.dtype(dtype).itemsize, dtype, random)
        times = measured(gpu, name, case, arguments, seconds)
        yield {"kernel": name, "dtype": dtype, "size": text, "error": error, "wrong": wrong} | times


def made(case, elements: int, dtype: str, random) -> tuple:
    """Arguments of a kernel with at least so many elements in its first array, as wide as the case says or narrower."""
    columns = min(max(1, elements), case.columns)
    return case.make(-(-max(1, elements) // columns), columns, dtype, random)


def compared(gpu, case, arguments) -> float:
    """The largest difference between what the kernel makes of the arguments on the GPU and what numpy does."""
    there = placed(gpu, arguments)
    found = [case.kernel(*there), *(gpu.host(each) for each in there if gpu.holds(each))]
    wanted = [case.reference(*arguments), *(each for each in arguments if isinstance(each, np.ndarray))]
    return max(difference(a, b) for a, b in zip(found, wanted, strict=True))


def difference(found, wanted) -> float:
    """The largest difference of two results, relative to the largest element where that is above 1.

    Infinite where one is not a finite number and the other is another, or where the shapes differ.
    """
    if wanted is None:
        return 0.0 if found is None else math.inf
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    finite = np.isfinite(wanted)
    if found.shape != wanted.shape or not np.array_equal(found[~finite], wanted[~finite], equal_nan=True):
        return math.inf
    found, wanted = found[finite], wanted[finite]
    if not np.isfinite(found).all():
        return math.inf
    return float(np.abs(found - wanted).max(initial=0.0) / max(1.0, np.abs(wanted).max(initial=0.0)))


def placed(gpu, arguments) -> list:
    """The arguments with their arrays on the GPU."""
    return [gpu.array(each) if isinstance(each, np.ndarray) else each for each in arguments]


def measured(gpu, name: str, case, arguments, seconds: float) -> dict:
    """Microseconds of the kernel, of the copy and of the rival, in turns; and the bytes that the kernel moves."""
    there = placed(gpu, arguments)
    moved = case.traffic(*arguments)
    source, target = gpu.zeros(max(1, moved // 2), np.uint8), gpu.zeros(max(1, moved // 2), np.uint8)
    calls = {
        "kernel": lambda: case.kernel(*there),
        "copy": lambda: target.data.copy_from_device_async(source.data, source.nbytes),
    }
    rival, whose = beside(gpu.xp, name, there)
    if rival is not None:
        calls["rival"] = rival
    for call in calls.values():  # compile, and touch the memory
        call()
    slowest = max(microseconds(gpu.xp, call, 3) for call in calls.values())
    row = int(min(20, max(1, 2000 / max(1.0, slowest))))  # calls in a row, so that launching one hides behind another
    turns = int(min(200, max(5, 1e6 * seconds / (len(calls) * row * max(1.0, slowest)))))
    taken = {each: [] for each in calls}
    for _ in range(turns):
        for each, call in calls.items():
            taken[each].append(microseconds(gpu.xp, call, row))
    return {"bytes": moved, "rival": whose, "microseconds": taken}


def microseconds(cupy, call, times: int) -> float:
    """The GPU's time for a call, out of so many in a row."""
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return 1000 * cupy.cuda.get_elapsed_time(begin, end) / times


def beside(cupy, name: str, arguments) -> tuple:
    """A call that does the same in PyTorch (updates) or CuPy (reductions), and whose it is; or None, None."""
    if name in UPDATES:
        return fused(name, arguments[0].size, str(arguments[0].dtype))
    into, *rest = arguments
    reductions = {
        "add_into": lambda: cupy.add(into, rest[0], out=into),
        "max_into": lambda: cupy.maximum(into, rest[0], out=into),
        "min_into": lambda: cupy.minimum(into, rest[0], out=into),
        "scale": lambda: cupy.multiply(into, rest[0], out=into),
        "sum_of_squares": lambda: float(cupy.dot(into, into)),
    }
    return (reductions[name], "CuPy") if name in reductions else (None, None)


UPDATES = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {}),
}


def fused(name: str, size: int, dtype: str) -> tuple:
    """PyTorch's fused update of a vector on the GPU, where there is one."""
    try:
        import torch
    except ImportError:
        return None, None
    if not torch.cuda.is_available():
        return None, None
    w = torch.zeros(size, dtype=getattr(torch, dtype), device="cuda")
    w.grad = torch.randn_like(w)
    kind, settings = UPDATES[name]
    optimizer = getattr(torch.optim, kind)([w], lr=1e-3, weight_decay=0.01, fused=True, **settings)
    return optimizer.step, f"PyTorch {torch.__version__}"


def trained(gpu, model: str, dtype: str, steps: int) -> dict:
    """The loss curves of the same training on the GPU and on the CPU, and the examples per second of both."""
    result, losses = {}, {"cpu": [], "cuda": []}

    def keep(run, loss, total):
        losses[run.device.name].append(loss / total)

    for device in (CPU, gpu):
        options = Options(model=model, dtype=dtype, steps=steps, batch_size=64, progress="none", seed=1)
        comm = Communicator(MPI.COMM_SELF, device=device)
        data = open_data(options.data, comm=MPI.COMM_SELF, dtype=dtype, seed=1)
        made = make_model(model, data.features, data.classes, dtype, device)
        with quiet(True), Run(comm, options) as run:
            run.observe(keep)
            sequential.train(comm, made, data, run.make_optimizer(made, data), run)
        result[device.name] = {"losses": losses[device.name], "examples_per_second": run.rate} | run.scores
        data.close()
        comm.free()
    error = difference(result["cuda"]["losses"], result["cpu"]["losses"])
    return result | {"error": error, "wrong": not error <= CURVE[dtype]}


def report(options: GPUCheckOptions, gpu, rows: list[dict], curves: dict) -> None:
    """Print the table of the kernels and that of the training; write the JSON file."""
    about = environment() | {"gpu": str(gpu), "cupy": gpu.xp.__version__}
    print(f"{gpu}, CuPy {about['cupy']}, numpy {about['numpy']}, numba {about['numba']}, Python {about['python']}\n")
    print_table([kernel_cells(row) for row in rows])
    print("\nof the copy, beside: their time divided by the kernel's, in the same turn; above 1 the kernel is faster\n")
    print_table(
        [
            {
                f"training {options.model}, digits, batches of 64": f"{dtype}, {name}",
                "largest difference of losses": "WRONG" if curve["wrong"] else f"{curve['error']:.1e}",
                "last loss": f"{curve[name]['losses'][-1]:.6f}",
                "examples/s": f"{curve[name]['examples_per_second']:,.0f}",
            }
            for dtype, curve in curves.items()
            for name in ("cpu", "cuda")
        ]
    )
    versions = {name: about[name] for name in ("gpu", "cupy")}
    write_json("gpu-check", options, records(rows, curves), versions, time=time.strftime("%Y-%m-%d %H:%M:%S"))


def kernel_cells(row: dict) -> dict[str, str]:
    """A line of the table of kernels."""
    taken, rival = row["microseconds"], row["rival"]
    ours = float(np.median(taken["kernel"]))
    return {
        **{"kernel": row["kernel"], "type": row["dtype"], "size": row["size"]},
        "largest error": "WRONG" if row["wrong"] else f"{row['error']:.1e}",
        "us": f"{ours:,.1f}",
        "GB/s": f"{row['bytes'] / ours / 1000:,.0f}",
        "of the copy": f"{np.median(np.divide(taken['copy'], taken['kernel'])):.2f}",
        "beside": f"{np.median(np.divide(taken['rival'], taken['kernel'])):.2f} of {rival}" if rival else "",
    }


def records(rows: list[dict], curves: dict) -> list[dict]:
    """The rows of the file: one for each kernel, type and size; then one for each training and device."""
    found = []
    for row in rows:
        about = {key: row[key] for key in ("kernel", "dtype", "error", "wrong", "rival")}
        about |= {"what": "kernel", "size_bytes": bytes_of(row["size"]), "moved_bytes": row["bytes"]}
        for name, taken in row["microseconds"].items():
            about |= quartiles(f"{name}_microseconds", taken)
        found.append(about)
    for dtype, curve in curves.items():
        for device in ("cpu", "cuda"):
            run = {"loss_of_steps" if key == "losses" else key: value for key, value in curve[device].items()}
            found.append({"what": "training", "dtype": dtype, "device": device, "error": curve["error"]} | run)
            found[-1]["wrong"] = curve["wrong"]
    return found


if __name__ == "__main__":
    sys.exit(main())
