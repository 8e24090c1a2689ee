"""PyTorch over hpcdl's backend beside gloo: mpiexec -n 2 hpcdl bench-torch --json torch.json

Two tables. The first has microseconds of `torch.distributed.all_reduce` (float32, one tensor, blocking) by size, and
of `Communicator.all_reduce` in the same memory. The second has microseconds of a training step of three PyTorch models,
an MLP, a small ResNet and a GPT, with a batch of random rows on each rank: under DistributedDataParallel over both
backends, and with a hook that exchanges nothing (`DDP alone`: what the reducer itself costs); by door 1 (`TorchModel`
with `Communicator.all_reduce`, as train-allreduce has it); and `alone`, without DDP and without any exchange.

All are in the same processes and take turns, in an order drawn by lot; a turn's time is that of the slowest rank.
Printed are medians, and quartiles of each time divided by that of hpcdl's backend in the same turn. Needs the extra
`torch`."""

import gc
import importlib
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from hpcdl.errors import unknown
from hpcdl.formatting import counted
from hpcdl.launch import benchmark_table as bench
from hpcdl.runs.options import option, positive

MODELS = {"mlp": ((784,), 10), "resnet": ((3, 32, 32), 10), "gpt": ((64,), 65)}  # shape of a row, classes


@dataclass
class TorchBenchOptions:
    """Options of bench-torch: what is measured, and how often."""

    sizes: str = option("1KiB,16KiB,256KiB,1MiB,4MiB,16MiB,64MiB", "bytes of the tensor (float32); none: no such table")
    models: str = option("mlp,resnet,gpt", "names, with commas between; none: no such table")
    batch_per_rank: int = option(64, "rows of a step on each rank (of the ResNet and the GPT: a quarter)")
    seconds: float = option(2.0, "seconds to spend on each size and model, at least 5 turns")
    json: str = option("", "file for the result")

    def __post_init__(self):
        if lost := [name for name in chosen(self.models) if name not in MODELS]:
            raise unknown("model", lost[0], MODELS)
        for text in chosen(self.sizes):
            bench.bytes_of(text)
        positive(self, "seconds", "batch_per_rank")


def chosen(texts: str) -> list[str]:
    return [text for text in texts.split(",") if text not in ("", "none")]


