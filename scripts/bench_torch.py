"""PyTorch over hpcdl's backend beside gloo: mpiexec -n 2 python scripts/bench_torch.py --json torch.json

Two tables. Microseconds of `torch.distributed.all_reduce` (float32, one tensor, blocking) by size. Milliseconds of a
training step of three models of PyTorch's: an MLP, a small ResNet and a GPT, each rank with a batch of its own of
random rows, under DistributedDataParallel over both, by door 1 (`TorchModel` with `Communicator.all_reduce`, as
train-allreduce has it), and of the forward and backward pass and the update alone (`alone`), without any exchange.

All are in the same processes and take turns, in an order drawn by lot; a turn's time is that of the slowest rank.
Printed are medians with their quartiles, and what each turn takes relative to hpcdl's in the same turn. Needs the extra
`torch`.
"""

import gc
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.launch.benchmark_table import (
    Contender,
    benchmark,
    bytes_of,
    print_table,
    quartile_text,
    quartiles,
    race,
    write_json,
)
from hpcdl.runs.folder import environment
from hpcdl.runs.options import option

MODELS = {"mlp": ((784,), 10), "resnet": ((3, 32, 32), 10), "gpt": ((64,), 65)}  # shape of a row, classes


@dataclass
class TorchBenchOptions:
    """What is measured, and how often."""

    sizes: str = option("1KiB,16KiB,256KiB,1MiB,4MiB,16MiB,64MiB", "bytes of the tensor (float32); none: leave it out")
    models: str = option("mlp,resnet,gpt", "names, with commas between; none: leave it out")
    batch_per_rank: int = option(64, "rows of a step on each rank (the ResNet and the GPT: a quarter)")
    seconds: float = option(2.0, "seconds to spend on each size and model, at least 5 turns")
    json: str = option("", "file for the result")

    def __post_init__(self):
        for name in self.chosen_models:
            if name not in MODELS:
                raise UsageError(f"--models: there is no {name}; known: {', '.join(MODELS)}")
        for text in self.chosen_sizes:
            bytes_of(text)
        if self.seconds <= 0 or self.batch_per_rank < 1:
            raise UsageError("--seconds and --batch-per-rank must be greater than 0")

    @property
    def chosen_models(self) -> list[str]:
        return [name for name in self.models.split(",") if name not in ("", "none")]

    @property
    def chosen_sizes(self) -> list[str]:
        return [text for text in self.sizes.split(",") if text not in ("", "none")]


