"""Speed of the replay memory on one core: hpcdl bench-replay --json replay.json

Three operations on a memory that is full: add a batch of transitions, draw a batch by priority (with observations,
returns and weights), update the priorities of a drawn batch. They are measured on the sum tree alone, on the same tree
in plain NumPy (kernels/sum_tree.py), and on the whole memory, in turns. A speed is in millions of transitions a second:
the median of all turns, and their spread; a ratio divides two speeds of the same turn."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels.sum_tree import NumpySumTree, SumTree
from hpcdl.launch.benchmark_table import benchmark, quartiles, spread
from hpcdl.rl.replay import Replay
from hpcdl.runs.options import option, positive

OPERATIONS = ("add", "sample", "update")
EPISODE = 200  # steps
Calls = dict[str, Callable[[], object]]


@dataclass
class ReplayBenchOptions:
    """Options of bench-replay: the memory, and how often each operation is measured."""

    capacity: int = option(1_000_000, "transitions in the memory")
    batch_size: int = option(512, "transitions of a call")
    values: int = option(4, "float32 values of an observation")
    frame_stack: int = option(1, "frames of an observation; above 1, each has --values bytes")
    streams: int = option(8, "environments whose steps are added in turns")
    n_step: int = option(3, "steps of a return")
    operations: int = option(200_000, "transitions of a turn; a tenth of them in plain NumPy")
    turns: int = option(5, "how often each operation is measured; the operations take turns")
    seed: int = option(0, "seed of observations, priorities and draws")
    json: str = option("", "file for the results")

    def __post_init__(self):
        positive(self, "capacity", "batch_size", "values", "frame_stack", "streams", "n_step", "operations", "turns")
        if self.batch_size > self.capacity:
            raise UsageError(f"--batch-size {self.batch_size} should be --capacity {self.capacity} at most")


def run(world, options: ReplayBenchOptions, memory: Replay) -> tuple:
    random = np.random.default_rng(options.seed)
    tree, twin = SumTree(options.capacity), NumpySumTree(options.capacity)
    for each in (tree, twin):
        each.assign(np.arange(options.capacity), np.random.default_rng(options.seed).random(options.capacity))
    parts = {"sum tree": of_tree(tree, options, random), "NumPy": of_tree(twin, options, random)}
    parts["memory"] = of_memory(memory, options, random)
    turns = [measure(parts, options) for _ in range(1 + options.turns)]
    return tabulated(options, memory, turns[1:])  # the first turn warms up


def full(options: ReplayBenchOptions, _: int) -> Replay:
    """Return a replay memory, each slot of which has been written."""
    stack = options.frame_stack
    shape, dtype = ((stack, options.values), np.uint8) if stack > 1 else ((options.values,), np.float32)
    about = {"streams": options.streams, "stack": stack, "n_step": options.n_step, "prioritized": True}
    memory = Replay(options.capacity, shape, dtype, **about)
    add = of_memory(memory, options, np.random.default_rng(options.seed))["add"]
    while memory.written < options.capacity:
        add()
    return memory


def of_tree(tree: SumTree, options: ReplayBenchOptions, random: np.random.Generator) -> Calls:
    """Return the operations of a tree by name, each a function that handles one batch."""
    batch, at, drawn = options.batch_size, 0, tree.draw(random.random(options.batch_size) * tree.total)

    def add():
        nonlocal at
        tree.assign(np.arange(at, at + batch) % options.capacity, np.ones(batch))
        at += batch

    def sample():
        nonlocal drawn
        drawn = tree.draw((np.arange(batch) + random.random(batch)) * (tree.total / batch))

    return {"add": add, "sample": sample, "update": lambda: tree.assign(drawn, random.random(batch))}


def of_memory(memory: Replay, options: ReplayBenchOptions, random: np.random.Generator) -> Calls:
    streams = options.streams
    rows = -(-options.batch_size // streams) * streams
    frames = random.integers(0, 256, (rows, *memory.frame), np.uint8).astype(memory.dtype)
    actions, rewards, steps = np.zeros(rows, np.int64), np.ones(rows, np.float32), 0
    drawn = None

    def add():
        nonlocal steps
        flags = np.repeat(np.arange(steps, steps + rows // streams) % EPISODE == EPISODE - 1, streams).astype(np.uint8)
        memory.add_frames((frames, frames[:0], actions, rewards, flags), 0, streams)
        steps += rows // streams

    def sample():
        nonlocal drawn
        drawn = memory.sample(options.batch_size, 0.4, random)

    def update():
        memory.update(drawn.index, drawn.serial, random.random(options.batch_size))

    return {"add": add, "sample": sample, "update": update}


def measure(parts: dict[str, Calls], options: ReplayBenchOptions) -> dict[tuple[str, str], float]:
    """Run one turn; return, by (part, operation), the speed in millions of transitions a second."""
    found = {}
    for name in OPERATIONS:
        for part, calls in parts.items():
            batch = options.batch_size
            if part == "memory" and name == "add":
                batch = -(-batch // options.streams) * options.streams
            times = -(-options.operations // batch // (10 if part == "NumPy" else 1))
            begun = time.perf_counter()
            for _ in range(max(1, times)):
                calls[name]()
            found[part, name] = max(1, times) * batch / (time.perf_counter() - begun) / 1e6
    return found


def tabulated(options: ReplayBenchOptions, memory: Replay, turns: list[dict[tuple[str, str], float]]) -> tuple:
    rows, records = [], []
    for part in ("sum tree", "memory"):
        for name in OPERATIONS:
            speeds = [turn[part, name] for turn in turns]
            row = {"": f"{part}, {name}", "millions/s": spread(speeds, ".2f"), "NumPy": "", "ratio": ""}
            record = {"part": part, "operation": name} | quartiles("millions_per_second", speeds)
            if part == "sum tree":
                others = [turn["NumPy", name] for turn in turns]
                ratios = [one / other for one, other in zip(speeds, others, strict=True)]
                row |= {"NumPy": spread(others, ".3f"), "ratio": f"{statistics.median(ratios):.1f}"}
                record |= quartiles("numpy_millions_per_second", others) | quartiles("ratio", ratios)
            rows.append(row)
            records.append(record)
    about = f"{options.capacity:,} transitions of {memory.shape} {memory.dtype}, {memory.bytes / 1e6:,.0f} MB"
    return f"Replay: {about}, {options.batch_size} to a call", rows, records


main = benchmark("bench-replay", ReplayBenchOptions, __doc__, run, full, one_rank=True)


if __name__ == "__main__":
    main()
