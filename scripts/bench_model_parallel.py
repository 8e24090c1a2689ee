"""What cutting a model saves and costs: mpiexec -n 4 hpcdl bench-model-parallel --case memory

--case memory     each strategy on 1, 2, 4, ... ranks (as many as there are): what the busiest rank holds in a step,
                  beside 16 bytes for each parameter / N, what it sends, and seconds per step. The runs take turns,
                  --repeats times
--case idle       the pipeline's schedules with each number of micro-batches: the idle share, measured under
                  --pretend-compute, beside the theory's; and the most micro-batches in flight"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from hpcdl.data import from_arrays, open_data
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.launch.benchmark_table import benchmark, in_turns, several, spread, training_options
from hpcdl.models import for_data
from hpcdl.runs.options import option, positive
from hpcdl.strategies import (
    all_reduce,
    fully_sharded,
    grid,
    model_parallel,
    pipeline,
    pipeline_schedules,
    sequential,
    tensor_parallel,
)

ROWS = 8  # test rows that are scored: few, as the end of a run is not measured
CHUNKS = 2  # of a stage, in the interleaved schedule


@dataclass
class ModelBench:
    """Options of bench-model-parallel: the training, and how often it is measured."""

    case: Literal["memory", "idle"] = option(
        "memory", "memory: what strategies hold and take; idle: how idle a pipeline's stages are"
    )
    data: str = option("text", "data set: text, digits, or an HDF5 file made by prepare-data")
    model: str = option("gpt", "model, as in train-pipeline")
    optimizer: str = option("adam", "optimizer")
    dtype: Literal["float32", "float64"] = option("float32", "type of parameters, gradients and messages")
    batch_size: int = option(32, "examples per update, all ranks together")
    microbatches: str = option("8", "numbers of micro-batches, with commas between; --case memory takes the first")
    steps: int = option(10, "steps of a run")
    repeats: int = option(5, "runs of each strategy")
    pretend_compute: float = option(30.0, "--case idle: milliseconds that a stage computes for a micro-batch")
    allreduce: str = option("ring", "all-reduce algorithm, as in train-allreduce")
    json: str = option("", "file for the results")

    def __post_init__(self):
        from hpcdl.comm.allreduce import algorithm

        several(self, "microbatches")
        positive(self, "steps", "repeats", "batch_size")
        algorithm(self.allreduce)


def run(world, options: ModelBench, runs: dict) -> tuple | None:
    from mpi4py import MPI

    from hpcdl.comm import refuse_together

    with refuse_together(world):
        data = few(options)
    groups = {ranks: world.Split(0 if world.rank < ranks else MPI.UNDEFINED) for ranks, _ in runs.values()}
    ways = {name: partial(measure, world, groups[ranks], options, data, train) for name, (ranks, train) in runs.items()}
    results = in_turns(options.repeats if options.case == "memory" else 1, ways)
    if world.rank > 0:
        return None
    rows = memory(runs, results) if options.case == "memory" else idle(runs, results)
    return title(options, results), rows, records(options, runs, results)


def compared(options: ModelBench, size: int) -> dict:
    """Return, by name of each compared training, (number of ranks, function that trains)."""
    m = options.microbatches[0]
    if options.case == "idle":
        if size < 2:
            raise UsageError("--case idle: a pipeline of 1 stage is never idle; start 2 ranks or more")
        found = {}
        for schedule in (each for each in pipeline_schedules.SCHEDULES if each != "pipedream"):
            chunks = CHUNKS if schedule in pipeline_schedules.INTERLEAVED else 1
            for m in options.microbatches:
                if schedule == "dualpipe-v" and m < 2 * size:
                    continue  # it needs more
                pipeline_schedules.actions_of(schedule, size, 0, m, chunks)
                how = {"schedule": schedule, "microbatches": m, "chunks": chunks}
                found[f"{schedule}, m = {m}"] = size, partial(pipeline.train, **how)
        return found
    found = {"sequential": (1, sequential.train)}
    for ranks in (2**k for k in range(1, size.bit_length()) if 2**k <= size):
        ways = {
            "all-reduce": all_reduce.train,
            "layers on ranks": model_parallel.train,
            "pipeline 1f1b": partial(pipeline.train, microbatches=m),
            "pipeline gpipe, recomputing": partial(pipeline.train, schedule="gpipe", microbatches=m, recompute=True),
            "tensor parallel": tensor_parallel.train,
        }
        if "gpt" in options.model:
            ways["tensor and sequence parallel"] = partial(tensor_parallel.train, sequence=True)
        ways |= {f"fully sharded, stage {stage}": partial(fully_sharded.train, stage=stage) for stage in (1, 2, 3)}
        found |= {f"{name}, {ranks}": (ranks, train) for name, train in ways.items()}
        if ranks % 4 == 0:
            shape = {"data": ranks // 4, "pipeline": 2, "tensor": 2}
            found[f"pipeline 2 x tensor 2 x data {ranks // 4}"] = ranks, partial(grid.train, grid=shape, microbatches=m)
            shape = {"data": 2, "pipeline": 1, "tensor": ranks // 2}
            name = f"data 2, stage 3 x tensor {ranks // 2}"
            found[name] = ranks, partial(grid.train, grid=shape, stage=3, microbatches=1)
    return found


def few(options: ModelBench):
    """Return a data set of as many training rows as the steps need, and a few test rows."""
    from mpi4py import MPI

    whole = open_data(options.data, comm=MPI.COMM_SELF, dtype=options.dtype)
    x, y = whole.train.rows(0, min(whole.examples, options.batch_size * options.steps))
    x_test, y_test = whole.test.rows(0, min(ROWS, whole.test.examples))
    shape = -1, *whole.features
    found = from_arrays(
        x.reshape(shape), y, x_test.reshape(shape), y_test, classes=whole.classes, name=whole.name, dtype=options.dtype
    )
    whole.close()
    return found


def measure(world, group, options: ModelBench, data, train, turn: int) -> dict:
    """Run one training on the ranks of `group`, while other ranks nap; return its summary, {} except on rank 0."""
    from mpi4py import MPI

    from hpcdl.comm import Communicator
    from hpcdl.comm.progress import nap_until
    from hpcdl.faults.straggler import with_stragglers
    from hpcdl.runs import Run

    summary = {}
    if group != MPI.COMM_NULL:
        pretended = options.pretend_compute if options.case == "idle" else 0.0
        how = {"lr": 0.001, "seed": turn, "evaluate_every": options.steps, "pretend_compute": pretended}
        settings = training_options(options, **how)
        comm = Communicator(group, options.allreduce)
        model = for_data(options.model, data, options.dtype)
        with Run(comm, settings) as run:
            whole = train is sequential.train or train is all_reduce.train
            optimizer = run.make_optimizer(model, data, None if whole else 0)
            train(comm, with_stragglers(model, settings, comm.rank, range(comm.size)), data, optimizer, run)
        comm.free()
        summary = run.summary or {}
    over = world.Ibarrier()
    nap_until(over.Test, "the others")
    return summary


def records(options, runs, results) -> list[dict]:
    rows = []
    for name, (ranks, train) in runs.items():
        how = getattr(train, "keywords", {}) if options.case == "idle" else {}
        for seed, run in enumerate(results[name]):
            row = {"case": options.case, "strategy": name.removesuffix(f", {ranks}"), "ranks": ranks, "seed": seed}
            row |= {key: how[key] for key in ("schedule", "microbatches", "chunks") if key in how}
            row |= {"parameters": run["parameters"], "seconds_per_step": run["seconds"] / run["steps"]}
            row |= {f"{kind}_bytes_per_rank": held for kind, held in run["memory_bytes_per_rank"].items()}
            row["sent_bytes_per_rank"] = run["bytes_sent_per_rank"]
            if how:
                planned = pipeline_schedules.plan(how["schedule"], ranks, how["microbatches"], how["chunks"])
                row |= {"idle_share": run["idle_share"], "idle_share_theory": pipeline_schedules.idle_share(planned)}
                row["in_flight_per_rank"] = run["in_flight_per_rank"]
            rows.append(row)
    return rows


def memory(runs, results) -> list[dict]:
    kinds = "parameters", "gradients", "optimizer", "activations"
    rows, base = [], [run["seconds"] / run["steps"] for run in results["sequential"]]
    for name, (ranks, _) in runs.items():
        one, mib = results[name][0], 2**20
        held = one["memory_bytes_per_rank"]
        busiest = max(range(ranks), key=lambda r: sum(held[kind][r] for kind in kinds))
        seconds = [run["seconds"] / run["steps"] for run in results[name]]
        ratios = [a / b for a, b in zip(seconds, base, strict=True)]
        rows.append(
            {"strategy": name.removesuffix(f", {ranks}"), "ranks": str(ranks)}
            | {f"{kind}, MiB": f"{held[kind][busiest] / mib:.2f}" for kind in kinds}
            | {
                "without activations": f"{sum(held[kind][busiest] for kind in kinds[:3]) / mib:.2f}",
                "16 bytes a parameter / N": f"{16 * one['parameters'] / ranks / mib:.2f}",
                "MB sent a step": f"{max(one['bytes_sent_per_rank']) / one['steps'] / 1e6:.2f}",
                "ms a step": spread([1e3 * each for each in seconds], ".0f"),
                "of sequential": spread(ratios, ".2f"),
            }
        )
    return rows


def idle(runs, results) -> list[dict]:
    rows = []
    for name, (stages, train) in runs.items():
        one, how = results[name][0], train.keywords
        m, v = how["microbatches"], how["chunks"]
        planned = pipeline_schedules.plan(how["schedule"], stages, m, v)
        rows.append(
            {
                "schedule": how["schedule"],
                "micro-batches": str(m),
                "idle, theory": f"{pipeline_schedules.idle_share(planned):.3f}",
                "idle, measured": f"{one['idle_share']:.3f}",
                "in flight on stage 0, 1, ...": " ".join(map(str, one["in_flight_per_rank"])),
                "ms a step": f"{1e3 * one['seconds'] / one['steps']:.0f}",
            }
        )
    return rows


def title(options: ModelBench, results: dict) -> str:
    one = next(iter(results.values()))[0]
    what = f"{options.model} ({one['parameters']:,} parameters, {one['dtype']}) on {one['data']}, {options.optimizer}"
    more = (
        f"{counted(options.repeats, 'run')} each"
        if options.case == "memory"
        else f"pretending {options.pretend_compute:g} ms"
    )
    return f"{what}, {counted(options.batch_size, 'example')} an update, {counted(options.steps, 'step')}, {more}"


main = benchmark("bench-model-parallel", ModelBench, __doc__, run, compared)


if __name__ == "__main__":
    main()
