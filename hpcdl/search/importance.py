"""How much of the differences between trials a single option explains.

The values of an option form k groups: choices as they are, ranges in bins of equally many trials. For n scores y, of
them y_g in group g,

    eta^2      = sum_g n_g (mean(y_g) - mean(y))^2 / sum (y - mean(y))^2       the correlation ratio
    epsilon^2  = 1 - (1 - eta^2) (n - 1) / (n - k)                     corrected for what k groups explain by chance

(Pearson, "On the general theory of skew correlation and non-linear regression", 1905; Kelley, "An unbiased correlation
ratio measure", PNAS 21, 1935). epsilon^2 is 0 if the option explains no more than chance, and 1 if it explains all. It
averages over all other options, like the main effects of functional ANOVA (Hutter, Hoos and Leyton-Brown, ICML 2014):
options that matter only together have small shares. Only scores of the first rung, with the option active, count."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hpcdl.files import finite
from hpcdl.search.search_log_reader import TrialRow
from hpcdl.search.space import Parameter

LEAST = 10  # fewest trials for a result
BINS, IN_A_BIN = 6, 5  # most bins of a range; fewest trials in a bin


def importance(rows: Iterable[TrialRow], axes: Sequence[Parameter]) -> list[tuple[str, float | None]]:
    """Return (name, epsilon^2) of each parameter, the largest first; where it is unknown (`explained`), None, last."""
    pieces = [row.pieces[0] for row in rows if row.pieces and row.pieces[0].scores and not row.pieces[0].failed]
    points = [(piece.values, math.fsum(piece.scores.values()) / len(piece.scores)) for piece in pieces]
    shares = []
    for axis in axes:
        active = [(values[axis.name], score) for values, score in points if axis.name in values]
        shares.append((axis.name, explained(active, axis.kind == "choice")))
    return sorted(shares, key=lambda each: -math.inf if each[1] is None else each[1], reverse=True)


def explained(points: list[tuple[Any, float]], choices: bool) -> float | None:
    """Return epsilon^2 of points (value, score); None: too few points, equal values or scores. choices: do not bin."""
    if len(points) < LEAST:
        return None
    groups: dict[Any, list[float]] = {}
    if choices or any(finite(value) is None for value, _ in points):
        for value, score in points:
            groups.setdefault(str(value), []).append(score)
    else:
        groups = binned(points)
    scores = [score for _, score in points]
    scale = max(map(abs, scores)) or 1.0  # avoids overflow of the squares
    scores = [score / scale for score in scores]
    mean = math.fsum(scores) / len(scores)
    total = math.fsum((score - mean) ** 2 for score in scores)
    if len(groups) < 2 or len(groups) > len(points) // 2 or total <= 1e-24:
        return None
    between = math.fsum(len(group) * (math.fsum(group) / scale / len(group) - mean) ** 2 for group in groups.values())
    eta = min(1.0, between / total)
    return min(1.0, max(0.0, 1 - (1 - eta) * (len(points) - 1) / (len(points) - len(groups))))


def binned(points: list[tuple[Any, float]]) -> dict[Any, list[float]]:
    """Return the scores in bins of equally many trials, in the order of the values; equal values share a bin."""
    ordered = sorted(points, key=lambda each: each[0])
    count = max(2, min(BINS, len(ordered) // IN_A_BIN))
    groups: dict[Any, list[float]] = {}
    bin_of: dict[Any, int] = {}
    for place, (value, score) in enumerate(ordered):
        chosen = bin_of.setdefault(value, place * count // len(ordered))
        groups.setdefault(chosen, []).append(score)
    return groups
