"""How near SGD, SVRG and SAGA come to the optimum, by gradients computed: hpcdl bench-svrg --plot svrg.png

The problem is strongly convex: a linear model with an L2 penalty, in float64; all methods have batches of one size. SGD
stalls at a constant rate, and is slow at a falling one; with variance reduction the suboptimality falls by a constant
factor in each epoch. Counts gradients, not seconds."""

from dataclasses import dataclass
from pkgutil import resolve_name

import numpy as np

from hpcdl.data import open_data
from hpcdl.launch.benchmark_table import benchmark, save, subplot, trained, training_options
from hpcdl.models import for_data
from hpcdl.models.linear_form import linear_form
from hpcdl.runs.evaluation import evaluate
from hpcdl.runs.options import option, positive

FLOOR = 1e-16  # of a suboptimality: below it there are rounding errors


@dataclass
class SVRGBenchOptions:
    """Options of bench-svrg: the problem, and how long each method may run."""

    data: str = option("digits", "data set: digits, or an HDF5 file made by prepare-data")
    model: str = option("softmax", "a linear model: linear, logistic or softmax")
    weight_decay: float = option(0.05, "L2 penalty per parameter, which makes the problem strongly convex")
    lr: float = option(0.05, "learning rate of all methods; SGD, rate 1/t, begins with it")
    batch_size: int = option(4, "examples per update, all ranks together")
    gradients: int = option(120, "gradients that a method may compute, per example")
    plot: str = option("", "file for a picture (needs the extra report)")
    json: str = option("", "file for the results")

    def __post_init__(self):
        positive(self, "batch_size", "gradients", "weight_decay", "lr")


# A line of the table: name, strategy, schedule, gradients per example in an epoch, and those before the first epoch.
METHODS = [
    ("SGD", "all_reduce", "constant", 1, 0),
    ("SGD, rate 1/t", "all_reduce", "1/t:decay={decay}", 1, 0),
    ("SVRG", "svrg", "constant", 2.5, 0),
    ("SAGA", "saga", "constant", 1, 1),
]


def run(world, options: SVRGBenchOptions, _) -> tuple | None:
    *_, best = follow(world, options, "svrg", "constant", 2 * options.gradients)
    lines = []
    for name, strategy, schedule, each, first in METHODS:
        epochs = max(2, int((options.gradients - first) / each))
        schedule = schedule.format(decay=options.lr * options.weight_decay)
        values = follow(world, options, strategy, schedule, epochs)
        lines.append((name, [(first + each * (at + 1), value) for at, value in enumerate(values)]))
    return tabulated(options, best, lines) if world.rank == 0 else None


def follow(world, options, strategy, schedule, epochs):
    """Train by `strategy`; return after each epoch the objective, which is mean loss plus penalty."""
    from hpcdl.comm import Communicator, refuse_together
    from hpcdl.runs import Run

    how = {"schedule": schedule, "epochs": epochs, "evaluate_every": epochs}
    settings = training_options(options, dtype="float64", optimizer="sgd", **how)
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

    trained(Communicator(world), resolve_name(f"hpcdl.strategies.{strategy}:train"), settings, data, observed, model)
    data.close()
    return values


def tabulated(options, best, lines):
    rows, records = [], []
    for name, points in lines:
        gaps = [(gradients, max(FLOOR, value - best)) for gradients, value in points]
        marks = [options.gradients / 4, options.gradients / 2, options.gradients]
        reached = [min((gap for at in gaps if at[0] <= mark for gap in at[1:]), default=np.nan) for mark in marks]
        cells = {f"{mark:g} gradients per example": f"{gap:.1e}" for mark, gap in zip(marks, reached, strict=True)}
        rows.append({"method": name} | cells)
        for gradients, gap in gaps:
            records.append({"method": name, "gradients_per_example": gradients, "suboptimality": gap})
    title = f"suboptimality of {options.model} on {options.data}, weight decay {options.weight_decay:g}"
    if options.plot:
        axes = subplot(xlabel="gradients computed, per example", ylabel="suboptimality")
        for name, *_ in METHODS:
            mine = [row for row in records if row["method"] == name]
            axes.plot(*([row[key] for row in mine] for key in ("gradients_per_example", "suboptimality")), label=name)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        save(axes, options.plot)
    return f"{title}, rate {options.lr:g}, batches of {options.batch_size}", rows, records


main = benchmark("bench-svrg", SVRGBenchOptions, __doc__, run)


if __name__ == "__main__":
    main()
