"""TernGrad: each value becomes -s, 0 or s, with one scale s for the whole message, unbiased.

    s = the largest |v|        v -> s sign(v) with probability |v| / s, else 0
    message of n values        n / 4 + 4 bytes: 2 bits a value

With clip=C no |v| is above C standard deviations: the mean is then no longer exact, and the variance is much smaller
(the paper takes C = 2.5). In an all-reduce a message is a rank's chunk, and the sum of a chunk is encoded anew with a
scale of its own; the paper's server sends more bits instead. (Wen et al., "TernGrad: ternary gradients to reduce
communication in distributed deep learning", NeurIPS 2017)"""

import math

from hpcdl.comm.compression.method import CompressionMethod
from hpcdl.comm.compression.quantizer import Quantizer
from hpcdl.errors import UsageError


def check(clip: float) -> None:
    """Raise UsageError if `clip` is no number of standard deviations."""
    if not 0 <= clip < math.inf:
        raise UsageError(f"clip is 0 (none) or a number of standard deviations above it, not {clip:g}")


METHODS = [
    CompressionMethod(
        "terngrad",
        codec=lambda dtype, feedback, clip: Quantizer(dtype, 2, 0, "stochastic", clip),
        settings={"clip": 0.0},
        feedback=False,
        check=check,
    )
]
