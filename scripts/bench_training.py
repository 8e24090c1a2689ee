"""Examples per second of a training beside PyTorch DDP: hpcdl bench-training --data fashion.h5 --ranks 2

Runs the same model, batch, optimizer and number of epochs with hpcdl (mpiexec) and with PyTorch's
DistributedDataParallel over gloo, in turn, `--repeats` times each, one thread per rank, and prints medians, spread and
the ratio of each pair. `--batch-per-rank 64,512` does so for each of these sizes. Each turn also times the model's
matrix products by themselves, on one core; the last line says which part of their speed hpcdl's steps reach. Both
programs hold the data in memory and time their training loops only: no start-up, no evaluation. PyTorch's data is a
tensor that each rank indexes by its share of the epoch's permutation, which is faster than a DataLoader. Needs the
extra `torch`."""

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from hpcdl.data import open_data
from hpcdl.formatting import counted
from hpcdl.launch.one_process import one_process
from hpcdl.launch.option_parser import parse
from hpcdl.machine.launcher import clean_environment, mpiexec
from hpcdl.models import parse_model
from hpcdl.runs.options import option


@dataclass
class TrainingBenchOptions:
    """Options of bench-training: the training, and how often it is run."""

    data: str = option("digits", "data set: digits, or an HDF5 file made by prepare-data")
    model: str = option("mlp:256,128", "mlp:WIDTHS, relu, or gpt with any settings (and --data text)")
    ranks: int = option(2, "ranks of each program")
    batch_per_rank: str = option("64", "examples per update and rank; with several sizes, as 64,512, a table for each")
    lr: float = option(0.02, "learning rate")
    epochs: int = option(3, "passes over the training rows in each run")
    steps: int = option(0, "updates in each run, instead of --epochs")
    repeats: int = option(5, "runs of each program")
    json: str = option("", "file for the result")
    worker: int = option(-1, "(used by the program itself: the rank of a PyTorch process)")
    port: int = option(0, "(used by the program itself)")


def ours(options: TrainingBenchOptions, folder: Path) -> dict:
    """Run hpcdl once; return its examples per second and test accuracy."""
    out = folder / f"run-{time.monotonic_ns()}"
    command = [mpiexec(), "-n", str(options.ranks), sys.executable, Path(__file__).with_name("train_allreduce.py")]
    command += ["--data", options.data, "--model", options.model, "--batch-per-rank", options.batch_per_rank]
    command += ["--optimizer", "momentum", "--lr", str(options.lr), "--schedule", "constant", "--out", out]
    command += ["--steps", str(options.steps)] if options.steps else ["--epochs", str(options.epochs)]
    command += ["--evaluate-every", str(options.epochs), "--progress", "none"]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=clean_environment() | threads, stdout=subprocess.DEVNULL)
    summary = json.loads((out / "summary.json").read_text())
    return {"examples_per_second": summary["examples_per_second"], "test_accuracy": summary["test_accuracy"]}


def products(options: TrainingBenchOptions) -> tuple[float, float]:
    """Return the GFLOP of the products of a rank's step, and their GFLOP/s by themselves on one core."""
    from hpcdl.reports import roofline

    *_, counted = roofline.prepare(options.model, options.data, int(options.batch_per_rank))
    return 1e-9 * roofline.product_flops(counted), roofline.product_gflops(counted)


