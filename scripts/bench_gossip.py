"""All-reduce SGD, gossip and local SGD beside each other: mpiexec -n 8 python scripts/bench_gossip.py --epochs 2

Trains the same model on the same data and batches by one strategy after the other, all of them from the same start and
--repeats times over (with seeds 0, 1, ...), and prints medians with the lowest and highest value.

    --case network    all-reduce SGD, D-PSGD on each of --topologies, and local SGD with each H of --sync-every: what
                      a rank sends, seconds per epoch, and the scores after --epochs epochs. An epoch ends when the
                      last rank has done it; the ranks agree about nothing else meanwhile
    --case optimum    D-PSGD, gradient tracking and DeTAG on each of --topologies, with a constant rate: after each
                      number of steps in --at the train loss of the average, and, where the loss is strongly convex
                      (linear, logistic, softmax with --weight-decay), the squared distances to the optimum of the
                      average and, in the mean, of the replicas
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator, refuse_together
from hpcdl.comm.allreduce import algorithm
from hpcdl.comm.mixing import RULES
from hpcdl.comm.topology import topology
from hpcdl.data import Batch, open_data
from hpcdl.errors import UsageError
from hpcdl.models import for_data, parse_model
from hpcdl.optim import make_optimizer
from hpcdl.runs import Options, Run
from hpcdl.runs.alike import reading
from hpcdl.runs.benchmark_report import check_files, positive, report, several, spread
from hpcdl.runs.evaluation import evaluate
from hpcdl.runs.options import option
from hpcdl.runs.program import ended
from hpcdl.strategies import all_reduce, gossip, local_sgd
from hpcdl.words import counted

OF_A_RUN = (
    "data",
    "partition",
    "model",
    "dtype",
    "optimizer",
    "lr",
    "schedule",
    "weight_decay",
    "batch_size",
    "epochs",
)
CORRECTING = ("dpsgd", "gradient-tracking", "detag")
TRIES = 20_000  # steps until the optimum has to be found


@dataclass
class GossipBench:
    """What is trained, and what is compared."""

    case: Literal["network", "optimum"] = option("network", "what is looked at: time and bytes, or where training ends")
    topologies: str = option("ring", "graphs of gossip, as in train-gossip, with commas between")
    sync_every: str = option("1,4,16", "network: numbers of local steps, with commas between")
    at: str = option("100,1000", "optimum: numbers of steps, with commas between")
    repeats: int = option(3, "runs of each strategy, with seeds 0, 1, ...")
    epochs: int = option(1, "network: epochs of each run")
    data: str = option("digits", "data set: digits, or an HDF5 file made by prepare-data")
    partition: str = option("iid", "which rows a rank gets: iid, by-label or dirichlet:ALPHA")
    model: str = option("mlp", "model, as in train-gossip")
    dtype: Literal["float32", "float64"] = option("float32", "type of parameters, gradients and messages")
    optimizer: str = option("sgd", "optimizer, as in train-gossip")
    lr: float = option(0.1, "learning rate")
    schedule: str = option("constant", "its schedule, as in train-gossip")
    weight_decay: float = option(0.0, "L2 penalty per parameter")
    batch_size: int | str = option(256, "examples per update, all ranks together; full: all of them")
    allreduce: str = option("ring", "all-reduce algorithm, as in train-allreduce")
    json: str = option("", "file for the results")

    def __post_init__(self):
        several(self, "sync_every", "at")
        positive(self, "repeats", "epochs")


class Watched(Run):
    """A run that is looked at after the steps in `marks` (none: after each epoch), and agrees only there.

    seen: what look(run) has returned each time, with the steps done, and the seconds since the time before until the
    last rank had come as far.
    """

    def __init__(self, comm, settings, marks, look):
        super().__init__(comm, settings)
        self.marks, self.look, self.seen = marks, look, []

    def start(self):
        super().start()
        self.begun = time.perf_counter()

    def boundary(self):
        if self.over or (self.step in self.marks if self.marks else self.step % self.per_epoch == 0):
            self.bookkeeping.barrier()
            seconds = time.perf_counter() - self.begun
            super().boundary()
            self.held.refresh()
            self.seen.append({"steps": self.step, "seconds": seconds} | self.look(self))
            self.begun = time.perf_counter()


def main(arguments=None):
    world = MPI.COMM_WORLD
    with ended("bench-gossip", world.rank):
        with reading(world) as parse:
            options = parse(GossipBench, "bench-gossip", __doc__, arguments)
            algorithm(options.allreduce)
            check_files(options, world.rank)
            strategies = compared(options, world.size)
        results = {name: [] for name in strategies}
        if options.case == "network":  # what kernels and connections take to open is not for the first to pay
            for train in strategies.values():
                measure(world, options, train, seed=0, steps=options.sync_every[-1])
        for seed in range(options.repeats):
            for name, train in strategies.items():
                results[name].append(measure(world, options, train, seed))
        if world.rank == 0:
            rows = network(results) if options.case == "network" else optima(results)
            report(title(options, results), "bench-gossip", options, rows, records(options, results))


def compared(options: GossipBench, size: int) -> dict:
    """The functions that train, train(comm, model, data, optimizer, run), by name."""
    graphs = [topology(spec, size) for spec in options.topologies.split(",")]

    def on_graphs(method):
        return {f"{method}, {graph.spec}": partial(gossip.train, topology=graph, method=method) for graph in graphs}

    for graph in graphs:
        gossip.batches_of("detag" if options.case == "optimum" else "dpsgd", graph, RULES[0])
    if options.case == "optimum":
        return {name: train for method in CORRECTING for name, train in on_graphs(method).items()}
    local = {f"local SGD, H = {h}": partial(local_sgd.train, sync_every=h) for h in options.sync_every}
    return {"all-reduce SGD": all_reduce.train} | on_graphs("dpsgd") | local


def measure(world, options: GossipBench, train, seed: int, steps: int = 0) -> dict:
    """One run, of `steps` or as the options say: its summary (on rank 0), and what was seen on the way."""
    marks, best = options.at if options.case == "optimum" else [], None
    with refuse_together(world):
        settings = Options(**{name: getattr(options, name) for name in OF_A_RUN}, seed=seed, progress="none")
    settings.steps = marks[-1] if marks else steps
    settings.evaluate_every = settings.steps or settings.epochs  # at the end only
    how = {"dtype": options.dtype, "partition": options.partition, "seed": seed}
    data = open_data(options.data, comm=world, **how)
    with refuse_together(world):
        model = for_data(options.model, data, options.dtype)
    if marks:
        best = optimum(world, options, model, data)
    comm = Communicator(world, options.allreduce)

    def look(run):
        """The loss over all training rows of what the run reports, for gossip and local SGD the average; distances."""
        sums = evaluate(model, run.parameters, data.train, data.classes, (world.rank, world.size))
        world.Allreduce(MPI.IN_PLACE, sums)
        seen = {"train_loss": sums[0] / sums[2]}
        if best is not None:
            seen["distance_of_average"] = float(np.square(run.parameters - best).sum())
            seen["distance_of_replicas"] = world.allreduce(float(np.square(run.held.replica - best).sum())) / world.size
        return seen

    with Watched(comm, settings, marks, look) as run:
        train(comm, model, data, run.make_optimizer(model, data), run)
    data.close()
    comm.free()
    return (run.summary or {}) | {"seen": run.seen}


def optimum(world, options: GossipBench, model, data):
    """Where the mean gradient over all rows, decay included, is 0, by Nesterov's method on rank 0; None: not unique."""
    if options.weight_decay == 0 or parse_model(options.model)[0] not in ("linear", "logistic", "softmax"):
        return None
    w, rows = np.zeros(model.layout.size, options.dtype), data.examples
    with refuse_together(world):
        if world.rank == 0:
            batch = Batch(*data.train.rows(0, rows), rows, epoch=0, step=0, index=np.arange(rows))
            decay = options.weight_decay
            rule = make_optimizer("nesterov", w.size, w.dtype, lambda step: options.lr, decay)
            smallest = 1e-13 if options.dtype == "float64" else 1e-5
            for _ in range(TRIES):
                gradient = np.zeros_like(w)
                model.loss_and_gradient(w, batch, gradient)
                if np.linalg.norm(gradient / rows + decay * w) < smallest:
                    break
                rule.update(w, gradient, scale=1 / rows)
            else:
                raise UsageError(f"--lr {options.lr:g} does not lead to the optimum in {TRIES:,} steps; take another")
    world.Bcast(w)
    return w


