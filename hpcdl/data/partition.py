"""Partitions of the rows among ranks or federated clients: pure functions of labels, number of parts and seed.

    iid               the shuffled rows, cut into equal parts
    by-label          the rows sorted by label, cut into equal parts: a part has one label or few
    shards:S          the rows sorted by label, cut into S shards per part (default 2); a part gets S of them at random,
                      with about S labels at most (the pathological split of McMahan et al., AISTATS 2017)
    dirichlet:ALPHA   each class is cut at random in proportions ~ Dirichlet(ALPHA, ..., ALPHA), one per part: a small
                      ALPHA gives a class to few parts, a large one is nearly iid (Yurochkin et al., ICML 2019)
    column:NAME       each part gets its chunk of the owners, whose rows stay together; train/NAME: each row's owner

Each function returns a list with one sorted array of row numbers per part; together they hold every row once."""

import math
from typing import Any

import numpy as np

from hpcdl.chunks import chunks
from hpcdl.errors import UsageError, parse_integer, refuse_beyond, unknown
from hpcdl.memory import available
from hpcdl.random import Random

SHARD = 250  # bytes that a shard takes at least, about
PARTITIONS = ("iid", "by-label", "shards:S", "dirichlet:ALPHA", "column:NAME")


def parse_partition(spec: str, classes: int) -> tuple[str, Any]:
    """Split a partition spec into its name and its value behind the colon; UsageError if it is invalid."""
    name, colon, text = spec.partition(":")
    known = {spec_form.partition(":")[0] for spec_form in PARTITIONS}
    if name not in known or (colon and name in ("iid", "by-label")):
        raise unknown("partition", spec, PARTITIONS)
    value: float | int | str | None = None
    if name == "dirichlet":
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"partition {spec!r}: write dirichlet:ALPHA with a number, as in dirichlet:0.5") from None
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"partition {spec!r}: alpha must be greater than 0, as in dirichlet:0.5")
    elif name == "shards":
        try:
            value = parse_integer(text if colon else "2")
        except ValueError:
            value = 0
        if value < 1:
            raise UsageError(f"partition {spec!r}: write shards:S with a number of 1 or more, as in shards:2")
    elif name == "column":
        value = text
        if text in ("", "x", "y"):
            raise UsageError(f"partition {spec!r}: write column:NAME with a data set of the file, as in column:group")
    if name not in ("iid", "column") and classes == 0:
        raise UsageError(f"partition {spec!r} needs class labels, and this is regression data; use iid or column:NAME")
    return name, value


def check_shards(name: str, per_part: Any, examples: int, parts: int = 1) -> None:
    """Raise UsageError if the partition is shards, with more per part than examples, or more than fit into memory."""
    if name == "shards":
        if per_part > examples:
            what = f"there are {examples} training examples, and a part can have at most as many shards"
            raise UsageError(f"partition 'shards:{per_part}': {what}")
        refuse_beyond(f"partition 'shards:{per_part}', for {parts} parts,", SHARD * per_part * parts, available())


def partition(
    spec: str, labels: np.ndarray, classes: int, parts: int, seed: int, owners: np.ndarray | None = None
) -> list[np.ndarray]:
    """Return the sorted rows of each part. labels: class numbers (examples,). owners (examples,): for column:NAME."""
    name, value = parse_partition(spec, classes)
    if name == "iid":
        return iid(len(labels), parts, seed)
    if name == "by-label":
        return by_label(labels, parts)
    if name == "shards":
        return shards(labels, parts, value, seed)
    if name == "column":
        return by_owner(np.asarray(owners), parts)
    return dirichlet(labels, parts, value, seed)


def iid(examples: int, ranks: int, seed: int) -> list[np.ndarray]:
    """Return random parts of equal size."""
    shuffled = Random(seed)("partition").permutation(examples)
    return [np.sort(shuffled[part]) for part in chunks(examples, ranks)]


def by_label(labels: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Return parts of equal size of the rows sorted by label."""
    order = np.argsort(labels, kind="stable")
    return [np.sort(order[part]) for part in chunks(len(labels), ranks)]


def dirichlet(labels: np.ndarray, ranks: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Return parts that share each class in proportions drawn from Dirichlet(alpha); a part may be empty."""
    parts: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for label in np.unique(labels):
        random = Random(seed)("partition", label)
        rows = random.permutation(np.flatnonzero(labels == label))
        proportions = random.dirichlet(np.full(ranks, alpha))
        cuts = np.rint(np.cumsum(proportions)[:-1] * len(rows)).astype(np.int64)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]


def shards(labels: np.ndarray, parts: int, per_part: int, seed: int) -> list[np.ndarray]:
    """Return parts of `per_part` random shards; the rows, sorted by label, are cut into per_part * parts shards."""
    check_shards("shards", per_part, len(labels), parts)
    pieces = by_label(labels, per_part * parts)
    dealt = Random(seed)("partition").permutation(per_part * parts).reshape(parts, per_part)
    return [np.sort(np.concatenate([pieces[shard] for shard in mine])) for mine in dealt]


def by_owner(owners: np.ndarray, parts: int) -> list[np.ndarray]:
    """Return the rows of whole owners: each part gets its chunk of the sorted owners, none if there are too few."""
    _, counts = np.unique(owners, return_counts=True)
    ends, order = np.cumsum([0, *counts]), np.argsort(owners, kind="stable")
    return [np.sort(order[ends[part.start] : ends[part.stop]]) for part in chunks(len(counts), parts)]


def hold_out(labels: np.ndarray, classes: int, fraction: float, random: np.random.Generator) -> np.ndarray:
    """Return round(fraction * n) of n rows, drawn for testing or validation and sorted; stratified if classes > 0.
    Each class gives floor(fraction * its rows); the classes with the largest remainders give one more each."""
    take = round(fraction * len(labels))
    if classes == 0:
        return np.sort(random.permutation(len(labels))[:take])
    quota = fraction * np.bincount(labels, minlength=classes)
    counts = np.floor(quota).astype(np.int64)
    largest = np.argsort(counts - quota, kind="stable")
    counts[largest[: take - counts.sum()]] += 1
    rows = [random.permutation(np.flatnonzero(labels == c))[: counts[c]] for c in np.unique(labels)]
    return np.sort(np.concatenate(rows))