def theirs(options: TrainingBenchOptions, folder: Path) -> dict:
    """Run PyTorch DDP over gloo once, each rank a process of this program with --worker; return the same as `ours`."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = asdict(options)
    for unused in ("json", "epochs" if options.steps else "steps"):
        del given[unused]
    settings = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    environment = clean_environment() | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    workers = []
    for rank in range(options.ranks):
        command = [sys.executable, __file__, *settings, "--worker", str(rank), "--port", str(port)]
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit("bench_training: PyTorch's part failed")
    return json.loads(outputs[0].splitlines()[-1])


def work(options: TrainingBenchOptions) -> None:
    """Run one rank of PyTorch DDP; rank 0 prints its result. Does not return."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    rank, ranks, batch = options.worker, options.ranks, int(options.batch_per_rank)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{options.port}", rank=rank, world_size=ranks)
    data = open_data(options.data)
    (x, y), (x_test, y_test) = (map(torch.from_numpy, part.rows(0, part.examples)) for part in (data.train, data.test))
    torch.manual_seed(0)
    model, pairs = network(torch, options.model, data)
    replica = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    steps, start = len(x) // (batch * ranks), time.perf_counter()
    left = options.steps or options.epochs * steps
    for epoch in range(-(-left // steps)):
        order = torch.from_numpy(np.random.default_rng(epoch).permutation(len(x)))
        for step in range(min(steps, left - epoch * steps)):
            first = (step * ranks + rank) * batch
            rows = order[first : first + batch]
            optimizer.zero_grad()
            inputs, targets = pairs(x[rows], y[rows])
            torch.nn.functional.cross_entropy(replica(inputs).flatten(0, -2), targets.flatten()).backward()
            optimizer.step()
    seconds = time.perf_counter() - start
    right = 0.0  # rows predicted correctly; of a language model's row, the part of its tokens
    with torch.no_grad():
        for i in range(0, len(x_test), 64):
            inputs, targets = pairs(x_test[i : i + 64], y_test[i : i + 64])
            found = (model(inputs).argmax(-1) == targets).float()
            right += found.reshape(len(found), -1).mean(1).sum().item()
    accuracy = right / len(x_test)
    if rank == 0:
        examples = left * batch * ranks
        print(json.dumps({"examples_per_second": examples / seconds, "test_accuracy": accuracy}))
    dist.barrier()  # nobody leaves while another still needs its connections
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an orderly exit ("terminate called ..."), seen in one of six runs


def following(x, y):
    """Return tokens, and as targets the token after each, which a language model predicts. y: the last targets."""
    x = x.long()
    targets = x.roll(-1, 1)
    targets[:, -1] = y
    return x, targets


def network(torch, spec: str, data):
    """Return PyTorch's model of this name for these data, and a function that makes its inputs and targets."""
    name, widths, settings = parse_model(spec)
    if name == "gpt":
        return gpt(torch, data.features[0], data.classes, **settings), following
    sizes = itertools.pairwise([math.prod(data.features), *widths, data.classes])
    layers = [layer for size in sizes for layer in (torch.nn.Linear(*size), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers[:-1]), lambda x, y: (x, y)


def gpt(torch, length, vocabulary, layers, width, heads, context, head):
    """Return the transformer of hpcdl.models.gpt, made of PyTorch's modules, with its fused attention."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            shape = *x.shape[:2], heads, width // heads
            q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
            a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(a.transpose(1, 2).reshape(x.shape))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(layers))), nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
            for weight in (self.token.weight, self.position.weight, self.head.weight):
                nn.init.normal_(weight, std=0.02)
            if head == "tied":
                self.head.weight = self.token.weight

        def forward(self, x):
            return self.head(self.norm(self.blocks(self.token(x) + self.position.weight[:length])))

    return Transformer()


def main(arguments=None):
    with one_process("bench-training"):
        options = parse(TrainingBenchOptions, "bench-training", __doc__, arguments)
        if options.worker >= 0:
            work(options)
        open_data(options.data).close()
        compare(options)


def compare(options: TrainingBenchOptions) -> None:
    """Print the results of each batch size, and write all of them into the file of --json."""
    from hpcdl.launch.benchmark_table import check_files, find_torch, whole_numbers, write_json

    torch = find_torch()
    check_files(options, 0)
    rows = []
    for batch in whole_numbers("batch_per_rank", options.batch_per_rank):
        rows += compare_at(replace(options, batch_per_rank=str(batch)), torch.__version__)
    write_json("bench-training", options, rows, {"torch": torch.__version__})


def compare_at(options: TrainingBenchOptions, version: str) -> list[dict]:
    """Print the results of one batch size; return its records. version: of PyTorch."""
    from hpcdl.launch.benchmark_table import in_turns, print_table
    from hpcdl.runs.folder import environment

    batch = int(options.batch_per_rank)
    with tempfile.TemporaryDirectory() as folder:
        ways = {"hpcdl": lambda turn: ours(options, Path(folder)), "torch": lambda turn: theirs(options, Path(folder))}
        ways["products"] = lambda turn: products(options)
        results = in_turns(options.repeats, ways)
    peaks = results.pop("products")
    speeds = {name: [run["examples_per_second"] for run in runs] for name, runs in results.items()}
    ratios = [mine / other for mine, other in zip(speeds["hpcdl"], speeds["torch"], strict=True)]
    about = environment() | {"torch": version}
    print(f"{options.model} on {options.data}, {counted(options.ranks, 'rank')}, {batch} examples each, momentum")
    print(", ".join(f"{name} {about[name]}" for name in ("python", "numpy", "numba", "mpi", "torch", "machine")) + "\n")
    print_table(
        [
            {
                "program": label,
                "examples/s, median": f"{statistics.median(speeds[name]):,.0f}",
                "lowest to highest": f"{min(speeds[name]):,.0f} to {max(speeds[name]):,.0f}",
                "test accuracy, median": f"{statistics.median(run['test_accuracy'] for run in results[name]):.2%}",
            }
            for name, label in (("hpcdl", "hpcdl"), ("torch", "PyTorch DDP, gloo"))
        ]
    )
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}, {counted(len(ratios), 'pair')}"
    print(f"\nhpcdl / PyTorch: {statistics.median(ratios):.2f} ({spread})")
    steps = [speed / options.ranks / batch for speed in speeds["hpcdl"]]  # a second
    reached = [gflop * step / peak for (gflop, peak), step in zip(peaks, steps, strict=True)]
    print(
        f"matrix products: {statistics.median(peak for _, peak in peaks):,.0f} GFLOP/s on one core by themselves; "
        f"hpcdl's steps reach {statistics.median(reached):.0%} ({min(reached):.0%} to {max(reached):.0%})\n"
    )
    return [
        {
            "ranks": options.ranks,
            "batch_size": batch * options.ranks,
            "repeat": repeat,
            "examples_per_second_ratio": ratio,
        }
        | {"products_gflops": peaks[repeat][1], "hpcdl_part_of_products": reached[repeat]}
        | {f"{name}_{key}": value for name, runs in results.items() for key, value in runs[repeat].items()}
        for repeat, ratio in enumerate(ratios)
    ]


if __name__ == "__main__":
    main()
