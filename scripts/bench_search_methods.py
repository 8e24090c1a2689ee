"""How much training methods of search need: mpiexec -n 2 python scripts/bench_search_methods.py --data digits

Random search trains each of so many points to the end. Each other method searches the same space, with the same seed
and as many points; both by hpcdl search, with a multilayer perceptron. For each seed it prints random search's best
score and its steps in all, and how many steps, of all trials together, the other method had done when a trial of its
was as good. The table has medians over the seeds with the lowest and highest value.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpcdl.errors import UsageError
from hpcdl.launch.start import Program
from hpcdl.runs.options import option
from hpcdl.search.search_log_reader import EndedPiece, read

SPACE = (
    "lr=log:0.0005..1",
    "batch-size=int:16..512:log",
    "model=mlp:32|mlp:64|mlp:128|mlp:64,64",
    "weight-decay=log:1e-6..1e-2",
)


@dataclass
class MethodsBench:
    """What is searched."""

    data: str = option("digits", "data set")
    methods: str = option("asha,hyperband,tpe", "methods beside random search, with commas between")
    trials: int = option(48, "points of each search")
    epochs: int = option(9, "of a whole training")
    seeds: int = option(5, "searches by each method, with seeds 0, 1, ...")
    json: str = option("", "file for the results")

    def __post_init__(self):
        from hpcdl.launch.benchmark_table import positive

        positive(self, "trials", "epochs", "seeds")
        if "random" in self.methods.split(","):
            raise UsageError("--methods: random search is what the others stand beside; name these")


class Reached(NamedTuple):
    """Of a search: its best score, its steps in all, and after how many the score that was looked for was reached."""

    best: float
    steps: int
    reached: int | None


def run(arguments):
    from mpi4py import MPI

    from hpcdl.launch.benchmark_table import check_files, report, spread
    from hpcdl.launch.launch_consistency import reading
    from hpcdl.launch.program import ended

    world = MPI.COMM_WORLD
    with ended("bench-search-methods", world.rank):
        with reading(world) as parse:
            options = parse(MethodsBench, "bench-search-methods", __doc__, arguments)
            check_files(options, world.rank)
        methods = options.methods.split(",")
        rows, records = [], []
        found = {name: [] for name in ["random", *methods]}
        for seed in range(options.seeds):
            before = searched(world, options, "random", seed)
            found["random"].append(before)
            for name in methods:
                found[name].append(searched(world, options, name, seed, before.best))
        if world.rank == 0:
            for name, each in found.items():
                shares = [
                    one.reached / base.steps for one, base in zip(each, found["random"], strict=True) if one.reached
                ]
                rows.append(
                    {
                        "method": name,
                        "best": spread([one.best for one in each], ".4f"),
                        "steps": spread([one.steps for one in each], ",.0f"),
                        "as good as random's best after": spread(shares, ".1%") if shares else "-",
                        "searches that were": f"{len(shares)} of {len(each)}",
                    }
                )
                records += [{"method": name, "seed": seed, **one._asdict()} for seed, one in enumerate(each)]
            title = f"Search on {options.data}: {options.trials} points, {options.epochs} epochs"
            report(title, "bench-search-methods", options, rows, records)


def searched(world, options: MethodsBench, method: str, seed: int, wanted: float | None = None) -> Reached:
    """One search on all ranks; wanted: the score to be reached, None: its own best. Collective."""
    from hpcdl.scripts import search

    with tempfile.TemporaryDirectory() as own:
        folder = world.bcast(own)
        words = ["train-allreduce", f"--data={options.data}", f"--epochs={options.epochs}", "--trace=0"]
        words += [f"--space={each}" for each in SPACE]
        words += [f"--method={method}", f"--trials={options.trials}", f"--seed={seed}", "--ranks-per-trial=1"]
        try:
            search.main([*words, f"--out={folder}/search", "--progress=none"])
        except SystemExit as end:
            if end.code:
                raise
        mine = walked(read(Path(folder, "search")).ended, wanted) if world.rank == 0 else None
        found: Reached = world.bcast(mine)
    return found


def walked(pieces: list[EndedPiece], wanted: float | None) -> Reached:
    """The pieces of a search in the order in which they have ended."""
    scores = [each.score for each in pieces if each.score is not None]
    if not scores:
        raise UsageError("no trial has a score")
    best = max(scores)
    wanted, total, reached, before = best if wanted is None else wanted, 0, None, {}
    for each in pieces:
        steps = sum(more.get("steps", 0) for more in each.piece.more.values())
        total += steps - before.get(each.trial, 0)
        before[each.trial] = steps
        if reached is None and each.score is not None and each.score >= wanted:
            reached = total
    return Reached(best, total, reached)


main = Program("bench-search-methods", MethodsBench, __doc__, run)


if __name__ == "__main__":
    main()
