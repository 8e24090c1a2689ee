"""What consistency and the number of servers cost: mpiexec -n 5 python scripts/bench_servers.py --servers 2

Trains with parameter servers, one scheme after the other and all of them --repeats times, and prints medians with the
lowest and highest value.

    --compare consistency    bsp, ssp with several bounds and async, with --servers servers: how long workers idle,
                             seconds per epoch, test accuracy after the time that the fastest scheme took, and after
                             the same epochs
    --compare servers        1, 2, ... --servers servers, and slices on the workers: milliseconds per step, and bytes
                             that the busiest server and the busiest worker send in a step
"""

import json
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpi4py import MPI

from hpcdl.comm import Communicator, refuse_together
from hpcdl.data import open_data
from hpcdl.errors import UsageError
from hpcdl.models import for_data
from hpcdl.runs import Options, Run
from hpcdl.runs.alike import reading
from hpcdl.runs.benchmark_report import check_files, spread, write_json
from hpcdl.runs.folder import environment
from hpcdl.runs.options import option
from hpcdl.runs.program import ended
from hpcdl.runs.straggler import slowed
from hpcdl.services.consistency import BSP, Consistency
from hpcdl.services.roles import divide
from hpcdl.strategies.parameter_server import train


@dataclass
class BenchOptions:
    """What is trained, and what is compared."""

    compare: Literal["consistency", "servers"] = option("consistency", "what is varied")
    servers: int = option(2, "how many servers; with --compare servers: at most")
    bounds: str = option("1,4,16", "the bounds of ssp, with commas between")
    data: str = option("digits", "data set: digits, or an HDF5 file made by prepare-data")
    model: str = option("mlp", "model, as in train-parameter-server")
    optimizer: str = option("momentum", "optimizer, as in train-parameter-server")
    lr: float = option(0.05, "learning rate")
    batch_per_rank: int = option(16, "examples per gradient")
    epochs: int = option(10, "epochs of each run")
    steps: int = option(0, "steps of each run, instead of --epochs")
    straggler: str = option("", "make computing slower: RANK:FACTOR, or random:PROBABILITY:FACTOR")
    pretend_compute: float = option(0.0, "milliseconds that a gradient takes at least; the rest is slept")
    repeats: int = option(5, "runs of each scheme, with seeds 0, 1, ...")
    json: str = option("", "file for the results")


def main(arguments=None):
    world = MPI.COMM_WORLD
    with ended("bench-servers", world.rank):
        with reading(world) as parse:
            options = parse(BenchOptions, "bench-servers", __doc__, arguments)
            check_files(options, world.rank)
            bounds = [int(text) for text in options.bounds.split(",") if text.isdecimal()]
            if len(bounds) != len(options.bounds.split(",")):
                raise UsageError(f"--bounds: whole numbers with commas between, not {options.bounds!r}")
            for name in ("servers", "repeats"):
                if getattr(options, name) < 1:
                    raise UsageError(f"--{name} must be greater than 0, not {getattr(options, name)}")
            divide(world.size, options.servers)
        if options.compare == "consistency":
            named = [("bsp", 0), *(("ssp", bound) for bound in bounds), ("async", 0)]
            schemes = {
                name if name != "ssp" else f"ssp {bound}": {
                    "servers": options.servers,
                    "consistency": Consistency(name, bound),
                }
                for name, bound in named
            }
        else:
            schemes = {str(count): {"servers": count} for count in range(1, options.servers + 1)}
            schemes["on the workers"] = {"servers": 0, "on_workers": True}
        results = {name: [] for name in schemes}
        for seed in range(options.repeats):
            for name, scheme in schemes.items():
                results[name].append(measure(world, options, scheme, seed))
        if world.rank == 0:
            report(options, results)


