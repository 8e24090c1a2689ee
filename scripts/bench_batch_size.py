"""Accuracy and steps against the batch size: mpiexec -n 2 hpcdl bench-batch-size --plot batch.png

Trains the same model for the same number of epochs at each batch size, once with the learning rate as it is and once
scaled in proportion to the batch (Goyal et al., 2017) after one epoch of warm-up from 0, for several seeds, and prints
steps, seconds, and the median test accuracy with its lowest and highest value."""

import statistics
from dataclasses import dataclass
from typing import Literal

from hpcdl.data import open_data
from hpcdl.formatting import counted
from hpcdl.launch import benchmark_table as bench
from hpcdl.runs.options import option, positive
from hpcdl.strategies import all_reduce


@dataclass
class SweepOptions:
    """Options of bench-batch-size: the training, and its batch sizes."""

    data: str = option("digits", "data set: digits, or an HDF5 file made by prepare-data")
    model: str = option("mlp:256,128", "model, as in train-allreduce")
    batches: str = option("32,64,128,256,512,1024,2048", "batch sizes, with commas between")
    reference: int = option(32, "batch size for which --lr is chosen")
    lr: float = option(0.01, "learning rate at the reference batch size")
    optimizer: str = option("momentum", "optimizer, as in train-allreduce")
    epochs: int = option(5, "epochs of each run")
    rates: Literal["plain", "scaled", "both"] = option("both", "--lr as it is, or scaled in proportion to the batch")
    seeds: int = option(3, "runs at each setting, with seeds 0, 1, ...")
    plot: str = option("", "file for a picture (needs the extra report)")
    json: str = option("", "file for the results")

    def __post_init__(self):
        positive(self, "reference", "epochs", "seeds")
        bench.whole_numbers("batches", self.batches)


def run(world, options: SweepOptions, _) -> None:
    scalings = {"plain": (False,), "scaled": (True,), "both": (False, True)}[options.rates]
    sizes = bench.whole_numbers("batches", options.batches)
    rows = [measure(world, options, size, scaled) for scaled in scalings for size in sizes]
    if world.rank == 0:
        report(options, rows)


def measure(world, options: SweepOptions, size: int, scaled: bool) -> dict:
    """Train with each seed at one batch size; return medians of the scores. scaled: the rate grows with the batch."""
    from hpcdl.comm import Communicator

    runs, schedule = [], f"constant:reference-batch={options.reference},warmup=1" if scaled else "constant"
    for seed in range(options.seeds):
        how = {"schedule": schedule, "batch_size": size, "evaluate_every": options.epochs, "seed": seed}
        settings = bench.training_options(options, **how)
        data = open_data(options.data, comm=world, seed=seed)
        end = bench.trained(Communicator(world), all_reduce.train, settings, data).progress
        runs.append({"steps": end.step, "seconds": end.seconds, **end.scores, "train_loss": end.train_loss})
        data.close()
    accuracy, lr = [run["test_accuracy"] for run in runs], options.lr * (size / options.reference if scaled else 1)
    found = {"batch_size": size, "scaled": scaled, "lr": lr, "steps": runs[0]["steps"]}
    for name in ("seconds", "test_loss", "test_accuracy"):
        found[name] = statistics.median(run[name] for run in runs)
    return found | {"test_accuracy_lowest": min(accuracy), "test_accuracy_highest": max(accuracy)}


def report(options: SweepOptions, rows: list[dict]) -> None:
    from hpcdl.runs.folder import environment

    about = environment()
    epochs, seeds = counted(options.epochs, "epoch"), counted(options.seeds, "seed")
    print(f"{options.model} on {options.data}, {epochs}, {options.optimizer}, {seeds}")
    print(f"{about['launch']}; {about['machine']}\n")
    bench.print_table(
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
    bench.write_json("bench-batch-size", options, rows)
    if options.plot:
        draw(options, rows)


def draw(options: SweepOptions, rows: list[dict]) -> None:
    axes = bench.subplot(xlabel="batch size (examples per update)")
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
    lowest = min(row["test_accuracy_lowest"] for row in rows)
    axes.set_ylim(bottom=100 * max(lowest, best - 0.15))  # runs that diverge leave the picture
    axes.set_ylabel(f"test accuracy after {counted(options.epochs, 'epoch')} (%)")
    axes.grid(alpha=0.3)
    steps = axes.twinx()
    some = next(iter(lines.values()))
    steps.plot([row["batch_size"] for row in some], [row["steps"] for row in some], "k:", label="updates")
    steps.set_yscale("log")
    steps.set_ylabel("updates")
    shown = [each.get_legend_handles_labels() for each in (axes, steps)]
    axes.legend(shown[0][0] + shown[1][0], shown[0][1] + shown[1][1], loc="lower left", fontsize="small")
    bench.save(axes, options.plot)


main = bench.benchmark("bench-batch-size", SweepOptions, __doc__, run)


if __name__ == "__main__":
    main()
