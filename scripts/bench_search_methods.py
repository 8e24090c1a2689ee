"""How much training methods of search need: mpiexec -n 2 hpcdl bench-search-methods --data digits

Random search trains each of --trials points to the end. Each other method searches the same space, with the same seed
and as many points; both by hpcdl search, with a multilayer perceptron. The table has each method's best score, its
steps in all trials together, and its steps until a trial was as good as random search's best, as a part of all steps of
random search: medians over the seeds with the lowest and highest value."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpcdl.errors import UsageError
from hpcdl.launch.benchmark_table import benchmark, spread
from hpcdl.runs.options import option, positive
from hpcdl.search.search_log_reader import EndedPiece, read

SPACE = (
    "lr=log:0.0005..1",
    "batch-size=int:16..512:log",
    "model=mlp:32|mlp:64|mlp:128|mlp:64,64",
    "weight-decay=log:1e-6..1e-2",
)


@dataclass
class MethodsBench:
    """Options of bench-search-methods: the searched training."""

    data: str = option("digits", "data set")
    methods: str = option("asha,hyperband,tpe", "methods beside random search, with commas between")
    trials: int = option(48, "points of each search")
    epochs: int = option(9, "epochs of a whole training")
    seeds: int = option(5, "searches by each method, with seeds 0, 1, ...")
    json: str = option("", "file for the results")

    def __post_init__(self):
        positive(self, "trials", "epochs", "seeds")
        if "random" in self.methods.split(","):
            raise UsageError("--methods: random search always runs; name the methods to compare with it")


class Reached(NamedTuple):
    """A search's best score, its steps in total, and the steps until the wanted score was reached; None: never."""

    best: float
    steps: int
    reached: int | None


def run(world, options: MethodsBench, _) -> tuple:
    methods = options.methods.split(",")
    rows, records = [], []
    found = {name: [] for name in ["random", *methods]}
    for seed in range(options.seeds):
        before = searched(world, options, "random", seed)
        found["random"].append(before)
        for name in methods:
            found[name].append(searched(world, options, name, seed, before.best))
    for name, each in found.items():
        shares = [one.reached / base.steps for one, base in zip(each, found["random"], strict=True) if one.reached]
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
    return f"Search on {options.data}: {options.trials} points, {options.epochs} epochs", rows, records


def searched(world, options: MethodsBench, method: str, seed: int, wanted: float | None = None) -> Reached:
    """Run one search on all ranks. wanted: the score to be reached; None: the search's own best. Collective."""
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
    """Return what a search has reached, from its pieces in the order of their ends. UsageError if none has a score."""
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


main = benchmark("bench-search-methods", MethodsBench, __doc__, run, stoppable=True)


if __name__ == "__main__":
    main()