def measure(world, options: BenchOptions, scheme: dict, seed: int) -> dict | None:
    """One run; on rank 0 its summary, with the lines of its evaluations."""
    names = ("model", "optimizer", "lr", "batch_per_rank", "epochs", "steps", "straggler", "pretend_compute")
    data = open_data(options.data, comm=world, seed=seed)
    with refuse_together(world):
        settings = Options(**{name: getattr(options, name) for name in names}, seed=seed, progress="none")
        workers = divide(world.size, scheme["servers"]).workers
        model = slowed(for_data(options.model, data, "float32"), settings, world.rank, workers)
    if scheme.get("consistency", BSP).name == "async":  # a step is one worker's
        settings.batch_size, settings.batch_per_rank = settings.batch_per_rank, 0
    folder = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    settings.out = f"{folder}/run"
    comm = Communicator(world)
    with Run(comm, settings, workers=len(workers)) as run:
        optimizer = run.make_optimizer(model, data)
        train(comm, model, data, optimizer, run, **scheme)
    data.close()
    comm.free()
    if world.rank > 0:
        return None
    lines = [json.loads(line) for line in Path(settings.out, "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder)
    scores = [(line["seconds"], line["test_accuracy"]) for line in lines if "test_accuracy" in line]
    return run.summary | {"scores": scores, "workers at": list(workers)}


def report(options: BenchOptions, results: dict) -> None:
    """Print the table, and write the numbers."""
    about = environment()
    print(
        f"{options.model} on {options.data}, {options.optimizer}, {options.batch_per_rank} examples a gradient",
        end="",
    )
    print(f", straggler {options.straggler or 'none'}, a gradient takes {options.pretend_compute:g} ms or more")
    print(f"{about['launch']}; {about['mpi']}; {about['machine']}\n")
    columns = by_consistency(results) if options.compare == "consistency" else by_servers(results)
    print("| " + " | ".join(["", *columns]) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for name in results:
        print("| " + " | ".join([name, *(columns[column][name] for column in columns)]) + " |")
    write_json("bench-servers", options, records(options, results))


def records(options: BenchOptions, results: dict) -> list[dict]:
    """The rows of the file: one for each run."""
    return [
        {
            "compare": options.compare,
            "scheme": name,
            "ranks": run["ranks"],
            "workers": run["workers"],
            "seed": seed,
            "steps": run["steps"],
            "epochs": run["epochs"],
            "seconds": run["seconds"],
            "idle_share_of_workers": idle(run),
            "mean_staleness": staleness(run),
            "sent_bytes_per_rank": run["bytes_sent_per_rank"],
            "test_accuracy": run["test_accuracy"],
            "seconds_per_evaluation": [seconds for seconds, _ in run["scores"]],
            "test_accuracy_per_evaluation": [score for _, score in run["scores"]],
        }
        for name, runs in results.items()
        for seed, run in enumerate(runs)
    ]


def idle(run: dict) -> float:
    """The part of its steps for which a worker was idle, in the mean over the workers."""
    shares = [
        run["idle_seconds_per_rank"][rank]
        / (run["compute_seconds_per_rank"][rank] + run["communication_seconds_per_rank"][rank])
        for rank in run["workers at"]
    ]
    return statistics.mean(shares)


def staleness(run: dict) -> float:
    """Of the gradients, in the mean."""
    counts = run["staleness_histogram"]
    return sum(value * count for value, count in enumerate(counts)) / max(1, sum(counts))


def by_consistency(results: dict) -> dict:
    """The columns of a table that compares consistencies."""

    fastest = [min(runs[i]["seconds"] for runs in results.values()) for i in range(len(results["bsp"]))]

    def after_equal_time(run, i):
        return [score for seconds, score in run["scores"] if seconds <= fastest[i] * (1 + 1e-9)][-1:] or [0.0]

    return {
        "workers idle": {name: spread([idle(run) for run in runs], ".1%") for name, runs in results.items()},
        "seconds per epoch": {
            name: spread([run["seconds"] / run["epochs"] for run in runs], ".3f") for name, runs in results.items()
        },
        "accuracy after equal time": {
            name: spread([after_equal_time(run, i)[0] for i, run in enumerate(runs)], ".2%")
            for name, runs in results.items()
        },
        "after equal epochs": {
            name: spread([run["test_accuracy"] for run in runs], ".2%") for name, runs in results.items()
        },
        "mean staleness": {name: spread([staleness(run) for run in runs], ".2f") for name, runs in results.items()},
    }


def by_servers(results: dict) -> dict:
    """The columns of a table that compares numbers of servers."""

    def busiest(run, workers):
        ranks = [rank for rank in range(run["ranks"]) if (rank in run["workers at"]) == workers]
        return f"{max(run['bytes_sent_per_rank'][rank] for rank in ranks) / run['steps'] / 1e3:,.0f}" if ranks else ""

    return {
        "workers": {name: str(runs[0]["workers"]) for name, runs in results.items()},
        "ms per step": {
            name: spread([1e3 * run["seconds"] / run["steps"] for run in runs], ".1f") for name, runs in results.items()
        },
        "kB sent by the busiest server per step": {name: busiest(runs[0], False) for name, runs in results.items()},
        "by the busiest worker": {name: busiest(runs[0], True) for name, runs in results.items()},
    }


if __name__ == "__main__":
    main()
