"""exp, tanh and log1p in arithmetic that the compiler vectorizes; calls of the mathematical library are scalar.

    exp(x)      n = x / log 2, rounded     r = x - n log 2, |r| <= log(2) / 2      exp(x) = 2^n exp(r)
    tanh(x)     float64: y = 2 |x|         e = exp(y) - 1 = 2^n (exp(r) - 1) + (2^n - 1)       sign(x) e / (e + 2)
                float32: x P(x^2) / Q(x^2), P and Q of degree 4, for |x| <= 8, else tanh of -8 or 8
    log1p(x)    0 <= x <= 1                w = x / (2 + x), at most 1/3                        log(1 + x) = 2 atanh(w)

exp(r) - 1 is a Taylor series, to r^7 for float32 and r^13 for float64: the next term is below the type's rounding.
n log 2 is subtracted in two parts; the first part of log 2 is so short that its product with n is exact (Cody and
Waite, 1980). Adding 1.5 2^p, for p bits of mantissa, rounds to an integer and leaves it in the lowest bits of the sum:
no conversion is needed, and NaN stays NaN. atanh(w) is w + w^3/3 + w^5/5 + ..., to w^15 and w^31. P and Q are minimax:
their largest relative error, 6e-9 before rounding, is the least possible (by reweighted least squares: Lawson, 1961).

Errors are below 3 units in the last place; below 5 for float32's tanh, which costs half of float64's formula. exp(x)
overflows to infinity, and is 0 for x < -86.9 (2e-38, float32) or x < -707.5 (5e-308, float64): smaller results would
lose digits. On a GPU these names mean CUDA's own functions."""

import math

import numba
import numpy as np
from numba import types
from numba.extending import overload

# Not `reassoc`: it would undo the rounding by addition, and add the two parts of log 2.
FLAGS = {"fastmath": {"contract"}, "error_model": "numpy", "forceinline": True}
compiled = numba.njit(**FLAGS)


def exp(x):
    """Return e^x for a float32 or float64 number."""
    return math.exp(x)


def tanh(x):
    """Return the hyperbolic tangent of a float32 or float64 number."""
    return math.tanh(x)


def log1p(x):
    """Return log(1 + x) for a float32 or float64 number from 0 to 1."""
    return math.log1p(x)


def exponential(real, integer, p: int, high: float, low: float, smallest: float, largest: float, series):
    """Return exp for `real` numbers with p bits of mantissa, and the two functions that it calls. integer: type of as
    many bits. log 2 = high + low. series(r): exp(r) - 1. Below `smallest` exp is 0, above `largest` infinite."""
    inverse, high, low, magic = real(1 / math.log(2)), real(high), real(low), real(1.5 * 2.0**p)
    shift, bias = integer(p), integer(2 ** (8 * integer().itemsize - 2 - p) - 1)
    smallest, largest, zero, two = real(smallest), real(largest), real(0), real(2)

    @compiled
    def parts(x):
        """Return exp(r) - 1, and an integer whose lowest bits are n."""
        total = x * inverse + magic
        n = total - magic
        return series((x - n * high) - n * low), real(total).view(integer)

    @compiled
    def power(bits):
        """Return 2^n; bits: an integer whose lowest bits are n."""
        return integer(integer(bits + bias) << shift).view(real)

    @compiled
    def exp(x):
        y = smallest if x < smallest else x
        q, bits = parts(largest if y > largest else y)
        y = (two * q + two) * power(bits - integer(1))  # 2^n itself may be too large
        return zero if x < smallest else y

    return exp, parts, power


a2, a3, a4, a5, a6, a7 = (np.float32(1 / math.factorial(k)) for k in range(2, 8))
b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13 = (1 / math.factorial(k) for k in range(2, 14))


@compiled
def series32(r):
    """Return r + r^2/2! + ... + r^7/7!."""
    return r + r * r * (a2 + r * (a3 + r * (a4 + r * (a5 + r * (a6 + r * a7)))))


@compiled
def series64(r):
    """Return r + r^2/2! + ... + r^13/13!."""
    tail = b8 + r * (b9 + r * (b10 + r * (b11 + r * (b12 + r * b13))))
    return r + r * r * (b2 + r * (b3 + r * (b4 + r * (b5 + r * (b6 + r * (b7 + r * tail))))))


# The two parts of log 2: W. J. Cody's for float32, fdlibm's for float64.
exp32, _, _ = exponential(np.float32, np.int32, 23, 0.693359375, -2.12194440e-4, -86.9, 89.0, series32)
LOG2 = 6.93147180369123816490e-1, 1.90821492927058770002e-10
exp64, parts64, power64 = exponential(np.float64, np.int64, 52, *LOG2, -707.5, 710.0, series64)

one, two, eight = np.float32(1), np.float32(2), np.float32(8)
p1, p2, p3, p4 = map(np.float32, (0.134445172, 0.0035716209, 2.18950421e-5, 1.52309566e-8))
q1, q2, q3, q4 = map(np.float32, (0.467778445, 0.0261645298, 3.41132956e-4, 8.5226643e-7))


@compiled
def tanh32(x):
    """Return tanh(x) as x P(x^2) / Q(x^2)."""
    y = eight if x > eight else x
    y = -eight if y < -eight else y
    v = y * y
    return y * (one + v * (p1 + v * (p2 + v * (p3 + v * p4)))) / (one + v * (q1 + v * (q2 + v * (q3 + v * q4))))


@compiled
def tanh64(x):
    """Return tanh(x) as e / (e + 2) with the sign of x."""
    y = 2.0 * abs(x)
    q, bits = parts64(104.0 if y > 104.0 else y)  # from there on the quotient is 1
    power = power64(bits)
    e = power * q + (power - 1.0)
    y = e / (e + 2.0)
    return -y if x < 0.0 else y


c3, c5, c7, c9, c11, c13, c15 = (np.float32(1 / k) for k in range(3, 16, 2))
d3, d5, d7, d9, d11, d13, d15, d17, d19, d21, d23, d25, d27, d29, d31 = (1 / k for k in range(3, 32, 2))


@compiled
def log1p32(x):
    """Return log(1 + x) as 2 (w + w^3/3 + ... + w^15/15)."""
    w = x / (x + two)
    v = w * w
    return two * w * (one + v * (c3 + v * (c5 + v * (c7 + v * (c9 + v * (c11 + v * (c13 + v * c15)))))))


@compiled
def log1p64(x):
    """Return log(1 + x) as 2 (w + w^3/3 + ... + w^31/31)."""
    w = x / (x + 2.0)
    v = w * w
    tail = d17 + v * (d19 + v * (d21 + v * (d23 + v * (d25 + v * (d27 + v * (d29 + v * d31))))))
    return 2.0 * w * (1.0 + v * (d3 + v * (d5 + v * (d7 + v * (d9 + v * (d11 + v * (d13 + v * (d15 + v * tail))))))))


def compile_as(function, by_type):
    """Let compiled code on the CPU call the function by_type[type of x] in place of `function`."""
    overload(function, target="cpu", jit_options=FLAGS)(lambda x: by_type[x])


compile_as(exp, {types.float32: lambda x: exp32(x), types.float64: lambda x: exp64(x)})
compile_as(tanh, {types.float32: lambda x: tanh32(x), types.float64: lambda x: tanh64(x)})
compile_as(log1p, {types.float32: lambda x: log1p32(x), types.float64: lambda x: log1p64(x)})
