"""Gaussian noise from a counter-based generator: it depends on the step and the coordinate, not on the rank.

    Philox4x32-10        (counter of 4 words, key of 2 words) -> 4 random words of 32 bits; in each of 10 rounds
        hi, lo <- the halves of 0xD2511F53 c0;   hi', lo' <- the halves of 0xCD9E8D57 c2
        c <- (hi' ^ c1 ^ k0, lo', hi ^ c3 ^ k1, lo);   k0 <- k0 + 0x9E3779B9,  k1 <- k1 + 0xBB67AE85
    counter              the coordinate's number and the step's number, two words each
    Box-Muller           u, v uniform with 53 bits, from two words each    z = sqrt(-2 log u) cos(2 pi v)

So a coordinate's noise does not depend on the division of a vector. (Salmon et al., SC 2011; Box and Muller, 1958)"""

import math

import numpy as np

from hpcdl.kernels.bind import elementwise, function

WORD, BITS = np.uint64(0xFFFFFFFF), np.uint64(32)
FACTOR0, FACTOR1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL0, WEYL1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOST, UNIT, ONE = np.uint64(11), 2.0**-53, np.uint64(1)  # of 64 bits, 11 do not fit into a float64 from 0 to 1
TURN = 2 * math.pi


@function
def philox(c0, c1, c2, c3, k0, k1):
    """Return four random words; all arguments and results are uint64 numbers below 2^32."""
    for _ in range(10):
        p0, p1 = FACTOR0 * c0, FACTOR1 * c2
        c0, c1, c2, c3 = (p1 >> BITS) ^ c1 ^ k0, p1 & WORD, (p0 >> BITS) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + WEYL0) & WORD, (k1 + WEYL1) & WORD
    return c0, c1, c2, c3


@function
def normal(coordinate, step, key0, key1):
    """Return a standard normal number, float64; all arguments are uint64."""
    a, b, c, d = philox(coordinate & WORD, coordinate >> BITS, step & WORD, step >> BITS, key0, key1)
    u = np.float64((((a << BITS) | b) >> LOST) + ONE) * UNIT  # never 0
    v = np.float64(((c << BITS) | d) >> LOST) * UNIT
    return math.sqrt(-2.0 * math.log(u)) * math.cos(TURN * v)


@elementwise("T[::1], T[::1], T, T, T, T, int64, int64, int64, int64")
def langevin(i, w, g, rate, scale, decay, deviation, first, step, key0, key1):
    """w <- w - rate d + deviation z, d = scale g + decay w, z the noise of coordinate first + i at this step.
    key0, key1: numbers below 2^32. Bytes moved per element of b bytes: 3b (w and g read, w written)."""
    z = normal(np.uint64(first) + np.uint64(i), np.uint64(step), np.uint64(key0), np.uint64(key1))
    w[i] = w[i] - rate * (scale * g[i] + decay * w[i]) + deviation * z