def title(options: GossipBench, results: dict) -> str:
    """What was measured."""
    one = next(iter(results.values()))[0]
    what = f"{options.model} ({one['parameters']:,} parameters, {one['dtype']}) on {one['data']}, {options.partition}"
    how = f"{options.optimizer}, rate {options.lr:g}, {options.batch_size} examples an update"
    return f"{what}, {how}, {counted(options.repeats, 'run')}"


def sent(run: dict, what: str) -> float | None:
    """By the busiest rank in an epoch, without the initial values; None where the library's own collective hides it."""
    ranks = [[of[what] for name, of in rank.items() if name != "broadcast"] for rank in run["traffic_per_rank"]]
    return None if any(None in each for each in ranks) else max(map(sum, ranks)) / run["epochs"]


def records(options: GossipBench, results: dict) -> list[dict]:
    """The rows of the file: one for each time at which a run was looked at."""
    return [
        {
            "case": options.case,
            "strategy": name,
            "ranks": run["ranks"],
            "seed": seed,
            "steps": seen["steps"],
            "seconds_since_the_row_before": seen["seconds"],
            **{key: value for key, value in seen.items() if key not in ("steps", "seconds")},
            "batches_of_a_phase": run.get("phase"),
            "busiest_rank_sent_bytes_per_epoch": sent(run, "bytes"),
            "busiest_rank_sent_messages_per_epoch": sent(run, "messages"),
            "last_consensus_distance": run.get("consensus_distance"),
            "last_test_loss": run["test_loss"],
            "last_test_accuracy": run["test_accuracy"],
        }
        for name, runs in results.items()
        for seed, run in enumerate(runs)
        for seen in run["seen"]
    ]