def main(arguments=None):
    with benchmark("bench-torch", TorchBenchOptions, __doc__, arguments, find_torch) as (world, options, torch):
        groups, tables = open_groups(torch), {}
        for text in options.chosen_sizes:
            size = bytes_of(text)
            calls = max(1, min(20, (64 << 10) // max(1, size)))
            found = all_reduces(torch, groups, size)
            tables["all_reduce", text] = race(world, found, options.seconds / len(found), size, calls)
        for name in options.chosen_models:
            rows = options.batch_per_rank if name == "mlp" else max(1, options.batch_per_rank // 4)
            found = steps(torch, groups, name, rows)
            tables["step", name] = race(world, found, options.seconds / len(found), rows)
        gc.collect()  # gloo stands still now and then where a model outlives its group
        torch.distributed.destroy_process_group()
        if world.rank == 0:
            report(options, torch, world.size, tables)


def find_torch(*_):
    """PyTorch, with our backend known to it. Raises UsageError where it is not installed."""
    import importlib

    importlib.import_module("hpcdl.torch")
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    return torch


def open_groups(torch) -> dict:
    """Groups of all ranks by backend; the first is the default."""
    distributed = torch.distributed
    distributed.init_process_group("hpcdl")
    gloo = distributed.new_group(backend="gloo", timeout=timedelta(minutes=10))
    return {"hpcdl": distributed.group.WORLD, "gloo": gloo}


def all_reduces(torch, groups: dict, size: int) -> dict[str, Contender]:
    """Calls that reduce a tensor of so many bytes."""

    def one(group) -> Contender:
        tensor = torch.ones(max(1, size // 4))
        return Contender(lambda: torch.distributed.all_reduce(tensor, group=group), lambda: tensor.fill_(1))

    return {name: one(group) for name, group in groups.items()}


def network(torch, name: str):
    """The model of that name, the same on all ranks."""
    nn = torch.nn
    torch.manual_seed(1)
    if name == "mlp":
        return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    if name == "resnet":
        return resnet(torch)
    return gpt(torch)


def resnet(torch):
    """Two stages of residual blocks of two convolutions, 16 and 32 channels."""
    nn = torch.nn

    class Residual(nn.Module):
        def __init__(self, channels, made, stride):
            super().__init__()
            self.first, self.norm = nn.Conv2d(channels, made, 3, stride, 1, bias=False), nn.GroupNorm(4, made)
            self.second, self.again = nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.GroupNorm(4, made)
            self.skip = nn.Identity() if channels == made else nn.Conv2d(channels, made, 1, stride, bias=False)

        def forward(self, x):
            y = self.again(self.second(torch.relu(self.norm(self.first(x)))))
            return torch.relu(y + self.skip(x))

    blocks = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 32, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.ReLU(), *blocks, *head)


def gpt(torch):
    """Two layers, 64 wide, of PyTorch's own transformer, that predict what follows the last of 64 tokens."""
    nn = torch.nn

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(65, 64), nn.Embedding(64, 64)
            layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(64, 65)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64), persistent=False)

        def forward(self, x):
            y = self.tokens(x.long()) + self.places.weight
            return self.head(self.layers(y, self.mask, is_causal=True)[:, -1])

    return Gpt()


def steps(torch, groups: dict, name: str, rows: int) -> dict[str, Contender]:
    """Training steps of the model in each way."""
    shape, classes = MODELS[name]
    random = np.random.default_rng(MPI.COMM_WORLD.rank)
    values = random.integers(0, 65, (rows, *shape)) if name == "gpt" else random.standard_normal((rows, *shape))
    x, y = values.astype(np.float32), random.integers(0, classes, rows)

    def by_torch(group) -> Contender:
        model = network(torch, name)
        if group is not None:
            model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        inputs, targets = torch.from_numpy(x), torch.from_numpy(y)

        def step() -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

        return Contender(step)

    found = {f"DDP over {backend}": by_torch(group) for backend, group in groups.items()}
    return found | {"door 1": by_us(torch, name, x, y), "alone": by_torch(None)}


def by_us(torch, name: str, x: np.ndarray, y: np.ndarray) -> Contender:
    """The same step by hpcdl: a TorchModel, an all-reduce of its gradient, an update of ours."""
    from hpcdl.data import Batch
    from hpcdl.optim import make_optimizer
    from hpcdl.torch import TorchModel

    shape, classes = MODELS[name]
    model = TorchModel(network(torch, name), features=shape, classes=classes)
    comm = Communicator(MPI.COMM_WORLD)
    parameters, gradient = comm.empty(model.size), comm.empty(model.size)
    parameters[:] = model.initialize(lambda *_: np.random.default_rng(0))
    optimizer = make_optimizer("momentum", model.size, model.dtype, lambda step: 0.01)
    batch = Batch(x, y, len(y) * comm.size, 0, 0, np.arange(len(y)))

    def step() -> None:
        gradient[:] = 0
        model.loss_and_gradient(parameters, batch, gradient)
        comm.all_reduce(gradient)
        optimizer.update(parameters, gradient, scale=1 / batch.total)

    return Contender(step)


def report(options: TorchBenchOptions, torch, ranks: int, tables: dict) -> None:
    """Print each table: medians, and the ratios to hpcdl's in the same turn."""
    about = environment()
    print(f"PyTorch {torch.__version__} on {counted(ranks, 'rank')}, one thread each")
    print(f"{about['mpi']}, numpy {about['numpy']}, {about['machine']}")
    print("microseconds, median; below hpcdl's own, time divided by hpcdl's in the same turn: median (quartiles)")
    for kind in dict.fromkeys(kind for kind, _ in tables):
        chosen = {what: taken for (each, what), taken in tables.items() if each == kind}
        first, *others = next(iter(chosen.values()))
        print()
        print_table(
            [
                {kind: what, first: f"{np.median(taken[first]):,.0f}"}
                | {
                    name: f"{np.median(taken[name]):,.0f}, {quartile_text(np.divide(taken[name], taken[first]))}"
                    for name in others
                }
                for what, taken in chosen.items()
            ]
        )
    rows = [
        {"ranks": ranks, "kind": kind, "what": what, "way": name, **quartiles("microseconds", times)}
        for (kind, what), taken in tables.items()
        for name, times in taken.items()
    ]
    write_json("bench-torch", options, rows, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
