"""The sum of squares of a vector, for clipping a gradient by its 2-norm.

It is taken in float64 whatever the element type: float32 would overflow for elements above 1.8e19, and lose digits
over millions of elements.
"""

import numpy as np

from hpcdl.kernels.bind import block


@block("T[::1]")
def sum_of_squares(x):
    """The sum of x[i]^2 as float64.

    Bytes moved per element of b bytes: b; memory bandwidth bounds it, for float32 the conversion while in the caches.
    """
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) ** 2
    return total
