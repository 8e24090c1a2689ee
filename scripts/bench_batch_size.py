"""Accuracy and steps against the batch size: mpiexec -n 2 python scripts/bench_batch_size.py --plot batch.png

Trains the same model for the same number of epochs at each batch size, once with the learning rate as it is and once
scaled in proportion to the batch (Goyal et al., 2017) after one epoch of warm-up from 0, for several seeds, and prints
steps, seconds, and the median test accuracy with its lowest and highest value.
"""

import statistics
from dataclasses import dataclass
from typing import Literal

from hpcdl.comm import Communicator
from hpcdl.data import open_data
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.launch.benchmark_table import benchmark, figure, positive, print_table, save, trained, write_json
from hpcdl.runs import Options
from hpcdl.runs.folder import environment
from hpcdl.runs.options import option
from hpcdl.strategies import all_reduce


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
    rates: Literal["plain", "scaled", "both"] = option("both", "--lr as it is, or scaled in proportion to the batch")
    seeds: int = option(3, "runs at each setting, with seeds 0, 1, ...")
    plot: str = option("", "file for a picture (needs the extra report)")
    json: str = option("", "file for the results")

    def __post_init__(self):
        positive(self, "reference", "epochs", "seeds")
        if not all(text.isdecimal() and int(text) > 0 for text in self.batches.split(",")):
            raise UsageError(f"--batches: numbers with commas between, not {self.batches!r}")


def main(arguments=None):
    with benchmark("bench-batch-size", SweepOptions, __doc__, arguments) as (world, options, _):
        scalings = {"plain": (False,), "scaled": (True,), "both": (False, True)}[options.rates]
        sizes = [int(text) for text in options.batches.split(",")]
        rows = [measure(world, options, size, scaled) for scaled in scalings for size in sizes]
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
        data = open_data(options.data, comm=world, seed=seed)
        end = trained(Communicator(world), all_reduce.train, settings, data).progress
        runs.append({"steps": end.step, "seconds": end.seconds, **end.scores, "train_loss": end.train_loss})
        data.close()
    accuracy = [run["test_accuracy"] for run in runs]
    return {
        "batch_size": size,
        "scaled": scaled,
        "lr": options.lr * (size / options.reference if scaled else 1),
        "steps": runs[0]["steps"],
        "seconds": statistics.median(run["seconds"] for run in runs),
        "test_loss": statistics.median(run["test_loss"] for run in runs),
        "test_accuracy": statistics.median(accuracy),
        "test_accuracy_lowest": min(accuracy),
        "test_accuracy_highest": max(accuracy),
    }


def report(options: SweepOptions, rows: list[dict]) -> None:
    """Print the table, write the picture and the numbers."""
    about = environment()
    print(
        f"{options.model} on {options.data}, {counted(options.epochs, 'epoch')}, {options.optimizer}, "
        f"{counted(options.seeds, 'seed')}"
    )
    print(f"{about['launch']}; {about['machine']}\n")
    print_table(
        [
            {
                "batch": str(row["batch_size"]),
                "learning rate": f"{row['lr']:g}",
                "steps": f"{row['steps']:,}",
                "seconds": f"{row['seconds']:.2f}",
                "test accuracy, median": f"{row['test_accuracy']:.2%}",
                "lowest to highest": f"{row['test_accuracy_lowest']:.2%} to {row['test_accuracy_highest']:.2%}",
            }
            for row in rows
        ]
    )
    write_json("bench-batch-size", options, rows)
    if options.plot:
        draw(options, rows)


def draw(options: SweepOptions, rows: list[dict]) -> None:
    """Test accuracy and steps against the batch size."""
    picture = figure("--plot", figsize=(7, 4.2), layout="constrained")
    axes = picture.subplots()
    lines = {row["scaled"]: [] for row in rows}
    for row in rows:
        lines[row["scaled"]].append(row)
    for scaled, some in lines.items():
        x, y = [row["batch_size"] for row in some], [100 * row["test_accuracy"] for row in some]
        low = [100 * (row["test_accuracy"] - row["test_accuracy_lowest"]) for row in some]
        high = [100 * (row["test_accuracy_highest"] - row["test_accuracy"]) for row in some]
        look = {"color": "C0", "marker": "s" if scaled else "o", "capsize": 3}
        rate = "scaled, one epoch of warm-up" if scaled else f"learning rate {options.lr:g}"
        axes.errorbar(x, y, yerr=[low, high], ls="--" if scaled else "-", label=rate, **look)
    axes.set_xscale("log", base=2)
    best = max(row["test_accuracy"] for row in rows)
    axes.set_ylim(
        bottom=100 * max(min(row["test_accuracy_lowest"] for row in rows), best - 0.15)
    )  # runs that diverge leave the picture
    axes.set_xlabel("batch size (examples per update)")
    axes.set_ylabel(f"test accuracy after {counted(options.epochs, 'epoch')} (%)")
    axes.grid(alpha=0.3)
    steps = axes.twinx()
    some = next(iter(lines.values()))
    steps.plot([row["batch_size"] for row in some], [row["steps"] for row in some], "k:", label="updates")
    steps.set_yscale("log")
    steps.set_ylabel("updates")
    shown = [each.get_legend_handles_labels() for each in (axes, steps)]
    axes.legend(shown[0][0] + shown[1][0], shown[0][1] + shown[1][1], loc="lower left", fontsize="small")
    save(picture, options.plot)


if __name__ == "__main__":
    main()
