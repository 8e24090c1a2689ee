"""Means, deviations, and differences that are told from noise: paired t tests, with Holm's correction over lines.

Two strategies with the same seed start from the same values and see the same examples, so their difference varies less
than either of them. With the differences d_1, ..., d_n of n seeds, mean m and deviation s,

    interval      m ± t s / sqrt(n)                  t: the 97.5 % quantile of Student's distribution, n - 1 degrees
    p             P(|T| > |m| sqrt(n) / s)           that equal lines differ as much as that by chance
                  = I_{v / (v + t^2)}(v/2, 1/2)      v = n - 1; I: the regularized incomplete beta function

Several lines are compared with the first one, so their p are corrected together: with L lines the k-th smallest p
becomes p_k <- max(p_(k-1), min(1, (L - k + 1) p_k)), and a difference is beyond noise where that is below 5 %. Then
equal lines bring any sign in 5 % of the comparisons of a measure at most. Fewer than 3 seeds bring none.

A run that missed a target is censored: what it took is known to be more than what it had taken at its end. Where that
occurs, there is no interval; p is that of the sign test over the seeds whose order is known, which needs 6 of them.

(Student, "The probable error of a mean", Biometrika 1908; Holm, "A simple sequentially rejective multiple test
procedure", Scandinavian Journal of Statistics 1979; paired comparisons with censoring: O'Brien and Fleming, "A paired
Prentice-Wilcoxon test for censored paired data", Biometrics 1987, whose order of pairs is taken here)
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
FEWEST = 3  # seeds for a sign


class Statistics(NamedTuple):
    """Of one measure of one line, over its seeds. deviation: of the sample; None of one run.

    censored: runs of which only a bound is known, which the mean takes in its place: the true mean is larger.
    difference: in the mean over the seeds that both lines have, to the first line; None for that. interval: of it, None
    for less than two pairs, and where a run is censored. p: that equal lines differ as much, corrected for the number
    of lines; None for less than FEWEST pairs.
    """

    runs: int
    mean: float | None
    deviation: float | None
    difference: float | None
    interval: tuple[float, float] | None
    within_noise: bool | None
    p: float | None = None
    censored: int = 0


Values = Sequence[float | None]


def of_lines(lines: Sequence[Values], bounds: Sequence[Values] | None = None) -> list[Statistics]:
    """Of one measure: the statistics of each line, by seed, beside the first one.

    lines: the values of each, seed by seed; None: there is none of that seed. bounds: where a run is censored, what its
    value is known to be larger than; else None.
    """
    bounds = bounds or [[None] * len(values) for values in lines]
    found = [
        one(values, beyond, *((lines[0], bounds[0]) if i else (None, None)))
        for i, (values, beyond) in enumerate(zip(lines, bounds, strict=True))
    ]
    ps = holm([each.p for each in found])
    return [
        each._replace(p=p, within_noise=None if p is None else p >= 1 - LEVEL)
        for each, p in zip(found, ps, strict=True)
    ]


def one(values: Values, bounds: Values, first: Values | None, first_bounds: Values | None) -> Statistics:
    """Return the statistics of one line; p: uncorrected."""
    mine = observed(values, bounds)
    known = [each[0] for each in mine if each]
    censored = sum(bool(each and each[1] is not None) for each in mine)
    mean = math.fsum(known) / len(known) if known else None
    deviation = float(np.std(known, ddof=1)) if len(known) > 1 and not censored else None
    begun = Statistics(len(known), mean, deviation, None, None, None, censored=censored)
    if first is None or first_bounds is None:
        return begun
    pairs = [(a, b) for a, b in zip(mine, observed(first, first_bounds), strict=True) if a and b]
    if not pairs:
        return begun
    differences = np.array([a[0] - b[0] for a, b in pairs])
    begun = begun._replace(difference=float(differences.mean()))
    if any(bound is not None for pair in pairs for _, bound in pair):
        orders = [order(*a, *b) for a, b in pairs]
        # The mean of bounds may point the other way than what is known; then nothing is.
        p = sign_test(orders) if sum(orders) * differences.mean() > 0 else 1.0
        return begun._replace(p=p if len(pairs) >= FEWEST else None)
    if len(pairs) < 2:
        return begun
    return begun._replace(interval=interval(differences), p=paired_t(differences) if len(pairs) >= FEWEST else None)


def observed(values: Values, bounds: Values) -> list[tuple[float, float | None] | None]:
    """Return (value or bound, bound) of each run; None if neither is known."""
    return [
        (value, None) if value is not None else None if bound is None else (bound, bound)
        for value, bound in zip(values, bounds, strict=True)
    ]


def order(mine: float, bound: float | None, first: float, first_bound: float | None) -> int:
    """1 where this run's value is known to be the larger, -1 where the first line's is, 0 where neither is."""
    if bound is None and first_bound is None:
        return (mine > first) - (mine < first)
    if bound is not None and first_bound is None and mine >= first:
        return 1
    return -1 if bound is None and first >= mine else 0


def sign_test(orders: Sequence[int]) -> float:
    """Return the exact two-sided p of signs 1 and -1; 0 is ignored."""
    larger, smaller = orders.count(1), orders.count(-1)
    n = larger + smaller
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(larger, smaller) + 1)) / 2**n)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """p of several tests, corrected so that the chance of any false one stays as it is; None stays None."""
    found, least = list(ps), 0.0
    rising = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    for k, (p, i) in enumerate(rising):
        found[i] = least = max(least, min(1.0, (len(rising) - k) * p))
    return found


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the interval of the mean of differences (n,), n >= 2."""
    mean, count = float(differences.mean()), differences.size
    half = t_quantile(count - 1) * float(differences.std(ddof=1)) / math.sqrt(count)
    return mean - half, mean + half


def paired_t(differences: np.ndarray) -> float:
    """The two-sided p of these differences, (n,), n at least 2; of equal ones 0, or 1 where they are 0."""
    mean, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(differences.size)
    if error == 0:
        return float(mean == 0)
    return t_tails(mean / error, differences.size - 1)


def t_tails(t: float, degrees: int) -> float:
    """Return P(|T| > |t|) of Student's distribution."""
    return incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


@cache
def t_quantile(degrees: int) -> float:
    """Return the t with P(|T| > t) = 1 - LEVEL, by bisection."""
    low, high = 1.0, 20.0  # 1.96 of infinitely many degrees, 12.7 of one
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, degrees) > 1 - LEVEL else (low, middle)
    return high


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b), for 0 <= x <= 1.

    Its continued fraction (DLMF 8.17.22), which converges fast for x < (a + 1) / (a + b + 2); beyond that
    I_x(a, b) = 1 - I_{1 - x}(b, a).
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    factor = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    fraction = 1.0
    for m in range(60, 0, -1):  # from its end
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = 1 + even / (1 + odd / fraction)
    return factor / (1 - (a + b) * x / (a + 1) / fraction)
