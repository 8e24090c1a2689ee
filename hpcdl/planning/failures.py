"""The optimal checkpoint interval on N nodes with a mean time between failures of m hours each.

    M = m / N                                       mean time between failures of the job
    a segment: work t, then a checkpoint C          succeeds with e^-(t + C) / M; a failure costs a restart R
    expected time of work W                         W / t M e^(R/M) (e^((t + C)/M) - 1)
    Young's interval                                sqrt(2 C M)
    Daly's                                          sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C, or M where C > 2 M
    the best                                        where the expected time is least, found by bisection

Failures come at exponential times, and may hit a restart, too. (Young, "A first order approximation to the optimum
checkpoint interval", CACM 1974; Daly, "A higher order estimate of the optimum checkpoint interval", FGCS 2006)"""

import math

import numpy as np

from hpcdl.random import Random

SHORT = 1e-12


def young(between: float, checkpoint: float) -> float:
    """Return Young's first-order interval, in the unit of `between` (M) and `checkpoint` (C)."""
    return math.sqrt(2 * checkpoint * between)


def daly(between: float, checkpoint: float) -> float:
    """Return Daly's higher-order interval."""
    if checkpoint >= 2 * between:
        return between
    ratio = checkpoint / (2 * between)
    return young(between, checkpoint) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def slowdown(interval: float, between: float, checkpoint: float, restart: float) -> float:
    """Return the expected time per unit of work; infinite on overflow."""
    try:
        return between * math.exp(restart / between) * math.expm1((interval + checkpoint) / between) / interval
    except OverflowError:
        return math.inf


def optimal_interval(between: float, checkpoint: float, restart: float) -> float:
    """Return the interval with the least expected time: the zero of its derivative, e^(-(t + C)/M) = 1 - t/M."""
    low, high = 0.0, between
    while high - low > SHORT * between:
        middle = (low + high) / 2
        if math.exp(-(middle + checkpoint) / between) > 1 - middle / between:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def simulate_runs(
    work: float, interval: float, between: float, checkpoint: float, restart: float, runs: int, random: Random
) -> np.ndarray:
    """Return the simulated time of each run (runs,), with failures drawn one by one."""
    segments = max(1, round(work / interval))
    seconds = np.zeros(runs)
    for segment in range(segments):
        keyed = random("failure", segment)
        open, restarting = np.arange(runs), np.zeros(runs, bool)
        while len(open):
            until = keyed.exponential(between, len(open))
            needed = np.where(restarting[open], restart, 0.0) + interval + checkpoint
            failed = until < needed
            seconds[open] += np.where(failed, until, needed)
            restarting[open] |= failed
            open = open[failed]
    return seconds
