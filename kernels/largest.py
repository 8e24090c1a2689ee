"""Maximum of the first elements of a row, vectorized.

A compiler vectorizes a maximum of integers, but not of floating-point numbers that may be NaN. The bits of numbers,
read as integers, have the order of the numbers if, for negative ones, all bits but the sign are inverted:

    key(x) = b ^ ((b >> all bits but one) & the largest integer),  b the bits of x        value(key(x)) = x

NaN is ignored: its key is the smallest integer, which no other number has. The maximum of no elements is -infinity. (-0
is below +0 in this order; callers of `largest` treat them as equal.)"""

import numba
import numpy as np
from numba import types
from numba.extending import overload

FLAGS = {"error_model": "numpy", "forceinline": True}
compiled = numba.njit(**FLAGS)


def make_largest(real, integer):
    """Return largest(z, i, count) for matrices of type `real`, which has as many bits as `integer`."""
    shift, below, smallest = integer(8 * integer().itemsize - 1), np.iinfo(integer).max, np.iinfo(integer).min
    infinity = integer(real(-np.inf).view(integer) ^ integer(below))  # the key of -infinity
    below, smallest = integer(below), integer(smallest)

    @compiled
    def flip(bits):
        """Return the key of a number's bits, or the bits of a key."""
        return integer(bits ^ integer(integer(bits >> shift) & below))

    @compiled
    def key_of(x):
        """Return the key of x; a function, since the compiler would make branches of two cases within the loop."""
        key = flip(real(x).view(integer))
        return smallest if x != x else key

    @compiled
    def largest(z, i, count):
        top = infinity
        for j in range(count):
            key = key_of(z[i, j])
            top = key if key > top else top
        return integer(flip(top)).view(real)

    return largest


largest32, largest64 = make_largest(np.float32, np.int32), make_largest(np.float64, np.int64)


def largest(z, i, count):
    """Return the largest of z[i, 0] .. z[i, count - 1]; NaN is ignored, and the maximum of nothing is -infinity."""
    part = z[i, :count]
    return np.max(part, initial=-np.inf, where=part == part)


@overload(largest, target="cpu", jit_options=FLAGS)
def _largest(z, i, count):
    by_type = {types.float32: largest32, types.float64: largest64}
    chosen = by_type[z.dtype]
    return lambda z, i, count: chosen(z, i, count)


def make_magnitude(real, integer):
    """Return largest_magnitude(x, start, stop) for vectors of type `real`, which has as many bits as `integer`."""
    below, infinity = integer(np.iinfo(integer).max), integer(real(np.inf).view(integer))

    @compiled
    def magnitude(x, start, stop):
        top = integer(0)
        for i in range(start, stop):
            bits = integer(real(x[i]).view(integer) & below)
            top = bits if bits > top else top
        return integer(top if top < infinity else infinity).view(real)  # NaN has larger bits than infinity

    return magnitude


magnitude32, magnitude64 = make_magnitude(np.float32, np.int32), make_magnitude(np.float64, np.int64)


def largest_magnitude(x, start, stop):
    """Return the largest |x[i]| of start <= i < stop, infinity if one is NaN, 0 of none."""
    part = np.abs(x[start:stop])
    return np.max(np.where(part == part, part, np.inf), initial=0)


@overload(largest_magnitude, target="cpu", jit_options=FLAGS)
def _largest_magnitude(x, start, stop):
    by_type = {types.float32: magnitude32, types.float64: magnitude64}
    chosen = by_type[x.dtype]
    return lambda x, start, stop: chosen(x, start, stop)
