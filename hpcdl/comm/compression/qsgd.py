"""QSGD: stochastic rounding to a few levels, unbiased.

    v is rounded up or down to a multiple of its block's step, with the probability that makes the mean v
    step            2 scale / L, scale = the largest |v| of a block of 512 values
    bits (L)        1 (1)       2 (2)        4 (14)      8 (254)
    values          +-scale     and 0        15 values   255 values
    variance        <= step^2 / 4 of each value
    message         n bits / 8 + 4 ceil(n / 512) bytes for n values

The paper's scale is the 2-norm; its experiments take the largest magnitude, too, which has the smaller variance.
One bit has no code for 0: its variance is scale^2 - v^2. (Alistarh et al., "QSGD: communication-efficient SGD via
gradient quantization and encoding", NeurIPS 2017)"""

from hpcdl.comm.compression.method import CompressionMethod
from hpcdl.comm.compression.quantizer import BLOCK, Quantizer, check_block
from hpcdl.errors import UsageError


def check(bits: int, block: int) -> None:
    """Raise UsageError if there are no codes of so many bits."""
    if bits not in (1, 2, 4, 8):
        raise UsageError(f"bits is 1, 2, 4 or 8, not {bits}")
    check_block(block)


METHODS = [
    CompressionMethod(
        "qsgd",
        codec=lambda dtype, feedback, bits, block: Quantizer(dtype, bits, block),
        settings={"bits": 4, "block": BLOCK},
        feedback=False,
        check=check,
    )
]
