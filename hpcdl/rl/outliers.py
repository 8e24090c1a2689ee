"""Outlier detection for losses: a learner does not push the gradient of an outlier (Gorila, section 5)."""

import math

DECAY = 0.99  # of the running mean and variance, per loss
FIRST = 100  # losses before any can be an outlier: the mean is uncertain


class OutlierDetector:
    """Detects losses more than `deviations` standard deviations over the exponential running mean; 0: no outliers.
    m <- k m + (1 - k) |l|, v <- k (v + (1 - k) (|l| - m)^2), for outliers, too; k is DECAY, at first less; the first
    loss sets m = |l|, v = 0. (West, "Updating mean and variance estimates", CACM 1979)"""

    def __init__(self, deviations: float):
        self.deviations, self.count = deviations, 0
        self.mean = self.variance = 0.0

    def is_outlier(self, loss: float) -> bool:
        """True if this loss is an outlier. A loss that is not finite is no outlier, because the run reports it."""
        size = abs(loss)
        if not self.deviations or not math.isfinite(size):
            return False
        outlier = self.count >= FIRST and size > self.mean + self.deviations * math.sqrt(self.variance)
        self.count += 1
        decay = min(DECAY, 1 - 1 / self.count)  # at first the arithmetic mean
        self.variance = decay * (self.variance + (1 - decay) * (size - self.mean) ** 2)
        self.mean = decay * self.mean + (1 - decay) * size
        return outlier
