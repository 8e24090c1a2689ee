"""Quantization of a vector to codes of 1, 2, 4 or 8 bits, with a scale for each block of values.

    code c = 0 .. L      stands for scale (2 c - L) / L, from -scale to scale        L levels above the lowest
    stochastic           c = floor(t + u), t = (v / scale + 1) L / 2, u uniform in [0, 1): the mean over u is v
    nearest              c = floor(t + 1/2)
    sign                 L = 1, c = 1 if v >= 0, else 0

    bits     1        2       4       8             L is even from 2 bits on, so that 0 has a code of its own
    L        1        2       14      254

Where |v| > scale, the code is that of the nearer end. u is a number of 24 bits from SplitMix64 (dropout.py), by the key
and the index of the value. A NaN makes the largest magnitude of its block infinite: no value of the block is then
finite after decoding. (Alistarh et al., "QSGD", NeurIPS 2017; Seide et al., Interspeech 2014)

Bytes moved per value of b bytes: scales b, quantize b + 1, pack 1 + bits / 8, add_codes 2b + bits / 8."""

import numpy as np

from hpcdl.kernels.bind import block, elementwise, exact
from hpcdl.kernels.dropout import ONE, STEP, split_mix
from hpcdl.kernels.largest import largest_magnitude

SHIFT, UNIT = np.uint64(40), 2.0**-24
WHOLE = 62  # shift of a block that is the whole vector


@exact
def code_of(v, scale, levels, u):
    """Return the code of v: floor(t + u), held between 0 and `levels`; 0 for NaN."""
    t = (np.float64(v) / np.float64(scale) + 1.0) * (0.5 * levels) + u
    t = t if t > 0.0 else 0.0
    t = t if t < levels else np.float64(levels)
    return np.uint8(np.int32(t))


@exact
def not_below(s):
    """Return the smallest float32 that is not below s >= 0, a float64."""
    nearest = np.float32(s)
    if np.float64(nearest) < s:
        nearest = np.int32(nearest.view(np.int32) + np.int32(1)).view(np.float32)
    return nearest


@block("T[::1], float32[::1], int64, int64")
def scales_of(x, scales, size, mean):
    """scales[b] = the largest |x[i]| of block b of `size` values, not rounded down; or, if `mean`, the mean of |x[i]|.
    The last block may be shorter."""
    for b in range(scales.size):
        start, stop = b * size, min(b * size + size, x.size)
        if mean:
            total = 0.0
            for i in range(start, stop):
                total += abs(np.float64(x[i]))
            scales[b] = np.float32(total / (stop - start))
        else:
            scales[b] = not_below(np.float64(largest_magnitude(x, start, stop)))


@elementwise("T[::1], float32[::1], uint8[::1], int64, int64, int64, int64, int64")
def quantize(i, x, scales, codes, shift, levels, stochastic, number, first):
    """codes[i] = the code of x[i] by scales[i >> shift]; u by the key `number` and the index first + i, or 1/2."""
    j = np.int64(i)
    z = split_mix(np.uint64(number) + (np.uint64(first) + np.uint64(j) + ONE) * STEP)
    u = np.float64(np.int64(z >> SHIFT)) * UNIT if stochastic else 0.5
    codes[i] = code_of(x[i], scales[j >> shift], levels, u)


@elementwise("T[::1], uint8[::1]")
def sign_codes(i, x, codes):
    """codes[i] = 1 if x[i] >= 0, else 0"""
    codes[i] = np.uint8(1) if x[i] >= 0 else np.uint8(0)


@elementwise("uint8[::1], uint8[::1], int64")
def pack(i, message, codes, bits):
    """message[i] = the 8 / bits codes from codes[i * 8 / bits] on, the first in the lowest bits; missing ones are 0."""
    count, byte = 8 // bits, np.int64(0)
    start = np.int64(i) * count
    for j in range(count):
        if start + j < codes.size:
            byte |= np.int64(codes[start + j]) << (j * bits)
    message[i] = np.uint8(byte)


@elementwise("T[::1], uint8[::1], float32[::1], int64, int64, int64, float64")
def add_codes(i, into, message, scales, bits, shift, levels, factor):
    """into[i] += factor * scales[i >> shift] (2 c - levels), c code i of the message; factor: 1 / levels for values."""
    j = np.int64(i)
    at = j * bits
    code = (np.int64(message[at >> 3]) >> (at & 7)) & ((1 << bits) - 1)
    into[i] += np.float64(scales[j >> shift]) * factor * np.float64(2 * code - levels)
