"""Conversion between float32 and the 16-bit types float16 and bfloat16, which are sent and stored as uint16 codes.

    float16     1 sign, 5 exponent, 10 mantissa bits    up to 65,504, down to 2^-24    rounding error <= 2^-11 |v|
    bfloat16    1 sign, 8 exponent, 7 mantissa bits     float32's range                rounding error <= 2^-8 |v|

(float16 below 2^-14: error up to 2^-25; bfloat16 below 2^-126: up to 2^-134.) Both round to nearest, ties to even (IEEE
754): too large a value becomes infinite, NaN stays NaN. float64 is narrowed to float32 before it is rounded.

Encoding has error feedback in the same pass (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014): the
rounding error goes into a residual, which is added to the next value that is encoded,

    v = x + residual        code = round16(v)        residual = v - decode(code)     (a difference exact in float32)

so that nothing is lost over many calls. float16 is converted by the processor's instruction or, without one, by
equivalent integer operations. Memory bandwidth bounds all; bytes moved per element of b bytes: encoding 3b + 2,
decoding b + 2, addition 2b + 2."""

import platform

import numpy as np
from numba import types
from numba.core.cgutils import ir
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

from hpcdl.kernels.bind import elementwise, function

f4, i4, u2, u4 = np.float32, np.int32, np.uint16, np.uint32


def to_float16(v):
    """Return the float16 code of a value, by integer operations on its bits."""
    bits = f4(v).view(np.int32)
    a = i4(bits & i4(0x7FFFFFFF))  # bits of the absolute value
    odd = (a >> i4(13)) & i4(1)
    normal = i4(a - i4(0x38000000) + i4(0xFFF) + odd) >> i4(13)  # another exponent bias, 13 bits less; a tie to even
    subnormal = f4(a.view(np.float32) + f4(0.5)).view(np.int32) - i4(0x3F000000)  # the addition shifts and rounds
    special = i4(0x7E00) if a > i4(0x7F800000) else i4(0x7C00)  # NaN, infinity
    code = i4(subnormal) if a < i4(0x38800000) else i4(normal)  # 2^-14
    code = i4(special) if a >= i4(0x47800000) else i4(code)  # 2^16; 65,520 and more have become infinite by the carry
    return u2(code | ((bits >> i4(16)) & i4(0x8000)))


def from_float16(code):
    """Return the value of a float16 code as float32, by integer operations on its bits."""
    sign = i4(i4(code) & i4(0x8000)) << i4(16)
    a = i4(i4(i4(code) & i4(0x7FFF)) << i4(13))
    subnormal = f4(i4(a + i4(0x38800000)).view(np.float32) - f4(2.0**-14)).view(np.int32)
    bits = i4(subnormal) if a < i4(0x00800000) else i4(a + i4(0x38000000))
    bits = i4(a | i4(0x7F800000)) if a >= i4(0x0F800000) else i4(bits)  # infinity, NaN
    return i4(bits | sign).view(np.float32)


@function
def to_bfloat16(v):
    """Return the bfloat16 code of a value: the upper half of its float32, rounded."""
    bits = f4(v).view(np.uint32)
    odd = u4(bits >> u4(16)) & u4(1)  # a tie goes to the even code
    # NaN is rounded separately: the addition could carry it into infinity or zero.
    rounded = u4(bits | u4(0x400000)) if v != v else u4(bits + u4(0x7FFF) + odd)
    return u2(rounded >> u4(16))


@function
def from_bfloat16(code):
    """Return the value of a bfloat16 code as float32."""
    return u4(u4(code) << u4(16)).view(np.float32)


@intrinsic
def narrow(typing, value):
    """Return the code of the float16 nearest to a float32, by the processor's instruction."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def widen(typing, code):
    """Return the float32 of a float16 code, by the processor's instruction."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


def has_float16() -> bool:
    """True if the processor converts float16; elsewhere LLVM would call library functions that are not linked."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+f16c" in features.split(",") if triple.startswith("x86_64") else platform.machine() == "aarch64"


# Compiled calls of the two functions, on the CPU and on a GPU; the simulator calls the functions themselves.
@overload(to_float16)
def _to_float16(v):
    return (lambda v: narrow(f4(v))) if has_float16() else to_float16


@overload(from_float16)
def _from_float16(code):
    return (lambda code: widen(code)) if has_float16() else from_float16


@elementwise("T[::1], T[::1], uint16[::1]")
def encode_float16(i, x, residual, code):
    """v = x[i] + residual[i]; code[i] = float16(v); residual[i] = v - decode(code[i])"""
    v = x[i] + residual[i]
    rounded = to_float16(v)
    code[i] = rounded
    residual[i] = v - from_float16(rounded)


@elementwise("T[::1], uint16[::1]")
def decode_float16(i, into, code):
    """into[i] = decode(code[i])"""
    into[i] = from_float16(code[i])


@elementwise("T[::1], uint16[::1]")
def add_float16(i, into, code):
    """into[i] += decode(code[i])"""
    into[i] += from_float16(code[i])


@elementwise("T[::1], T[::1], uint16[::1]")
def encode_bfloat16(i, x, residual, code):
    """v = x[i] + residual[i]; code[i] = bfloat16(v); residual[i] = v - decode(code[i])"""
    v = x[i] + residual[i]
    rounded = to_bfloat16(v)
    code[i] = rounded
    residual[i] = v - from_bfloat16(rounded)


@elementwise("T[::1], uint16[::1]")
def decode_bfloat16(i, into, code):
    """into[i] = decode(code[i])"""
    into[i] = from_bfloat16(code[i])


@elementwise("T[::1], uint16[::1]")
def add_bfloat16(i, into, code):
    """into[i] += decode(code[i])"""
    into[i] += from_bfloat16(code[i])
