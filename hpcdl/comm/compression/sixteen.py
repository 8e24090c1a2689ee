"""float16 and bfloat16: values rounded to nearest in 16 bits (kernels/convert.py), half of the bytes of float32.

    message of n values     2 n bytes
    rounding error          float16 2^-11 of a value up to 65,504; bfloat16 2^-8, with the range of float32

float64 is narrowed to float32 first. (Error feedback: Seide et al., Interspeech 2014)"""

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.comm.compression.codec import RandomKey, VectorCodec
from hpcdl.comm.compression.method import CompressionMethod
from hpcdl.kernels import convert
from hpcdl.kernels.device import Array, device_of
from hpcdl.kernels.reduce import add_scaled

KERNELS = {  # encode with error feedback, decode, add
    "float16": (convert.encode_float16, convert.decode_float16, convert.add_float16),
    "bfloat16": (convert.encode_bfloat16, convert.decode_bfloat16, convert.add_bfloat16),
}


class Sixteen(VectorCodec):
    """16-bit codes. kind: float16 or bfloat16."""

    def __init__(self, dtype: DTypeLike, kind: str):
        super().__init__(dtype)
        self.kind = kind

    def message_bytes(self, n: int) -> int:
        return 2 * n

    def encode(self, values: Array, message: Array, key: RandomKey) -> None:
        self.encode_with_feedback(values, device_of(values).zeros(values.size, values.dtype), message, key)

    def encode_with_feedback(self, values: Array, residual: Array, message: Array, key: RandomKey) -> None:
        KERNELS[self.kind][0](values, residual, message.view(np.uint16))

    def decode(self, message: Array, out: Array) -> None:
        KERNELS[self.kind][1](out, message.view(np.uint16))

    def add(self, message: Array, into: Array, factor: float = 1.0) -> None:
        if factor == 1.0:
            KERNELS[self.kind][2](into, message.view(np.uint16))
        else:
            values = device_of(into).empty(into.size, into.dtype)
            self.decode(message, values)
            add_scaled(into, values, factor)


def make_method(kind: str) -> CompressionMethod:
    return CompressionMethod(kind, codec=lambda dtype, feedback: Sixteen(dtype, kind))


METHODS = [make_method(kind) for kind in KERNELS]
