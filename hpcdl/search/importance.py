"""How much of the differences between trials an option alone explains.

The values of an option are put into k groups: choices as they are, ranges in bins with as many trials each. Of n scores
y, y_g of them in group g,

    eta^2      = sum_g n_g (mean(y_g) - mean(y))^2 / sum (y - mean(y))^2       the correlation ratio
    epsilon^2  = 1 - (1 - eta^2) (n - 1) / (n - k)                             without what k groups explain by chance

(Pearson, "On the general theory of skew correlation and non-linear regression", 1905; Kelley, "An unbiased correlation
ratio measure", PNAS 21, 1935). 0: nothing, or no more than chance; 1: all. It is what an option does by itself, in the
mean over all others, as the main effects of functional ANOVA (Hutter, Hoos and Leyton-Brown, ICML 2014): options that
matter only together have little of it, and the shares of several need not add up to 1.

What all trials have in common is compared: their scores at the first rung. Of an option that depends on another one,
the trials in which it was active.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hpcdl.search.search_log_reader import TrialRow, finite

LEAST = 10  # trials below which nothing is said
BINS, IN_A_BIN = 6, 5  # of a range at most; trials of a bin at least


def importance(rows: Iterable[TrialRow], axes: Sequence[Any]) -> list[tuple[str, float | None]]:
    """(name, epsilon^2) of each parameter, the largest first; None, and last, where there are too few trials to say.

    axes: parameters with `name` and `kind` (trial_rows.Axis), or a space with such `parameters`.
    """
    pieces = [row.pieces[0] for row in rows if row.pieces and row.pieces[0].scores and not row.pieces[0].failed]
    points = [(piece.values, math.fsum(piece.scores.values()) / len(piece.scores)) for piece in pieces]
    found = []
    for axis in getattr(axes, "parameters", axes):
        active = [(values[axis.name], score) for values, score in points if axis.name in values]
        found.append((str(axis.name), explained(active, axis.kind == "choice")))
    return sorted(found, key=lambda each: -math.inf if each[1] is None else each[1], reverse=True)


def explained(points: list[tuple[Any, float]], choices: bool) -> float | None:
    """epsilon^2 of (value, score); None for too few, or where all values, or all scores, are the same."""
    if len(points) < LEAST:
        return None
    groups: dict[Any, list[float]] = {}
    if choices or any(finite(value) is None for value, _ in points):
        for value, score in points:
            groups.setdefault(str(value), []).append(score)
    else:
        groups = binned(points)
    scores = [score for _, score in points]
    scale = max(map(abs, scores)) or 1.0  # squares of the largest numbers would be none
    scores = [score / scale for score in scores]
    mean = math.fsum(scores) / len(scores)
    total = math.fsum((score - mean) ** 2 for score in scores)
    if len(groups) < 2 or len(groups) > len(points) // 2 or total <= 1e-24:
        return None
    between = math.fsum(len(group) * (math.fsum(group) / scale / len(group) - mean) ** 2 for group in groups.values())
    eta = min(1.0, between / total)
    return min(1.0, max(0.0, 1 - (1 - eta) * (len(points) - 1) / (len(points) - len(groups))))


def binned(points: list[tuple[Any, float]]) -> dict[Any, list[float]]:
    """Scores in bins of as many trials each, by value; equal values are in the same bin."""
    ordered = sorted(points, key=lambda each: each[0])
    count = max(2, min(BINS, len(ordered) // IN_A_BIN))
    of: dict[Any, int] = {}
    for place, (value, _) in enumerate(ordered):
        of.setdefault(value, place * count // len(ordered))
    groups: dict[Any, list[float]] = {}
    for value, score in ordered:
        groups.setdefault(of[value], []).append(score)
    return groups
