"""How idle the groups of a search are: mpiexec -n 8 hpcdl bench-search --trials 64 --spread 0.5

Random search over trials that only sleep, on groups of one rank each, --repeats times. The trials' lengths are
log-normal, and others in each search. They follow from an option, as those of trainings do, and the search learns how;
with --hidden they follow from no option. Printed are medians with the lowest and highest value:

    took      from the first trial's beginning to the last one's end, in seconds
    list      the same trials, in the same order, each given to the first free group without any cost
    best      the longest trial first, which needs all lengths in advance (LPT, at most 4/3 of the optimum, Graham 1969)
    bound     a lower bound for any order: the sum of all lengths over the groups, or the longest
    idle      the part of the groups' time in which no trial ran; the same for `list` and `best`
    per trial from the end of a group's trial to the beginning of its next one: the journal and the messages"""

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
from hpcdl.launch.benchmark_table import benchmark, spread
from hpcdl.runs.options import option, positive
from hpcdl.search.methods.random import point
from hpcdl.search.space import Space


@dataclass
class SearchBench:
    """Options of bench-search: the trials, and how they are handed out."""

    trials: int = option(64, "trials of each search")
    spread: float = option(0.5, "standard deviation of the logarithm of the trials' lengths; 0: equal lengths")
    seconds: float = option(20.0, "seconds that a group sleeps in each search, in the mean over groups")
    repeats: int = option(3, "searches, with seeds 0, 1, ...")
    hidden: bool = option(False, "the trials' lengths follow from no option")
    controller: Literal["shared", "own"] = option("shared", "own: rank 0 hands out trials, and runs none")
    json: str = option("", "file for the results")

    def __post_init__(self):
        positive(self, "trials", "repeats", "seconds")
        if not 0 <= self.spread < 10:
            raise UsageError(f"--spread is a number from 0 to less than 10, not {self.spread}")


def groups_of(options: SearchBench, ranks: int) -> int:
    from hpcdl.search.groups import divide_ranks

    return divide_ranks(ranks, 1, options.controller == "own").groups


def run(world, options: SearchBench, groups: int) -> tuple:
    measured = [measure(world, options, groups, seed) for seed in range(options.repeats)]
    title = f"{counted(options.trials, 'trial')} of log-normal length on {counted(groups, 'group')} of one rank"
    return title, [table_row(measured)], measured


def measure(world, options, groups: int, seed: int) -> dict:
    """Run one search; return its times, equal on all ranks. Collective."""
    from hpcdl.search.library import search

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
    found = summary(took, groups, span)
    found["per_trial_milliseconds"] = 1e3 * statistics.median(gaps) if gaps else None
    found["per_trial_milliseconds_largest"] = 1e3 * max(gaps) if gaps else None
    return found | {"seed": seed}


def summary(lengths: list[float], groups: int, span: float) -> dict:
    """Return times and idle shares of a search of `span` seconds, and of its trials as listed and as best ordered."""
    listed, best = scheduled(lengths, groups), scheduled(sorted(lengths, reverse=True), groups)
    bound, work = max(sum(lengths) / groups, max(lengths)), sum(lengths)
    found = {"groups": groups, "trials": len(lengths), "took_seconds": span, "list_seconds": listed}
    found |= {"best_seconds": best, "bound_seconds": bound}
    idle = {"idle_share": span, "idle_share_list": listed, "idle_share_best": best}
    return found | {name: 1 - work / (groups * took) for name, took in idle.items()}


def scheduled(lengths: list[float], groups: int) -> float:
    """Return the seconds until the last trial ends if each is given, in this order, to the first free group."""
    free = [0.0] * groups
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def table_row(measured: list[dict]) -> dict[str, str]:
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


main = benchmark("bench-search", SearchBench, __doc__, run, groups_of)


if __name__ == "__main__":
    main()
