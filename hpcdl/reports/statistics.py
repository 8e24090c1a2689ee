"""Means, deviations, and differences beyond noise: paired t tests, with Holm's correction over lines.

Two strategies with the same seed start from the same values and see the same examples, so their difference varies less
than either of them. With the differences d_1, ..., d_n of n seeds, mean m and deviation s,

    interval      m ± t s / sqrt(n)                  t: the 97.5 % quantile of Student's distribution, n - 1 degrees
    p             P(|T| > u), u = |m| sqrt(n) / s    that equal lines differ as much by chance
                  = I_{v / (v + u^2)}(v/2, 1/2)      v = n - 1; I: the regularized incomplete beta function

Several lines are compared with the first one, so their p are corrected together: with L compared lines the k-th
smallest p becomes p_k <- max(p_(k-1), min(1, (L - k + 1) p_k)). A difference is beyond noise if p_k is below 5 %: then
equal lines get a sign in at most 5 % of the comparisons of a measure. Fewer than 3 seeds give no sign. A run that
missed a target is censored: only a lower bound of its cost is known. Then there is no interval, and p is that of the
sign test over the seeds whose order is known, which needs 6 of them for a sign.

(Student, "The probable error of a mean", Biometrika 1908; Holm, "A simple sequentially rejective multiple test
procedure", Scandinavian Journal of Statistics 1979; order of censored pairs: O'Brien and Fleming, "A paired
Prentice-Wilcoxon test for censored paired data", Biometrics 1987)"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
FEWEST = 3  # seeds for a sign


class Statistics(NamedTuple):
    """Statistics of one measure of one line over its seeds. deviation: of the sample; None for one or a censored run.
    censored: how many runs have only a lower bound, which the mean takes instead: the true mean is larger.
    difference: to the first line, in the mean over the seeds that both have; None for the first line. interval: of the
    difference; None for fewer than two pairs or a censored run. p: chance that equal lines differ as much, corrected
    for the number of lines; None for fewer than FEWEST pairs."""

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
    """Return the statistics of one measure for each line, compared with the first one.
    lines: values of each line by seed; None: unknown. bounds: lower bounds of censored runs, else None."""
    bounds = bounds or [[None] * len(values) for values in lines]
    found = [
        one(values, beyond, *((lines[0], bounds[0]) if i else ()))
        for i, (values, beyond) in enumerate(zip(lines, bounds, strict=True))
    ]
    ps = holm([each.p for each in found])
    return [
        each._replace(p=p, within_noise=None if p is None else p >= 1 - LEVEL)
        for each, p in zip(found, ps, strict=True)
    ]


def one(values: Values, bounds: Values, first: Values | None = None, first_bounds: Values = ()) -> Statistics:
    """Return the statistics of one line, with an uncorrected p. first: values of the first line; None: this is it."""
    mine = observed(values, bounds)
    known = [each[0] for each in mine if each]
    censored = sum(bool(each and each[1] is not None) for each in mine)
    mean = math.fsum(known) / len(known) if known else None
    deviation = float(np.std(known, ddof=1)) if len(known) > 1 and not censored else None
    begun = Statistics(len(known), mean, deviation, None, None, None, censored=censored)
    others = [None] * len(mine) if first is None else observed(first, first_bounds)
    pairs = [(a, b) for a, b in zip(mine, others, strict=True) if a and b]
    if not pairs:
        return begun
    differences = np.array([a[0] - b[0] for a, b in pairs])
    begun = begun._replace(difference=float(differences.mean()))
    if any(bound is not None for pair in pairs for _, bound in pair):
        orders = [order(*a, *b) for a, b in pairs]
        # If the mean of bounds contradicts the known order, no difference is known.
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
    """Return 1 if this run's value is known to be larger, -1 if the first line's is, 0 if neither is."""
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
    """Return p of several tests, so corrected that false signs are as rare as with a single test; None stays None."""
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
    """Return the two-sided p of differences (n,), n >= 2; without variation 0, or 1 if all are 0."""
    mean, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(differences.size)
    return t_tails(mean / error, differences.size - 1) if error else float(mean == 0)


def t_tails(t: float, degrees: int) -> float:
    """Return P(|T| > |t|) of Student's distribution."""
    return incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


@cache
def t_quantile(degrees: int) -> float:
    """Return the t with P(|T| > t) = 1 - LEVEL, by bisection."""
    low, high = 1.0, 20.0  # 1.96 for infinitely many degrees, 12.7 for one
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, degrees) > 1 - LEVEL else (low, middle)
    return high


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return I_x(a, b), the regularized incomplete beta function, by its continued fraction (DLMF 8.17.22).
    It converges fast for x < (a + 1) / (a + b + 2); beyond that I_x(a, b) = 1 - I_{1 - x}(b, a)."""
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
