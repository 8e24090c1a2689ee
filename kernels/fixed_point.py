"""Fixed-point numbers: multiples of 2^-F in int64, whose sum is exact in any order of additions.

    encode  q = round(v 2^F)         for |v| < 2^(63-F); larger values are not representable
    decode  v = q 2^-F               |v - decode(encode(v))| <= 2^-F / 2, plus the rounding of v's own type

Sums wrap around modulo 2^64: intermediate sums may overflow if the final sum does not. Both kernels move b + 8 bytes
per element of b bytes; memory bandwidth bounds them."""

import math

import numpy as np

from hpcdl.kernels.bind import elementwise


@elementwise("T[::1], float64, int64[::1]")
def encode(i, values, factor, fixed):
    """fixed[i] = round(factor * values[i]), ties upwards; the product is computed in float64."""
    fixed[i] = np.int64(math.floor(factor * np.float64(values[i]) + 0.5))


@elementwise("T[::1], float64, int64[::1]")
def decode(i, into, factor, fixed):
    """into[i] = factor * fixed[i]; the product is computed in float64."""
    into[i] = factor * np.float64(fixed[i])
