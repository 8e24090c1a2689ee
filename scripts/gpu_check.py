"""Check and time this machine's GPU: hpcdl gpu-check --json gpu.json

Every kernel's CUDA twin is compared with numpy, at sizes that fill no block and at sizes that fill many, then timed at
each of --sizes beside a copy within the GPU that moves the same bytes; the updates beside PyTorch's fused ones (where
PyTorch with CUDA is installed), the reductions beside CuPy. What is compared takes turns; a time is that of calls in a
row between two CUDA events, divided by their number; medians. Then the same training runs on the GPU and on the CPU.
Exit status: 1 if a kernel or the training is wrong; 2, with one line, if there is no GPU."""

import math
import time
from dataclasses import dataclass

import numpy as np

from hpcdl.data import open_data
from hpcdl.kernels.cases import CASES
from hpcdl.kernels.device import CPU, open_device
from hpcdl.launch import benchmark_table as bench
from hpcdl.launch.program import quiet
from hpcdl.models import make_model
from hpcdl.runs.options import option
from hpcdl.strategies import sequential

TYPES = ("float32", "float64")
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
CURVE = {"float32": 1e-3, "float64": 1e-8}  # largest difference of the loss curves, which add in other orders


@dataclass
class GPUCheckOptions:
    """Options of gpu-check: what is compared and timed, and for how long."""

    elements: str = option("1,77,5000,1000003", "elements of a kernel's first array, at least, when it is compared")
    sizes: str = option("1MiB,16MiB,256MiB", "bytes of a kernel's first array in the timings, with commas between")
    seconds: float = option(0.2, "seconds to spend on each kernel, type and size, at least 5 turns")
    steps: int = option(200, "updates of the training that is compared")
    model: str = option("mlp:256,128", "model of the training, on the digits")
    kernels: str = option("", "names of the kernels to look at, with commas between; default: all")
    json: str = option("", "file for the result")


def prepare(options: GPUCheckOptions, _: int) -> tuple:
    sizes = {text: bench.bytes_of(text) for text in options.sizes.split(",")}
    kernels = bench.chosen("kernel", options.kernels, CASES) or [*CASES]
    cases = {name: case for name, case in CASES.items() if name in kernels}
    return sizes, bench.whole_numbers("elements", options.elements), cases, open_device("cuda")


def run(world, options: GPUCheckOptions, prepared: tuple) -> None:
    sizes, elements, cases, gpu = prepared
    each = [(name, case, dtype) for name, case in cases.items() for dtype in case.dtypes]
    rows = [row for what in each for row in checked(gpu, *what, elements, sizes, options.seconds)]
    curves = {dtype: trained(gpu, options.model, dtype, options.steps) for dtype in TYPES}
    report(options, gpu, rows, curves)
    wrong = [f"{row['kernel']} ({row['dtype']})" for row in rows if row["wrong"]]
    wrong += [f"training in {dtype}" for dtype, curve in curves.items() if curve["wrong"]]
    if wrong:
        print(f"\nWRONG: {', '.join(dict.fromkeys(wrong))}")
        raise SystemExit(1)


def checked(gpu, name: str, case, dtype: str, elements: list[int], sizes: dict[str, int], seconds: float):
    """Yield a row of times for each size, of one kernel and type, with its largest error at the sizes in `elements`."""
    random = np.random.default_rng(1)
    error = max(compared(gpu, case, made(case, count, dtype, random)) for count in elements)
    wrong = not error <= TOLERANCE[dtype]
    for text, size in sizes.items():
        arguments = made(case, size // np.dtype(dtype).itemsize, dtype, random)
        times = measured(gpu, name, case, arguments, seconds)
        yield {"kernel": name, "dtype": dtype, "size": text, "error": error, "wrong": wrong} | times


def made(case, elements: int, dtype: str, random) -> tuple:
    """Return arguments of a kernel: the first array has `elements` elements or more, at most case.columns columns."""
    columns = min(max(1, elements), case.columns)
    return case.make(-(-max(1, elements) // columns), columns, dtype, random)


def compared(gpu, case, arguments) -> float:
    """Return the largest difference between the kernel's results on the GPU and numpy's."""
    there = placed(gpu, arguments)
    found = [case.kernel(*there), *(gpu.host(each) for each in there if gpu.holds(each))]
    wanted = [case.reference(*arguments), *(each for each in arguments if isinstance(each, np.ndarray))]
    return max(difference(a, b) for a, b in zip(found, wanted, strict=True))


def difference(found, wanted) -> float:
    """Return the largest difference, divided by the largest element if above 1; infinite if shapes or NaNs differ."""
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
    return [gpu.array(each) if isinstance(each, np.ndarray) else each for each in arguments]


def measured(gpu, name: str, case, arguments, seconds: float) -> dict:
    """Return microseconds of the kernel, a copy and a rival (`beside`), in turns, and the bytes the kernel moves."""
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
    ways = {each: lambda turn, call=call: microseconds(gpu.xp, call, row) for each, call in calls.items()}
    return {"bytes": moved, "rival": whose, "microseconds": bench.in_turns(turns, ways)}


def microseconds(cupy, call, times: int) -> float:
    """Return the GPU's microseconds for a call, the mean of `times` calls in a row."""
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return 1000 * cupy.cuda.get_elapsed_time(begin, end) / times


def beside(cupy, name: str, arguments) -> tuple:
    """Return a call that does the same in PyTorch (updates) or CuPy (reductions), and the library; or None, None."""
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
    """Return PyTorch's fused update of a vector on the GPU, and PyTorch's name; None, None without PyTorch for CUDA."""
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
    """Return the loss curves of the same training on GPU and CPU, and the examples per second of both."""
    from mpi4py import MPI

    from hpcdl.comm import Communicator
    from hpcdl.runs import Options, Run

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
    from hpcdl.runs.folder import environment

    about = environment() | {"gpu": str(gpu), "cupy": gpu.xp.__version__}
    print(f"{gpu}, CuPy {about['cupy']}, numpy {about['numpy']}, numba {about['numba']}, Python {about['python']}\n")
    bench.print_table([kernel_cells(row) for row in rows])
    print("\nof the copy, beside: time divided by the kernel's time in the same turn; above 1 the kernel is faster\n")
    bench.print_table(
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
    bench.write_json("gpu-check", options, records(rows, curves), versions, time=time.strftime("%Y-%m-%d %H:%M:%S"))


def kernel_cells(row: dict) -> dict[str, str]:
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
    """Return the rows of the file of --json: one per kernel, type and size; then one per training and device."""
    found = []
    for row in rows:
        about = {key: row[key] for key in ("kernel", "dtype", "error", "wrong", "rival")}
        about |= {"what": "kernel", "size_bytes": bench.bytes_of(row["size"]), "moved_bytes": row["bytes"]}
        for name, taken in row["microseconds"].items():
            about |= bench.quartiles(f"{name}_microseconds", taken)
        found.append(about)
    for dtype, curve in curves.items():
        for device in ("cpu", "cuda"):
            run = {"loss_of_steps" if key == "losses" else key: value for key, value in curve[device].items()}
            found.append({"what": "training", "dtype": dtype, "device": device, "error": curve["error"]} | run)
            found[-1]["wrong"] = curve["wrong"]
    return found


main = bench.benchmark("gpu-check", GPUCheckOptions, __doc__, run, prepare, one_rank=True)


if __name__ == "__main__":
    main()
