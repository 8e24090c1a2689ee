"""The largest element of a part of a row, vectorized.

A maximum of floating-point numbers is not vectorized while NaN counts; one of integers is. Read as an integer, a number
from zero up grows with its bits, and a negative one falls; with the bits below the sign turned over where the sign is
set, the order of the integers is that of the numbers:

    key(x) = b ^ ((b >> all bits but one) & the largest integer),  b the bits of x        value(key(x)) = x

NaN is passed over: its key is the smallest integer, which no other number has. The largest element of nothing is
-infinity. (-0 is below +0 in this order; they compare equal wherever the result is used.)
"""

import numba
import numpy as np
from numba import types
from numba.extending import overload

FLAGS = {"error_model": "numpy", "forceinline": True}
compiled = numba.njit(**FLAGS)


def order(real, integer):
    """largest(z, i, count) for a matrix of `real` numbers, which have as many bits as `integer`."""
    shift, below, smallest = integer(8 * integer().itemsize - 1), np.iinfo(integer).max, np.iinfo(integer).min
    infinity = integer(real(-np.inf).view(integer) ^ integer(below))  # the key of -infinity
    below, smallest = integer(below), integer(smallest)

    @compiled
    def turned(bits):
        """Number to key, and back."""
        return integer(bits ^ integer(integer(bits >> shift) & below))

    @compiled
    def key_of(x):
        """A function of its own: within the loop, the two cases would be branches."""
        key = turned(real(x).view(integer))
        return smallest if x != x else key

    @compiled
    def largest(z, i, count):
        top = infinity
        for j in range(count):
            key = key_of(z[i, j])
            top = key if key > top else top
        return integer(turned(top)).view(real)

    return largest


largest32, largest64 = order(np.float32, np.int32), order(np.float64, np.int64)


def largest(z, i, count):
    """The largest of z[i, 0] .. z[i, count - 1], NaN passed over; -infinity where nothing is left."""
    part = z[i, :count]
    return np.max(part, initial=-np.inf, where=part == part)


@overload(largest, target="cpu", jit_options=FLAGS)
def _largest(z, i, count):
    by_type = {types.float32: largest32, types.float64: largest64}
    chosen = by_type[z.dtype]
    return lambda z, i, count: chosen(z, i, count)