def network(results: dict) -> list[dict]:
    """The table of --case network: cells by column, for each strategy."""

    def epoch(run):
        return statistics.median(seen["seconds"] for seen in run["seen"])

    first = [epoch(run) for run in next(iter(results.values()))]
    return [
        {
            "strategy": name,
            "MB sent per rank and epoch": f"{sent(runs[0], 'bytes') / 1e6:.3f}",
            "messages": "" if (sends := sent(runs[0], "messages")) is None else f"{sends:,.0f}",
            "seconds per epoch": spread([epoch(run) for run in runs], ".3f"),
            "of all-reduce SGD's": spread([epoch(run) / time for run, time in zip(runs, first, strict=True)], ".2f"),
            "consensus distance": spread([run.get("consensus_distance", 0.0) for run in runs], ".3g"),
            "train loss": spread([run["seen"][-1]["train_loss"] for run in runs], ".4f"),
            "test loss": spread([run["test_loss"] for run in runs], ".4f"),
            "test accuracy": spread([run["test_accuracy"] for run in runs], ".2%"),
        }
        for name, runs in results.items()
    ]


def optima(results: dict) -> list[dict]:
    """The table of --case optimum: cells by column, for each method after each number of steps."""
    titles = {
        "distance_of_average": ("squared distance of the average", ".2g"),
        "distance_of_replicas": ("mean of the replicas'", ".2g"),
        "train_loss": ("train loss of the average", ".6f"),
    }
    return [
        {"method": name, "batches of a phase": str(runs[0]["phase"]), "steps": f"{seen['steps']:,}"}
        | {
            title: spread([run["seen"][i][key] for run in runs], form)
            for key, (title, form) in titles.items()
            if key in seen
        }
        for name, runs in results.items()
        for i, seen in enumerate(runs[0]["seen"])
    ]


if __name__ == "__main__":
    main()
