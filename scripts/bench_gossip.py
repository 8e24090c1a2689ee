"""Where decentralized training ends: mpiexec -n 8 hpcdl bench-gossip --topologies ring --at 100,1000

Trains the same model on the same data and batches by D-PSGD, gradient tracking and DeTAG on each of --topologies, with
a constant rate, all of them from the same start and --repeats times over (with seeds 0, 1, ...), and prints medians
with the lowest and highest value: after each number of steps in --at the train loss of the average and, where the loss
is strongly convex (linear, logistic, softmax with --weight-decay), the squared distances to the optimum of the average
and, in the mean, of the replicas.

`hpcdl compare` shows the costs of these strategies, and their scores by epoch."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from hpcdl.comm.gossip.mixing import RULES
from hpcdl.comm.gossip.topology import topology
from hpcdl.data import Batch, open_data
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.launch.benchmark_table import benchmark, in_turns, several, spread, trained, training_options
from hpcdl.models import for_data, parse_model
from hpcdl.optim import make_optimizer
from hpcdl.runs.evaluation import evaluate
from hpcdl.runs.options import option, positive
from hpcdl.strategies import gossip

METHODS = ("dpsgd", "gradient-tracking", "detag")
TRIES = 20_000  # most steps of the search for the optimum


@dataclass
class GossipBench:
    """Options of bench-gossip: the training, and the compared methods and topologies."""

    topologies: str = option("ring", "graphs of gossip, as in train-gossip, with commas between")
    at: str = option("100,1000", "numbers of steps, with commas between")
    repeats: int = option(3, "runs of each strategy, with seeds 0, 1, ...")
    data: str = option("digits", "data set: digits, or an HDF5 file made by prepare-data")
    partition: str = option("iid", "which rows a rank gets: iid, by-label or dirichlet:ALPHA")
    model: str = option("mlp", "model, as in train-gossip")
    dtype: Literal["float32", "float64"] = option("float32", "type of parameters, gradients and messages")
    optimizer: str = option("sgd", "optimizer, as in train-gossip")
    lr: float = option(0.1, "learning rate")
    schedule: str = option("constant", "schedule of the learning rate, as in train-gossip")
    weight_decay: float = option(0.0, "L2 penalty per parameter")
    batch_size: int | str = option(256, "examples per update, all ranks together; full: all of them")
    allreduce: str = option("ring", "all-reduce algorithm, as in train-allreduce")
    json: str = option("", "file for the results")

    def __post_init__(self):
        from hpcdl.comm.allreduce import algorithm

        several(self, "at")
        positive(self, "repeats")
        algorithm(self.allreduce)


def run(world, options: GossipBench, strategies: dict) -> tuple | None:
    ways = {name: partial(measure, world, options, train) for name, train in strategies.items()}
    results = in_turns(options.repeats, ways)
    return (title(options, results), optima(results), records(results)) if world.rank == 0 else None


def compared(options: GossipBench, size: int) -> dict:
    """Return, by method and graph, the compared functions, each called as train(comm, model, data, optimizer, run)."""
    graphs = [topology(spec, size) for spec in options.topologies.split(",")]
    for graph in graphs:
        gossip.batches_of("detag", graph, RULES[0])
    return {
        f"{method}, {graph.spec}": partial(gossip.train, topology=graph, method=method)
        for method in METHODS
        for graph in graphs
    }


def measure(world, options: GossipBench, train, seed: int) -> dict:
    """Run one training; return its summary (on rank 0) and the measurements after the steps in --at."""
    from mpi4py import MPI

    from hpcdl.comm import Communicator, refuse_together
    from hpcdl.runs import Run

    class MarkedRun(Run):
        """A run that is measured after the steps in --at, and whose ranks agree only then."""

        def boundary(self):
            if self.over or self.step in options.at:
                super().boundary()
                self.held.refresh()
                seen.append({"steps": self.step} | look(self))

    seen, last = [], options.at[-1]  # the only step after which the run is evaluated
    with refuse_together(world):
        settings = training_options(options, steps=last, evaluate_every=last, seed=seed)
    how = {"dtype": options.dtype, "partition": options.partition, "seed": seed}
    data = open_data(options.data, comm=world, **how)
    with refuse_together(world):
        model = for_data(options.model, data, options.dtype)
    best = optimum(world, options, model, data)

    def look(run):
        """Return the training loss at the run's parameters (of gossip: the average), and distances to the optimum."""
        sums = evaluate(model, run.parameters, data.train, data.classes, (world.rank, world.size))
        world.Allreduce(MPI.IN_PLACE, sums)
        values = {"train_loss": sums[0] / sums[2]}
        if best is not None:
            values["distance_of_average"] = float(np.square(run.parameters - best).sum())
            apart = world.allreduce(float(np.square(run.held.replica - best).sum()))
            values["distance_of_replicas"] = apart / world.size
        return values

    run = trained(Communicator(world, options.allreduce), train, settings, data, MarkedRun, model)
    data.close()
    return (run.summary or {}) | {"seen": seen}


def optimum(world, options: GossipBench, model, data):
    """Return the optimum, where the mean gradient with decay is 0 (by Nesterov on rank 0); None if it is not unique."""
    from hpcdl.comm import refuse_together

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
                raise UsageError(f"--lr {options.lr:g} does not reach the optimum in {TRIES:,} steps; take another")
    world.Bcast(w)
    return w


def title(options: GossipBench, results: dict) -> str:
    one = next(iter(results.values()))[0]
    what = f"{options.model} ({one['parameters']:,} parameters, {one['dtype']}) on {one['data']}, {options.partition}"
    how = f"{options.optimizer}, rate {options.lr:g}, {options.batch_size} examples an update"
    return f"{what}, {how}, {counted(options.repeats, 'run')}"


def records(results: dict) -> list[dict]:
    return [
        {"strategy": name, "ranks": row["ranks"], "seed": seed, **seen, "batches_of_a_phase": row.get("phase")}
        | {f"last_{score}": row[score] for score in ("test_loss", "test_accuracy")}
        for name, runs in results.items()
        for seed, row in enumerate(runs)
        for seen in row["seen"]
    ]


def optima(results: dict) -> list[dict]:
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


main = benchmark("bench-gossip", GossipBench, __doc__, run, compared)


if __name__ == "__main__":
    main()
