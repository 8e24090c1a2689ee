"""Outlier detection for losses: a learner does not push the gradient of an outlier (Gorila, section 5)."""

import math

DECAY = 0.99  # of the running mean and variance, per loss
FIRST = 100  # losses before any can be an outlier: the mean is uncertain


class OutlierDetector:
    """Detects losses more than `deviations` standard deviations over the running mean; 0: none.

    m <- k m + (1 - k) |l|,  v <- k (v + (1 - k) (|l| - m)^2), for outliers as well: exponentially weighted mean and
    variance of all losses. The first loss sets m = |l| and v = 0. (West, "Updating mean and variance estimates", CACM
    1979)
    """

    def __init__(self, deviations: float):
        self.deviations, self.count = deviations, 0
        self.mean = self.variance = 0.0

    def is_outlier(self, loss: float) -> bool:
        """True if this loss is an outlier; False if it is not finite, which the run reports itself."""
        size = abs(loss)
        if not self.deviations or not math.isfinite(size):
            return False
        outlier = self.count >= FIRST and size > self.mean + self.deviations * math.sqrt(self.variance)
        self.count += 1
        decay = min(DECAY, 1 - 1 / self.count)  # at first the arithmetic mean
        self.variance = decay * (self.variance + (1 - decay) * (size - self.mean) ** 2)
        self.mean = decay * self.mean + (1 - decay) * size
        return outlier
