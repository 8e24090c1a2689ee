"""Classes of unequal size: their weights in the losses of a training, and advice before it begins.

    balanced            n / (classes * n_c): of n training rows n_c have class c, so that all classes weigh the same
    NAME=5,OTHER=2      these weights; classes without a name weigh 1

A loss that counts rows alike is small, and the accuracy high, for a model that never predicts a rare class."""

import contextlib
from typing import Any

import numpy as np

from hpcdl.data.placement import run_together
from hpcdl.errors import UsageError, nearest, parse_finite, printable

RARE = 10  # a class with less than this part of the rows that it would have among equal classes is rare


def read_class_weights(text: str) -> dict[str, float]:
    """Parse --class-weight NAME=5,OTHER=2; {} for "" and balanced. Raises UsageError."""
    weights: dict[str, float] = {}
    for item in text.split(",") if text not in ("", "balanced") else ():
        name, _, number = item.rpartition("=")
        weights[name] = 0.0
        with contextlib.suppress(ValueError):
            weights[name] = parse_finite(number)
        if not name or weights[name] <= 0:
            raise UsageError(f"--class-weight {text}: give balanced, or weights greater than 0, as NAME=5,OTHER=2")
    return weights


def count_classes(comm: Any, data: Any, first: int = 0) -> np.ndarray | None:
    """Return data.class_counts, for which rank `first` of `comm` alone reads the labels. Collective."""
    counts = run_together(comm, lambda: data.class_counts, here=comm.rank == first)
    return comm.bcast(counts, first)


def class_weights(text: str, data: Any, counts: Any) -> np.ndarray | None:
    """Return the weight of each class of `data` by --class-weight; None: all are 1. counts: of the training rows by
    class. Raises UsageError."""
    if not text:
        return None
    if not data.classes or data.vocabulary is not None:
        has = "the tokens of a text" if data.classes else "values to predict"
        raise UsageError(f"--class-weight is for classes of rows, and the data have {has}: leave it out")
    if text == "balanced":
        weights = np.where(counts, counts.sum() / ((counts > 0).sum() * np.maximum(counts, 1)), 1.0)
    else:
        names, weights = data.schema.names(data.classes), np.ones(data.classes)
        for name, weight in read_class_weights(text).items():
            if name not in names:
                raise UsageError(f"--class-weight {name}={weight:g}: there is no class {name!r}{nearest(name, names)}")
            weights[names.index(name)] = weight
    return None if (weights == 1).all() else weights


def rare_class(data: Any, counts: Any, weighs: bool = True) -> str | None:
    """Return advice if a class of the training rows is rare; None: there is none, or the data have no classes.
    counts: of these rows by class; weighs: True if the program has --class-weight."""
    if counts is None:
        return None
    there = np.flatnonzero(counts)
    rarest = there[counts[there].argmin()]
    part = counts[rarest] / counts.sum()
    if len(there) < 2 or part * RARE * len(there) >= 1:
        return None
    name, rows = printable(data.schema.names(data.classes)[rarest], allowed=""), int(counts.sum())
    advice = (
        f"{'add --class-weight balanced, and ' * weighs}judge by --scores {'f1' if data.classes == 2 else 'macro_f1'}"
    )
    return (
        f"class {name} has {part:.2%} of the training rows ({counts[rarest]:,} of {rows:,}), so a model that never "
        f"predicts it looks accurate: {advice}"
    )
