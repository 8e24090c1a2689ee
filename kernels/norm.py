"""The sum of squares of a vector, for clipping a gradient by its 2-norm.

Squares and their sum are float64 for every type: float32 would overflow for an element above 1.8e19, and lose digits in
long sums. Memory bandwidth limits the speed, b bytes per element of b bytes; in a cache, converting float32 does."""

import numpy as np

from hpcdl.kernels.bind import block


@block("T[::1]")
def sum_of_squares(x):
    """Return the sum of x[i]^2 as float64."""
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) ** 2
    return total
