"""How idle the groups of a search are: mpiexec -n 8 python scripts/bench_search.py --trials 64 --spread 0.5

Random search over trials that only sleep, for log-normal lengths, on groups of one rank each; --repeats times over,
with other lengths. These follow from an option, as those of trainings do, and the search learns how; --hidden: from
nothing that could be known. Printed are medians with the lowest and highest value:

    took      from the first trial's beginning to the last one's end, in seconds
    list      the same trials, in the same order, each given at once to who is free first: no costs of handing out
    best      the longest first, as only who knows the lengths can (LPT, at most 4/3 of the best there is, Graham 1969)
    bound     what no order is below: the sum of all lengths over the groups, or the longest
    idle      the part of the groups' time in which none of their trials ran; and of that of `list` and `best`
    per trial from the end of a group's trial to the beginning of its next one: the journal and the messages
"""

import contextlib
import heapq
import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.launch.benchmark_table import benchmark, positive, report, spread
from hpcdl.runs.options import option
from hpcdl.search.groups import divide_ranks
from hpcdl.search.library import search
from hpcdl.search.methods.random import point
from hpcdl.search.space import Space


@dataclass
class SearchBench:
    """What is tried, and how."""

    trials: int = option(64, "trials of each search")
    spread: float = option(0.5, "standard deviation of the logarithm of their lengths; 0: all are alike")
    seconds: float = option(20.0, "of sleeping, in the mean over groups, in each search")
    repeats: int = option(3, "searches, with seeds 0, 1, ...")
    hidden: bool = option(False, "lengths follow from no option")
    controller: Literal["shared", "own"] = option("shared", "own: rank 0 hands out, and tries nothing")
    json: str = option("", "file for the results")

    def __post_init__(self):
        positive(self, "trials", "repeats")
        if not 0 <= self.spread < 10:
            raise UsageError(f"--spread {self.spread}: a number from 0 to 10")
        if not 0 < self.seconds < float("inf"):
            raise UsageError(f"--seconds {self.seconds}: a number above 0")


def main(arguments=None):
    def groups_of(options, ranks):
        return divide_ranks(ranks, 1, options.controller == "own").groups

    with benchmark("bench-search", SearchBench, __doc__, arguments, groups_of) as (world, options, groups):
        measured = [measure(world, options, groups, seed) for seed in range(options.repeats)]
        if world.rank == 0:
            title = f"{counted(options.trials, 'trial')} of log-normal length on {counted(groups, 'group')} of one rank"
            report(title, "bench-search", options, [table_row(measured)], measured)


def measure(world, options, groups: int, seed: int) -> dict:
    """What one search took, on all ranks the same; collective."""
    space = Space.read(["x=0.0..1.0"])
    places = [point(space, seed, number)["x"] for number in range(options.trials)]
    if options.hidden:
        places = np.random.default_rng(seed).random(options.trials).tolist()
    lengths = np.exp([options.spread * NormalDist().inv_cdf(min(max(place, 1e-9), 1 - 1e-9)) for place in places])
    lengths *= options.seconds * groups / lengths.sum()
    ran: list[tuple[int, float, float]] = []  # of this rank: trial, begin, end

    def sleep(trial, comm):
        begun = time.perf_counter()
        time.sleep(lengths[trial.number])
        ran.append((trial.number, begun, time.perf_counter()))
        return trial["x"]

    how = {"trials": options.trials, "seed": seed, "controller": options.controller}
    with tempfile.TemporaryDirectory() if world.rank == 0 else contextlib.nullcontext() as folder:
        world.Barrier()
        origin = time.perf_counter()
        search(world, space, sleep, "random", folder=world.bcast(folder), **how)
    everyone = world.allgather([(trial, begun - origin, end - origin) for trial, begun, end in ran])
    took = [0.0] * options.trials
    for trial, begun, end in itertools.chain(*everyone):
        took[trial] = end - begun
    span = max(end for each in everyone for *_, end in each) - min(begun for each in everyone for _, begun, _ in each)
    gaps = [after[1] - before[2] for each in everyone for before, after in itertools.pairwise(each)]
    return summary(took, groups, span) | {
        "per_trial_milliseconds": 1e3 * statistics.median(gaps) if gaps else None,
        "per_trial_milliseconds_largest": 1e3 * max(gaps) if gaps else None,
        "seed": seed,
    }


def summary(lengths: list[float], groups: int, span: float) -> dict:
    """A search of trials that took so long beside the same trials without costs, and in the best order."""
    listed, best = scheduled(lengths, groups), scheduled(sorted(lengths, reverse=True), groups)
    bound, work = max(sum(lengths) / groups, max(lengths)), sum(lengths)
    return {
        "groups": groups,
        "trials": len(lengths),
        "took_seconds": span,
        "list_seconds": listed,
        "best_seconds": best,
        "bound_seconds": bound,
        "idle_share": 1 - work / (groups * span),
        "idle_share_list": 1 - work / (groups * listed),
        "idle_share_best": 1 - work / (groups * best),
    }


def scheduled(lengths: list[float], groups: int) -> float:
    """When all have ended that are given, in this order, each to who is free first."""
    free = [0.0] * groups
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def table_row(measured: list[dict]) -> dict[str, str]:
    """The cells of the table."""
    columns = {
        "took, s": ("took_seconds", ".2f"),
        "list, s": ("list_seconds", ".2f"),
        "best, s": ("best_seconds", ".2f"),
        "bound, s": ("bound_seconds", ".2f"),
        "idle": ("idle_share", ".1%"),
        "idle, list": ("idle_share_list", ".1%"),
        "idle, best": ("idle_share_best", ".1%"),
        "per trial, ms": ("per_trial_milliseconds", ".2f"),
    }
    cells = {}
    for title, (name, form) in columns.items():
        values = [each[name] for each in measured if each[name] is not None]
        cells[title] = spread(values, form) if values else "-"
    return cells


if __name__ == "__main__":
    main()
