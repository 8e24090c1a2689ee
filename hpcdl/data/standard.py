"""Standardization: shift and scale each feature to mean 0 and standard deviation 1 over the training rows.

    x <- (x - mean) / deviation            x = scale * raw, mean and deviation (features,)
    mean = 1/n sum of x_i                  deviation = sqrt(1/n sum of (x_i - mean)^2)

over the n training rows (without those held out for validation). A constant feature has deviation 1. A feature that
says by 1 or 0 whether a row of a table has a text has mean 0 and deviation 1, so it stays: the 1 of a rare text would
become so large that steps at usual learning rates diverge (data_options.py). Test and validation rows are transformed
by the same numbers. The targets of a regression (a body's mass in grams, say) are standardized, too: a model starts too
far from them for any learning rate that its features allow. All is computed in
float64 in one pass: parts with counts m and n, means a and b, sums of squared deviations s and t have together

    m + n        a + (b - a) n / (m + n)        s + t + (b - a)^2 m n / (m + n)        (Chan, Golub, LeVeque, 1979)"""

from collections.abc import Iterable, Iterator

import numpy as np

from hpcdl.data.fills import FillMarks
from hpcdl.data.format import Info
from hpcdl.data.hdf5 import check_slab, dataset, open_file, slabs, slabs_of
from hpcdl.kernels.gather import standardize

TARGET = ("target_mean", "target_deviation")  # names of the statistics of targets
LEFT_OUT = float(np.finfo(np.float64).max)  # the deviation of a feature that is set to 0 in all rows (resampling.py)


class Standard:
    """Standardizes by statistics: `mean`, `deviation` (features,) and maybe those of TARGET (outputs,); float64."""

    def __init__(self, statistics: dict[str, np.ndarray], dtype: np.dtype):
        self.statistics = statistics
        factor = np.where(statistics["deviation"] >= LEFT_OUT, 0.0, 1 / statistics["deviation"])
        self.mean, self.factor = statistics["mean"].astype(dtype), factor.astype(dtype)
        self.target = tuple(statistics[name] for name in TARGET) if TARGET[0] in statistics else None

    def apply_target(self, y: np.ndarray) -> None:
        """Standardize y (rows,) or (rows, outputs) in place, if the statistics have those of targets."""
        if self.target is not None:
            mean, deviation = self.target if y.ndim == 2 else (each[0] for each in self.target)
            y[...] = (y - mean) / deviation

    def apply(self, x: np.ndarray) -> None:
        """Standardize x (rows, features) in place."""
        standardize(x, self.mean, self.factor)


def unit_of_targets(statistics: dict[str, np.ndarray]) -> float | None:
    """Return the original units per unit of prediction: the deviation of a single standardized target; 1 for targets
    that are not standardized. None: each of several targets has its own."""
    deviation = statistics.get(TARGET[1], np.ones(1))
    return float(deviation[0]) if len(deviation) == 1 else None


def mean_and_deviation(parts: Iterable[np.ndarray], scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation (features,) of scale * x, in float64, over the rows of all parts (rows, features)."""
    count, mean, squares, low, high = 0, 0.0, 0.0, np.inf, -np.inf
    for part in parts:
        for piece in slabs(len(part), 8 * part.shape[1]):
            x = part[piece].astype(np.float64)
            low, high = np.minimum(low, x.min(axis=0)), np.maximum(high, x.max(axis=0))
            middle = x.mean(axis=0)
            x -= middle
            before, apart = count, middle - mean
            count += len(x)
            mean = mean + apart * (len(x) / count)
            squares = squares + np.square(x, out=x).sum(axis=0) + np.square(apart) * (before * len(x) / count)
    deviation = abs(scale) * np.sqrt(squares / count)
    # Rounding errors would turn a constant feature into noise, and its tiny deviation into an infinite factor.
    still = (low == high) | (deviation < np.finfo(np.float32).tiny)
    return scale * np.where(low == high, low, mean), np.where(still, 1.0, deviation)


def file_slabs(info: Info) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield train/x of a data file slab by slab: (slice of rows, their features); UsageError: NaN or infinity."""
    with open_file(info.path) as file:
        source, marks = dataset(file, "train/x"), FillMarks(file, info, "train") if info.fills else None
        for slab in slabs_of(source, across=True):
            x = source[slab].reshape(slab.stop - slab.start, -1)
            if marks is not None:
                x = x.astype(np.float64, copy=False)
                marks.refill(slab, x)
            check_slab(x, source, f"{info.path}: train/x", slab.start)
            yield slab, x


def without_rows(parts: Iterable[tuple[slice, np.ndarray]], held_out: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the features of parts, as of `file_slabs`, without the rows `held_out` (sorted numbers)."""
    for slab, x in parts:
        first, last = np.searchsorted(held_out, (slab.start, slab.stop))
        yield np.delete(x, held_out[first:last] - slab.start, axis=0)


def training_statistics(
    parts: Iterable[np.ndarray], scale: float, y: np.ndarray | None, held_out: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the statistics of training rows. parts: without the rows held out; y: targets of all rows, or None."""
    statistics = dict(zip(("mean", "deviation"), mean_and_deviation(parts, scale), strict=True))
    if y is None:
        return statistics
    target = mean_and_deviation([np.delete(y.reshape(len(y), -1), held_out, axis=0)], 1.0)
    return statistics | dict(zip(TARGET, target, strict=True))
