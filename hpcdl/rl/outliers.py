"""Losses that are far beyond those before: what a learner does not push (Gorila, section 5)."""

import math

KEPT = 0.99  # of the running mean and variance, from one loss to the next
FIRST = 100  # losses before any is an outlier: the mean is not known well


class Outliers:
    """Whether a loss is more than `deviations` standard deviations over the running mean of all; 0: none ever is.

    m <- k m + (1 - k) |l|,  v <- k (v + (1 - k) (|l| - m)^2), with an outlier as with any other: the mean and the
    variance of all losses, with weights that fall by k from one to the one before. The first has m = |l| and v = 0.
    (West, "Updating mean and variance estimates", CACM 1979)
    """

    def __init__(self, deviations: float):
        self.deviations, self.count = deviations, 0
        self.mean = self.variance = 0.0

    def found(self, loss: float) -> bool:
        """Whether this one is; one that is no finite number is let through, for the run to say so."""
        size = abs(loss)
        if not self.deviations or not math.isfinite(size):
            return False
        outlier = self.count >= FIRST and size > self.mean + self.deviations * math.sqrt(self.variance)
        self.count += 1
        kept = min(KEPT, 1 - 1 / self.count)  # at first the plain mean
        self.variance = kept * (self.variance + (1 - kept) * (size - self.mean) ** 2)
        self.mean = kept * self.mean + (1 - kept) * size
        return outlier