def run(world, options: TorchBenchOptions, torch) -> None:
    torch.distributed.init_process_group("hpcdl")
    gloo = torch.distributed.new_group(backend="gloo", timeout=timedelta(minutes=10))
    groups, tables = {"hpcdl": torch.distributed.group.WORLD, "gloo": gloo}, {}
    for text in chosen(options.sizes):
        size = bench.bytes_of(text)
        calls = max(1, min(20, (64 << 10) // max(1, size)))
        found = {name: all_reduce(torch, group, size) for name, group in groups.items()}
        found["communicator"] = by_communicator(torch, groups["hpcdl"].comm, size)
        tables["all_reduce", text] = bench.race(world, found, options.seconds / len(found), size, calls)
    for name in chosen(options.models):
        rows = options.batch_per_rank if name == "mlp" else max(1, options.batch_per_rank // 4)
        found = steps(torch, groups, world, name, rows)
        tables["step", name] = bench.race(world, found, options.seconds / len(found), rows)
    gc.collect()  # gloo may hang if a model outlives its group
    torch.distributed.destroy_process_group()
    if world.rank == 0:
        report(options, torch, world.size, tables)


def with_backend(*_):
    """Return PyTorch, with hpcdl's backend registered. Raises UsageError if PyTorch is not installed."""
    importlib.import_module("hpcdl.torch")
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    return torch


def all_reduce(torch, group, size: int) -> bench.Contender:
    """Return a contender that reduces a tensor of `size` bytes over the ranks of `group`."""
    tensor = torch.ones(max(1, size // 4))
    return bench.Contender(lambda: torch.distributed.all_reduce(tensor, group=group), lambda: tensor.fill_(1))


def by_communicator(torch, comm, size: int) -> bench.Contender:
    """Return a contender that reduces the memory of such a tensor by the communicator of the process group itself."""
    tensor = torch.ones(max(1, size // 4))
    vector = tensor.numpy()
    return bench.Contender(lambda: comm.all_reduce(vector), lambda: tensor.fill_(1))


def no_exchange(torch, bucket):
    """Return the bucket at once, as a hook of DDP that exchanges nothing."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def network(torch, name: str):
    nn = torch.nn
    torch.manual_seed(1)
    if name == "mlp":
        return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    return resnet(torch) if name == "resnet" else gpt(torch)


def resnet(torch):
    """Return a network of three residual blocks of two convolutions, with 16 and 32 channels."""
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
    """Return two layers, 64 wide, of PyTorch's transformer, which predict the token after the last of 64."""
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


def steps(torch, groups: dict, world, name: str, rows: int) -> dict[str, bench.Contender]:
    shape, classes = MODELS[name]
    random = np.random.default_rng(world.rank)
    values = random.integers(0, 65, (rows, *shape)) if name == "gpt" else random.standard_normal((rows, *shape))
    x, y = values.astype(np.float32), random.integers(0, classes, rows)

    def by_torch(group, exchange=True) -> bench.Contender:
        model = network(torch, name)
        if group is not None:
            model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        if not exchange:
            model.register_comm_hook(torch, no_exchange)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        inputs, targets = torch.from_numpy(x), torch.from_numpy(y)

        def step() -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

        return bench.Contender(step)

    found = {f"DDP over {backend}": by_torch(group) for backend, group in groups.items()}
    found["DDP alone"] = by_torch(groups["hpcdl"], exchange=False)
    return found | {"door 1": by_us(torch, world, name, x, y), "alone": by_torch(None)}


def by_us(torch, world, name: str, x: np.ndarray, y: np.ndarray) -> bench.Contender:
    """Return a contender, a training step by hpcdl: a TorchModel, an all-reduce of its gradient, an update."""
    from hpcdl.comm import Communicator
    from hpcdl.data import Batch
    from hpcdl.optim import make_optimizer
    from hpcdl.torch import TorchModel

    shape, classes = MODELS[name]
    model = TorchModel(network(torch, name), features=shape, classes=classes)
    comm = Communicator(world)
    parameters, gradient = comm.empty(model.size), comm.empty(model.size)
    parameters[:] = model.initialize(lambda *_: np.random.default_rng(0))
    optimizer = make_optimizer("momentum", model.size, model.dtype, lambda step: 0.01)
    batch = Batch(x, y, len(y) * comm.size, 0, 0, np.arange(len(y)))

    def step() -> None:
        gradient[:] = 0
        model.loss_and_gradient(parameters, batch, gradient)
        comm.all_reduce(gradient)
        optimizer.update(parameters, gradient, scale=1 / batch.total)

    return bench.Contender(step)


def report(options: TorchBenchOptions, torch, ranks: int, tables: dict) -> None:
    """Print each table: medians, and ratios to hpcdl's time in the same turn."""
    from hpcdl.runs.folder import environment

    about = environment()
    print(f"PyTorch {torch.__version__} on {counted(ranks, 'rank')}, one thread each")
    print(f"{about['mpi']}, numpy {about['numpy']}, {about['machine']}")
    print("microseconds, median; after the comma: time divided by hpcdl's in the same turn, median (quartiles)")
    for kind in dict.fromkeys(kind for kind, _ in tables):
        chosen = {what: taken for (each, what), taken in tables.items() if each == kind}
        first, *others = next(iter(chosen.values()))
        print()
        bench.print_table(
            [
                {kind: what, first: f"{np.median(taken[first]):,.0f}"}
                | {
                    name: f"{np.median(taken[name]):,.0f}, {bench.quartile_text(np.divide(taken[name], taken[first]))}"
                    for name in others
                }
                for what, taken in chosen.items()
            ]
        )
    rows = [
        {"ranks": ranks, "kind": kind, "what": what, "way": name, **bench.quartiles("microseconds", times)}
        for (kind, what), taken in tables.items()
        for name, times in taken.items()
    ]
    bench.write_json("bench-torch", options, rows, {"torch": torch.__version__})


main = bench.benchmark("bench-torch", TorchBenchOptions, __doc__, run, with_backend)


if __name__ == "__main__":
    main()
