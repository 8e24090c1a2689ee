"""Examples per second of a training beside PyTorch DDP: python scripts/bench_training.py --data fashion.h5 --ranks 2

Runs the same model, batch, optimizer and number of epochs with hpcdl (mpiexec) and with PyTorch's
DistributedDataParallel over gloo, in turn, `--repeats` times each, one thread per rank, and prints medians, spread
and the ratio of each pair. Both hold the data in memory and time their training loops only: no start-up, no
evaluation. PyTorch's data is a tensor that each rank indexes by its share of the epoch's permutation, which is
faster than a DataLoader. Needs the extra `torch`.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hpcdl.comm.launcher import clean_environment, mpiexec
from hpcdl.data import open_data
from hpcdl.errors import UsageError, line
from hpcdl.formatting import counted
from hpcdl.launch.option_parser import parse
from hpcdl.models import parse_model
from hpcdl.runs.options import option


@dataclass
class TrainingBenchOptions:
    """What is compared, and how often."""

    data: str = option("digits", "data set: digits, or an HDF5 file made by prepare-data")
    model: str = option("mlp:256,128", "mlp:WIDTHS, relu, or gpt with any settings (and --data text)")
    ranks: int = option(2, "ranks of each program")
    batch_per_rank: int = option(64, "examples per update and rank")
    lr: float = option(0.02, "learning rate")
    epochs: int = option(3, "passes over the training rows in each run")
    steps: int = option(0, "updates in each run, instead of --epochs")
    repeats: int = option(5, "runs of each program")
    json: str = option("", "file for the result")
    worker: int = option(-1, "(used by the program itself: the rank of a PyTorch process)")
    port: int = option(0, "(used by the program itself)")


def ours(options: TrainingBenchOptions, folder: Path) -> dict:
    """One run of hpcdl."""
    out = folder / f"run-{time.monotonic_ns()}"
    command = [mpiexec(), "-n", str(options.ranks), sys.executable, Path(__file__).with_name("train_allreduce.py")]
    command += ["--data", options.data, "--model", options.model, "--batch-per-rank", str(options.batch_per_rank)]
    command += ["--optimizer", "momentum", "--lr", str(options.lr)]
    command += ["--steps", str(options.steps)] if options.steps else ["--epochs", str(options.epochs)]
    command += ["--schedule", "constant"]
    command += ["--out", out, "--evaluate-every", str(options.epochs), "--progress", "none"]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=clean_environment() | threads, stdout=subprocess.DEVNULL)
    summary = json.loads((out / "summary.json").read_text())
    return {"examples_per_second": summary["examples_per_second"], "test_accuracy": summary["test_accuracy"]}


def theirs(options: TrainingBenchOptions, folder: Path) -> dict:
    """One run of PyTorch DDP over gloo: one process per rank, this program with --worker."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = asdict(options)
    del given["epochs" if options.steps else "steps"]
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
    """One rank of PyTorch DDP; rank 0 prints its result. Does not return."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    rank, ranks, batch = options.worker, options.ranks, options.batch_per_rank
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{options.port}", rank=rank, world_size=ranks)
    data = open_data(options.data)
    (x, y), (x_test, y_test) = (map(torch.from_numpy, part.rows(0, part.examples)) for part in (data.train, data.test))
    torch.manual_seed(0)
    model, loss_of = network(torch, options.model, data)
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
            loss_of(replica, x[rows], y[rows]).backward()
            optimizer.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        right = [loss_of.right(model, x_test[i : i + 64], y_test[i : i + 64]) for i in range(0, len(x_test), 64)]
    accuracy = sum(right) / len(x_test)
    if rank == 0:
        examples = left * batch * ranks
        print(json.dumps({"examples_per_second": examples / seconds, "test_accuracy": accuracy}))
    dist.barrier()  # nobody leaves while another still needs its connections
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an orderly exit ("terminate called ..."), seen in one of six runs


class OfClasses:
    """The loss of a classifier of rows."""

    def __init__(self, torch):
        self.loss = torch.nn.CrossEntropyLoss()

    def __call__(self, model, x, y):
        return self.loss(model(x), y)

    def right(self, model, x, y) -> float:
        """Rows that are classified right."""
        return (model(x).argmax(1) == y).float().sum().item()


class OfTokens(OfClasses):
    """The loss of a language model, of each token from those before it."""

    def __call__(self, model, x, y):
        return self.loss(model(x.long()).flatten(0, 1), self.targets(x, y).flatten())

    def right(self, model, x, y) -> float:
        """Tokens that are predicted right, by the length of a row."""
        return (model(x.long()).argmax(2) == self.targets(x, y)).float().mean(1).sum().item()

    def targets(self, x, y):
        """The token after each."""
        targets = x.long().roll(-1, 1)
        targets[:, -1] = y
        return targets


def network(torch, spec: str, data):
    """PyTorch's model of this name for these data, and its loss."""
    name, widths, settings = parse_model(spec)
    if name == "gpt":
        return gpt(torch, data.features[0], data.classes, **settings), OfTokens(torch)
    widths, layers = [math.prod(data.features), *widths, data.classes], []
    for index in range(len(widths) - 1):
        layers += [torch.nn.Linear(widths[index], widths[index + 1]), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]), OfClasses(torch)


def gpt(torch, length, vocabulary, layers, width, heads, context, head):
    """The same transformer as hpcdl.models.gpt, of PyTorch's own modules, with its fused attention."""
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
    try:
        options = parse(TrainingBenchOptions, "bench-training", __doc__, arguments)
        if options.worker >= 0:
            work(options)
        open_data(options.data).close()
        compare(options)
    except UsageError as error:
        print(f"bench-training: error: {line(error)}", file=sys.stderr)
        sys.exit(2)


def compare(options: TrainingBenchOptions) -> None:
    """Run both in turn and print the table."""
    try:
        import torch
    except ImportError:
        raise UsageError("PyTorch is not installed; pip install 'hpcdl[torch]'") from None
    from hpcdl.launch.benchmark_table import check_files, print_table, write_json
    from hpcdl.runs.folder import environment

    check_files(options, 0)
    results = {"hpcdl": [], "torch": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.repeats):
            results["hpcdl"].append(ours(options, Path(folder)))
            results["torch"].append(theirs(options, Path(folder)))
    speeds = {name: [run["examples_per_second"] for run in runs] for name, runs in results.items()}
    ratios = [mine / other for mine, other in zip(speeds["hpcdl"], speeds["torch"], strict=True)]
    about = environment() | {"torch": torch.__version__}
    print(
        f"{options.model} on {options.data}, {counted(options.ranks, 'rank')}, "
        f"{options.batch_per_rank} examples each, momentum"
    )
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
    rows = [
        {"ranks": options.ranks, "repeat": repeat, "examples_per_second_ratio": ratio}
        | {f"{name}_{key}": value for name, runs in results.items() for key, value in runs[repeat].items()}
        for repeat, ratio in enumerate(ratios)
    ]
    write_json("bench-training", options, rows, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
