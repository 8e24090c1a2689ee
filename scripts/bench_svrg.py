"""How near SGD, SVRG and SAGA come to the optimum, by gradients computed: python scripts/bench_svrg.py --plot svrg.png

On a strongly convex problem, a linear model with an L2 penalty in float64, all with batches of the same size: SGD at a
constant rate stalls, at one that falls it is slow, and with variance reduction the suboptimality falls by a constant
factor in each epoch. Counts gradients, and no seconds.
"""

from dataclasses import dataclass

import numpy as np

from hpcdl.comm import Communicator, refuse_together
from hpcdl.data import open_data
from hpcdl.errors import UsageError
from hpcdl.launch.benchmark_table import benchmark, figure, positive, report, save, trained
from hpcdl.models import for_data
from hpcdl.models.linear_form import linear_form
from hpcdl.runs import Options, Run
from hpcdl.runs.evaluation import evaluate
from hpcdl.runs.options import option
from hpcdl.strategies import all_reduce, saga, svrg

FLOOR = 1e-16  # of a suboptimality: below it there are rounding errors


@dataclass
class SVRGBenchOptions:
    """The problem, and how long each method may take."""

    data: str = option("digits", "data set: digits, or an HDF5 file made by prepare-data")
    model: str = option("softmax", "a linear model: linear, logistic or softmax")
    weight_decay: float = option(0.05, "L2 penalty per parameter, which makes the problem strongly convex")
    lr: float = option(0.05, "learning rate of all methods; of SGD that falls, at the start")
    batch_size: int = option(4, "examples per update, all ranks together")
    gradients: int = option(120, "gradients that a method may compute, per example")
    plot: str = option("", "file for a picture (needs the extra report)")
    json: str = option("", "file for the results")

    def __post_init__(self):
        positive(self, "batch_size", "gradients")
        if not self.weight_decay > 0 or not self.lr > 0:
            raise UsageError("--weight-decay and --lr must be greater than 0")


# A line of the table: its name, the strategy, its schedule, gradients per example of an epoch and before the first.
METHODS = [
    ("SGD", all_reduce.train, "constant", 1, 0),
    ("SGD, rate 1/t", all_reduce.train, "1/t:decay={decay}", 1, 0),
    ("SVRG", svrg.train, "constant", 2.5, 0),
    ("SAGA", saga.train, "constant", 1, 1),
]


def main(arguments=None):
    with benchmark("bench-svrg", SVRGBenchOptions, __doc__, arguments) as (world, options, _):
        best, _ = follow(world, options, svrg.train, "constant", 2 * options.gradients)
        lines = []
        for name, train, schedule, each, first in METHODS:
            epochs = max(2, int((options.gradients - first) / each))
            schedule = schedule.format(decay=options.lr * options.weight_decay)
            _, values = follow(world, options, train, schedule, epochs)
            lines.append((name, [(first + each * (at + 1), value) for at, value in enumerate(values)]))
        if world.rank == 0:
            show(options, best, lines)


def follow(world, options, train, schedule, epochs):
    """(the value at the end, the values after each epoch) of the function that is minimized."""
    settings = Options(
        data=options.data,
        model=options.model,
        dtype="float64",
        optimizer="sgd",
        lr=options.lr,
        schedule=schedule,
        weight_decay=options.weight_decay,
        batch_size=options.batch_size,
        epochs=epochs,
        evaluate_every=epochs,
        progress="none",
    )
    data = open_data(options.data, comm=world, dtype="float64")
    with refuse_together(world):
        model = for_data(options.model, data, "float64")
        linear_form(model, "bench-svrg")
    values = []

    def value(run, loss, total):
        if run.step % run.per_epoch == 0:
            w = run.parameters
            losses, _, examples = evaluate(model, w, data.train, data.classes)
            values.append(losses / examples + options.weight_decay / 2 * float(w @ w))

    def observed(comm, settings):
        run = Run(comm, settings)
        run.observe(value)
        return run

    trained(Communicator(world), train, settings, data, observed, model)
    data.close()
    return values[-1], values


def show(options, best, lines):
    """Print the table, write the picture and the numbers."""
    rows, records = [], []
    for name, points in lines:
        gaps = [(gradients, max(FLOOR, value - best)) for gradients, value in points]
        marks = [options.gradients / 4, options.gradients / 2, options.gradients]
        reached = [min((gap for at in gaps if at[0] <= mark for gap in at[1:]), default=np.nan) for mark in marks]
        cells = dict(
            zip((f"{mark:g} gradients per example" for mark in marks), map("{:.1e}".format, reached), strict=True)
        )
        rows.append({"method": name} | cells)
        for gradients, gap in gaps:
            records.append({"method": name, "gradients_per_example": gradients, "suboptimality": gap})
    title = f"suboptimality of {options.model} on {options.data}, weight decay {options.weight_decay:g}"
    report(f"{title}, rate {options.lr:g}, batches of {options.batch_size}", "bench-svrg", options, rows, records)
    if options.plot:
        draw(options, records)


def draw(options, records):
    """Suboptimality against gradients, a line for each method."""
    picture = figure("--plot", figsize=(7, 4.2), layout="constrained")
    axes = picture.subplots()
    for name, *_ in METHODS:
        mine = [row for row in records if row["method"] == name]
        axes.plot(*([row[key] for row in mine] for key in ("gradients_per_example", "suboptimality")), label=name)
    axes.set_yscale("log")
    axes.set_xlabel("gradients computed, per example")
    axes.set_ylabel("suboptimality")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(picture, options.plot)


if __name__ == "__main__":
    main()
