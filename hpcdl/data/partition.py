"""Which rows belong to which rank: pure functions of labels, number of ranks and seed.

    iid               the shuffled rows, cut into equal parts
    by-label          the rows sorted by label, cut into equal parts: a rank sees one label or few
                      (the pathological case of McMahan et al., "Communication-efficient learning of deep networks from
                      decentralized data", AISTATS 2017)
    dirichlet:ALPHA   each class c is cut at random in the proportions p_c ~ Dirichlet(ALPHA, ..., ALPHA), one number
                      per rank: a small ALPHA gives a class to few ranks, a large one is nearly iid
                      (Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML 2019)

Each function returns a list with one sorted array of row numbers per rank; together they hold every row once.
"""

import math

import numpy as np

from hpcdl.chunks import chunks
from hpcdl.errors import UsageError, unknown
from hpcdl.random import Random

PARTITIONS = ("iid", "by-label", "dirichlet:ALPHA")


def parse_partition(spec: str, classes: int) -> tuple[str, float]:
    """Read `iid`, `by-label` or `dirichlet:ALPHA` into (name, alpha); UsageError where it makes no sense."""
    name, colon, text = spec.partition(":")
    if name not in ("iid", "by-label", "dirichlet") or (colon and name != "dirichlet"):
        raise unknown("partition", spec, PARTITIONS)
    alpha = 0.0
    if name == "dirichlet":
        try:
            alpha = float(text)
        except ValueError:
            raise UsageError(f"partition {spec!r}: write dirichlet:ALPHA with a number, as in dirichlet:0.5") from None
        if not (alpha > 0 and math.isfinite(alpha)):
            raise UsageError(f"partition {spec!r}: alpha must be greater than 0, as in dirichlet:0.5")
    if name != "iid" and classes == 0:
        raise UsageError(f"partition {spec!r} needs class labels, and this is regression data; use iid")
    return name, alpha


def partition(spec: str, labels: np.ndarray, classes: int, ranks: int, seed: int) -> list[np.ndarray]:
    """The rows of each rank by name; labels (examples,) are class numbers."""
    name, alpha = parse_partition(spec, classes)
    if name == "iid":
        return iid(len(labels), ranks, seed)
    if name == "by-label":
        return by_label(labels, ranks)
    return dirichlet(labels, ranks, alpha, seed)


def iid(examples: int, ranks: int, seed: int) -> list[np.ndarray]:
    """Rows dealt out at random, in equal numbers."""
    shuffled = Random(seed)("partition").permutation(examples)
    return [np.sort(shuffled[part]) for part in chunks(examples, ranks)]


def by_label(labels: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Rows sorted by label and cut into equal numbers."""
    by = np.argsort(labels, kind="stable")
    return [np.sort(by[part]) for part in chunks(len(labels), ranks)]


def dirichlet(labels: np.ndarray, ranks: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Each class cut in proportions drawn from Dirichlet(alpha); a rank may get no rows."""
    parts = [[] for _ in range(ranks)]
    for label in np.unique(labels):
        random = Random(seed)("partition", label)
        rows = random.permutation(np.flatnonzero(labels == label))
        proportions = random.dirichlet(np.full(ranks, alpha))
        cuts = np.rint(np.cumsum(proportions)[:-1] * len(rows)).astype(np.int64)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]


def hold_out(labels: np.ndarray, classes: int, fraction: float, random: np.random.Generator) -> np.ndarray:
    """Sorted numbers of round(fraction * n) rows drawn for testing or validation, stratified where classes > 0.

    Each class gives floor(fraction * its rows); what is still missing comes from the largest remainders.
    """
    take = round(fraction * len(labels))
    if classes == 0:
        return np.sort(random.permutation(len(labels))[:take])
    quota = fraction * np.bincount(labels, minlength=classes)
    counts = np.floor(quota).astype(np.int64)
    largest = np.argsort(counts - quota, kind="stable")
    counts[largest[: take - counts.sum()]] += 1
    rows = [random.permutation(np.flatnonzero(labels == c))[: counts[c]] for c in range(classes)]
    return np.sort(np.concatenate(rows))
