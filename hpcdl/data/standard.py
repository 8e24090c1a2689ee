"""Standardize: each feature is shifted and scaled so that over the training rows its mean is 0 and its deviation 1.

    x <- (x - mean) / deviation            x = scale * raw, mean and deviation (features,)
    mean = 1/n sum of x_i                  deviation = sqrt(1/n sum of (x_i - mean)^2)

over the n rows that train (not those held out for validation). A feature that never changes has deviation 1. Test and
validation rows are changed by the same numbers. So are the values to predict of a regression, a body's mass in grams,
say, for they are too far from where a model begins for any rate that its features allow. All are computed in float64
and in one pass, part by part: with the counts m and n, the means a and b and the sums of squared deviations s and t of
two parts, those of both are

    m + n        a + (b - a) n / (m + n)        s + t + (b - a)^2 m n / (m + n)

(Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
"""

from collections.abc import Iterable, Iterator

import numpy as np

from hpcdl.data.fills import Refill
from hpcdl.data.format import Info, check_x, dataset, open_file, slabs, slabs_of
from hpcdl.kernels.gather import standardize

TARGET = ("target_mean", "target_deviation")  # names of the statistics of values to predict
LEFT_OUT = float(np.finfo(np.float64).max)  # the deviation of a feature that is to be 0 in all rows (resampling.py)


class Standard:
    """The mean and the deviation (features,) of training rows, and how they change a batch of type dtype.

    statistics: `mean`, `deviation` and, where the values to predict are standardized, too, those of TARGET (outputs,).
    """

    def __init__(self, statistics: dict[str, np.ndarray], dtype: np.dtype):
        self.statistics = statistics
        factor = np.where(statistics["deviation"] >= LEFT_OUT, 0.0, 1 / statistics["deviation"])
        self.mean, self.factor = statistics["mean"].astype(dtype), factor.astype(dtype)
        self.target = tuple(statistics[name] for name in TARGET) if TARGET[0] in statistics else None

    def apply_target(self, y: np.ndarray) -> None:
        """y (rows,) or (rows, outputs) <- (y - mean) / deviation, where the values to predict are standardized."""
        if self.target is not None:
            mean, deviation = self.target if y.ndim == 2 else (each[0] for each in self.target)
            y[...] = (y - mean) / deviation

    def apply(self, x: np.ndarray) -> None:
        """x (rows, features) <- (x - mean) / deviation."""
        standardize(x, self.mean, self.factor)


def measure(parts: Iterable[np.ndarray], scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of scale * x, in float64, over all rows of these parts (rows, features)."""
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
    # By its rounding errors a feature that never changes would become noise, and its tiny deviation infinite factors.
    still = (low == high) | (deviation < np.finfo(np.float32).tiny)
    return scale * np.where(low == high, low, mean), np.where(still, 1.0, deviation)


def file_slabs(info: Info) -> Iterator[tuple[slice, np.ndarray]]:
    """train/x of a data file, slab by slab: (which rows, their features); UsageError for a NaN."""
    with open_file(info.path) as file:
        source, refill = dataset(file, "train/x"), Refill(file, info, "train")
        for slab in slabs_of(source):
            x = source[slab].reshape(slab.stop - slab.start, -1)
            if info.fills:
                x = x.astype(np.float64, copy=False)
                refill(slab, x)
            check_x(x, f"{info.path}: train/x", range(slab.start, slab.stop))
            yield slab, x


def array_slabs(x: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """The rows of an array in the same form."""
    return ((slab, x[slab]) for slab in slabs(len(x), x.nbytes // len(x)))


def without(parts: Iterable[tuple[slice, np.ndarray]], held_out: np.ndarray) -> Iterator[np.ndarray]:
    """These rows less those that are held out (sorted numbers)."""
    for slab, x in parts:
        first, last = np.searchsorted(held_out, (slab.start, slab.stop))
        yield np.delete(x, held_out[first:last] - slab.start, axis=0)


def measured(
    parts: Iterable[np.ndarray], scale: float, y: np.ndarray | None, held_out: np.ndarray
) -> dict[str, np.ndarray]:
    """The statistics of rows less those that are held out. y: values to predict, of all rows; None: of classes."""
    found = dict(zip(("mean", "deviation"), measure(parts, scale), strict=True))
    if y is None:
        return found
    target = measure([np.delete(y.reshape(len(y), -1), held_out, axis=0)], 1.0)
    return found | dict(zip(TARGET, target, strict=True))
