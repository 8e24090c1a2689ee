"""The sum of squares of a vector, for clipping a gradient by its 2-norm.

It is computed in float64 for every element type: float32 would overflow for elements above 1.8e19, and lose digits over
millions of elements.
"""

import numpy as np

from hpcdl.kernels.bind import block


@block("T[::1]")
def sum_of_squares(x):
    """Return the sum of x[i]^2 as float64.

    Bytes moved per element of b bytes: b; memory bandwidth bounds it; in the caches, for float32, the conversion.
    """
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) ** 2
    return total
