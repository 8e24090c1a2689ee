"""Where decentralized training ends: mpiexec -n 8 python scripts/bench_gossip.py --topologies ring --at 100,1000

Trains the same model on the same data and batches by D-PSGD, gradient tracking and DeTAG on each of --topologies, with
a constant rate, all of them from the same start and --repeats times over (with seeds 0, 1, ...), and prints medians
with the lowest and highest value: after each number of steps in --at the train loss of the average and, where the loss
is strongly convex (linear, logistic, softmax with --weight-decay), the squared distances to the optimum of the average
and, in the mean, of the replicas.

What they cost, and reach over epochs: `hpcdl compare`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator, refuse_together
from hpcdl.comm.allreduce import algorithm
from hpcdl.comm.gossip.mixing import RULES
from hpcdl.comm.gossip.topology import topology
from hpcdl.data import Batch, open_data
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.launch.benchmark_table import benchmark, positive, report, several, spread, trained
from hpcdl.models import for_data, parse_model
from hpcdl.optim import make_optimizer
from hpcdl.runs import Options, Run
from hpcdl.runs.evaluation import evaluate
from hpcdl.runs.options import option
from hpcdl.strategies import gossip

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
)
METHODS = ("dpsgd", "gradient-tracking", "detag")
TRIES = 20_000  # steps until the optimum has to be found


@dataclass
class GossipBench:
    """What is trained, and what is compared."""

    topologies: str = option("ring", "graphs of gossip, as in train-gossip, with commas between")
    at: str = option("100,1000", "numbers of steps, with commas between")
    repeats: int = option(3, "runs of each strategy, with seeds 0, 1, ...")
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
        several(self, "at")
        positive(self, "repeats")
        algorithm(self.allreduce)


class MarkedRun(Run):
    """A run that is looked at after the steps in `marks`, and agrees only there.

    seen: what look(run) has returned each time, with the steps done.
    """

    def __init__(self, comm, settings, marks, look):
        super().__init__(comm, settings)
        self.marks, self.look, self.seen = marks, look, []

    def boundary(self):
        if self.over or self.step in self.marks:
            super().boundary()
            self.held.refresh()
            self.seen.append({"steps": self.step} | self.look(self))


def main(arguments=None):
    with benchmark("bench-gossip", GossipBench, __doc__, arguments, compared) as (world, options, strategies):
        results = {name: [] for name in strategies}
        for seed in range(options.repeats):
            for name, train in strategies.items():
                results[name].append(measure(world, options, train, seed))
        if world.rank == 0:
            report(title(options, results), "bench-gossip", options, optima(results), records(results))


def compared(options: GossipBench, size: int) -> dict:
    """The functions that train, train(comm, model, data, optimizer, run), by name."""
    graphs = [topology(spec, size) for spec in options.topologies.split(",")]

    for graph in graphs:
        gossip.batches_of("detag", graph, RULES[0])
    return {
        f"{method}, {graph.spec}": partial(gossip.train, topology=graph, method=method)
        for method in METHODS
        for graph in graphs
    }


def measure(world, options: GossipBench, train, seed: int) -> dict:
    """One run: its summary (on rank 0), and what was seen on the way."""
    with refuse_together(world):
        given = {name: getattr(options, name) for name in OF_A_RUN}
        last = options.at[-1]  # where alone it is evaluated
        settings = Options(**given, steps=last, evaluate_every=last, seed=seed, progress="none")
    how = {"dtype": options.dtype, "partition": options.partition, "seed": seed}
    data = open_data(options.data, comm=world, **how)
    with refuse_together(world):
        model = for_data(options.model, data, options.dtype)
    best = optimum(world, options, model, data)

    def look(run):
        """The loss over all training rows of what the run reports, for gossip and local SGD the average; distances."""
        sums = evaluate(model, run.parameters, data.train, data.classes, (world.rank, world.size))
        world.Allreduce(MPI.IN_PLACE, sums)
        seen = {"train_loss": sums[0] / sums[2]}
        if best is not None:
            seen["distance_of_average"] = float(np.square(run.parameters - best).sum())
            seen["distance_of_replicas"] = world.allreduce(float(np.square(run.held.replica - best).sum())) / world.size
        return seen

    def marked(comm, settings):
        return MarkedRun(comm, settings, options.at, look)

    run = trained(Communicator(world, options.allreduce), train, settings, data, marked, model)
    data.close()
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


def records(results: dict) -> list[dict]:
    """The rows of the file: one for each time at which a run was looked at."""
    return [
        {
            "strategy": name,
            "ranks": row["ranks"],
            "seed": seed,
            **seen,
            "batches_of_a_phase": row.get("phase"),
            "last_test_loss": row["test_loss"],
            "last_test_accuracy": row["test_accuracy"],
        }
        for name, runs in results.items()
        for seed, row in enumerate(runs)
        for seen in row["seen"]
    ]


def optima(results: dict) -> list[dict]:
    """The table: cells by column, for each method after each number of steps."""
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
