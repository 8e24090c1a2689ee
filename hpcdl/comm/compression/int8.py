"""int8: each value is rounded to the nearest of 255 multiples of its block's scale.

    scale = the largest |v| of a block of 512 values        error <= scale / 254
    message of n values     n + 4 ceil(n / 512) bytes, about a quarter of float32

(Block-wise 8-bit quantization: Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016)"""

from hpcdl.comm.compression.method import CompressionMethod
from hpcdl.comm.compression.quantizer import BLOCK, Quantizer, check_block

METHODS = [
    CompressionMethod(
        "int8",
        codec=lambda dtype, feedback, block: Quantizer(dtype, 8, block, "nearest"),
        settings={"block": BLOCK},
        check=check_block,
    )
]
