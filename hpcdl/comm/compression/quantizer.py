"""Codecs that round: a code of 1, 2, 4 or 8 bits for each value, and a scale for each block (kernels/quantize.py).

    message of n values     4 ceil(n / block) bytes of scales, then ceil(n bits / 8) bytes of codes

The last block of a vector may be shorter."""

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.comm.compression.codec import RandomKey, VectorCodec
from hpcdl.errors import UsageError
from hpcdl.kernels import quantize
from hpcdl.kernels.device import Array, device_of

BLOCK = 512  # values that share a scale


def check_block(block: int) -> None:
    """Raise UsageError unless `block` is a number of values of which the kernels find the block by a shift."""
    if block < 8 or block & (block - 1):
        raise UsageError(f"block is a power of two from 8 on, not {block}")


class Quantizer(VectorCodec):
    """Codes of `bits` bits. block: values that share a scale, a power of two; 0: the whole vector. rounding: by random
    numbers ("stochastic"), to the nearest value, or by the sign; the scale is the mean magnitude for "sign", else the
    largest. clip: the largest scale, in standard deviations of the block's values; 0: no bound."""

    def __init__(self, dtype: DTypeLike, bits: int, block: int = BLOCK, rounding: str = "stochastic", clip: float = 0):
        super().__init__(dtype)
        self.bits, self.block, self.rounding, self.clip = bits, block, rounding, clip
        self.levels, self.shift = max(1, 2**bits - 2), block.bit_length() - 1 if block else quantize.WHOLE

    def blocks(self, n: int) -> int:
        """Return the number of scales of n values."""
        return -(-n // self.block) if self.block else min(n, 1)

    def message_bytes(self, n: int) -> int:
        return 4 * self.blocks(n) + -(-n * self.bits // 8)

    def parts(self, message: Array, n: int) -> tuple[Array, Array]:
        """Return the scales and the packed codes of a message of n values, as views."""
        start = 4 * self.blocks(n)
        return message[:start].view(np.float32), message[start:]

    def measure(self, values: Array, scales: Array) -> None:
        """Set `scales` to those of the values' blocks."""
        quantize.scales_of(values, scales, self.block or values.size, int(self.rounding == "sign"))
        if self.clip and values.size:
            np.minimum(scales, np.float32(self.clip * np.std(values, dtype=np.float64)), out=scales)

    def encode(self, values: Array, message: Array, key: RandomKey) -> None:
        scales, packed = self.parts(message, values.size)
        signs = self.rounding == "sign"
        self.measure(values, scales)
        codes = packed if self.bits == 8 else device_of(values).empty(values.size, np.uint8)
        if signs:
            quantize.sign_codes(values, codes)
        else:
            stochastic = int(self.rounding == "stochastic")
            number = key.number if stochastic else 0
            quantize.quantize(values, scales, codes, self.shift, self.levels, stochastic, number, key.first)
        if self.bits < 8:
            quantize.pack(packed, codes, self.bits)

    def add(self, message: Array, into: Array, factor: float = 1.0) -> None:
        scales, packed = self.parts(message, into.size)
        quantize.add_codes(into, packed, scales, self.bits, self.shift, self.levels, factor / self.levels)
