"""Accuracy and steps against the batch size: mpiexec -n 2 python scripts/bench_batch_size.py --plot batch.png

Trains the same model for the same number of epochs at each batch size, once with the learning rate as it is and once
scaled in proportion to the batch, with one epoch of warm-up (Goyal et al., 2017), for several seeds, and prints steps,
seconds, and the median test accuracy with its lowest and highest value.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

from hpcdl.comm import Communicator, agreement
from hpcdl.data import open_data
from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.runs import Options, Run
from hpcdl.runs.folder import environment
from hpcdl.runs.options import option, parse
from hpcdl.runs.program import ended, quiet
from hpcdl.strategies.all_reduce import train


@dataclass
class SweepOptions:
    """What is trained, and at which batch sizes."""

    data: str = option("digits", "data set: digits, or an HDF5 file made by prepare-data")
    model: str = option("mlp:256,128", "model, as in train-allreduce")
    batches: str = option("32,64,128,256,512,1024,2048", "batch sizes, with commas between")
    reference: int = option(32, "batch size to which --lr belongs")
    lr: float = option(0.01, "learning rate at the reference batch size")
    optimizer: str = option("momentum", "optimizer, as in train-allreduce")
    epochs: int = option(5, "epochs of each run")
    seeds: int = option(3, "runs at each setting, with seeds 0, 1, ...")
    plot: str = option("", "file for a picture (needs the extra report)")
    json: str = option("", "file for the results")


def main(arguments=None):
    world = MPI.COMM_WORLD
    with ended("bench-batch-size", world.rank):
        with agreement(world), quiet(world.rank > 0):
            options = parse(SweepOptions, "bench-batch-size", __doc__.split("\n")[0], arguments)
            sizes = [int(text) for text in options.batches.split(",") if text.isdecimal() and int(text) > 0]
            if len(sizes) != len(options.batches.split(",")):
                raise UsageError(f"--batches: numbers with commas between, not {options.batches!r}")
            if options.plot:
                pyplot()
        rows = [measure(world, options, size, scaled) for scaled in (False, True) for size in sizes]
        if world.rank == 0:
            report(options, rows)


def measure(world, options: SweepOptions, size: int, scaled: bool) -> dict:
    """Median scores over the seeds at one batch size."""
    runs = []
    for seed in range(options.seeds):
        schedule = f"constant:reference-batch={options.reference},warmup=1" if scaled else "constant"
        settings = Options(
            data=options.data,
            model=options.model,
            optimizer=options.optimizer,
            lr=options.lr,
            schedule=schedule,
            epochs=options.epochs,
            batch_size=size,
            seed=seed,
            evaluate_every=options.epochs,
            progress="none",
        )
        comm, data = Communicator(world), open_data(options.data, comm=world, seed=seed)
        model = make_model(options.model, data.features, data.classes)
        with Run(comm, settings) as run:
            train(comm, model, data, run.make_optimizer(model, data), run)
        runs.append({"steps": run.step, "seconds": run.seconds, **run.scores, "train_loss": run.train_loss})
        data.close()
        comm.free()
    accuracy = [run["test_accuracy"] for run in runs]
    return {
        "batch": size,
        "scaled": scaled,
        "lr": options.lr * (size / options.reference if scaled else 1),
        "steps": runs[0]["steps"],
        "seconds": statistics.median(run["seconds"] for run in runs),
        "accuracy": statistics.median(accuracy),
        "lowest": min(accuracy),
        "highest": max(accuracy),
    }


def report(options: SweepOptions, rows: list[dict]) -> None:
    """Print the table, write the picture and the numbers."""
    about = environment()
    print(f"{options.model} on {options.data}, {options.epochs} epochs, {options.optimizer}, {options.seeds} seeds")
    print(f"{about['launch']}; {about['machine']}\n")
    print("| batch | learning rate | steps | seconds | test accuracy, median | lowest to highest |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        spread = f"{row['lowest']:.2%} to {row['highest']:.2%}"
        numbers = f"{row['lr']:g} | {row['steps']:,} | {row['seconds']:.2f} | {row['accuracy']:.2%} | {spread}"
        print(f"| {row['batch']} | {numbers} |")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))
    if options.plot:
        draw(options, rows)


def pyplot():
    """matplotlib's pyplot, without a screen."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'hpcdl[report]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(options: SweepOptions, rows: list[dict]) -> None:
    """Test accuracy and steps against the batch size."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for scaled, label, marker in (
        (False, f"learning rate {options.lr:g}", "o"),
        (True, "scaled, one epoch of warm-up", "s"),
    ):
        some = [row for row in rows if row["scaled"] == scaled]
        x, y = [row["batch"] for row in some], [100 * row["accuracy"] for row in some]
        low = [100 * (row["accuracy"] - row["lowest"]) for row in some]
        high = [100 * (row["highest"] - row["accuracy"]) for row in some]
        axes.errorbar(x, y, yerr=[low, high], marker=marker, capsize=3, label=label)
    axes.set_xscale("log", base=2)
    best = max(row["accuracy"] for row in rows)
    axes.set_ylim(
        bottom=100 * max(min(row["lowest"] for row in rows), best - 0.15)
    )  # runs that diverge leave the picture
    axes.set_xlabel("batch size (examples per update)")
    axes.set_ylabel(f"test accuracy after {options.epochs} epochs (%)")
    axes.grid(alpha=0.3)
    steps = axes.twinx()
    some = [row for row in rows if not row["scaled"]]
    steps.plot([row["batch"] for row in some], [row["steps"] for row in some], "k:", label="updates")
    steps.set_yscale("log")
    steps.set_ylabel("updates")
    lines = [each.get_legend_handles_labels() for each in (axes, steps)]
    axes.legend(lines[0][0] + lines[1][0], lines[0][1] + lines[1][1], loc="lower left")
    figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    main()
