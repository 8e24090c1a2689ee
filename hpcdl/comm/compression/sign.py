"""Sign: one bit for each value, and the mean magnitude of each block; with a vote, the sign of the majority of ranks.

    v -> +-m, the sign of v, m = the mean |v| of a block of 512 values (0 counts as positive)
    message of n values     n / 8 + 4 ceil(n / 512) bytes

Signs are biased: without error feedback, which is on by default, SGD may go the wrong way. (One bit with feedback:
Seide et al., Interspeech 2014; scale and proof: Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019)

    sign:vote       a value of the result is +-M: the sign that most ranks have sent, M = the sum of their m

With a vote the paper updates by the sign itself; M keeps the length of a gradient, so that --lr means the same. A tie
goes to the ranks with the larger m. With a vote feedback is off, as in the paper, unless feedback=yes is given.
(Bernstein et al., "signSGD: compressed optimisation for non-convex problems", ICML 2018)"""

from typing import Any

import numpy as np

from hpcdl.comm.compression.exchange import ChunkExchange
from hpcdl.comm.compression.method import CompressionMethod
from hpcdl.comm.compression.quantizer import BLOCK, Quantizer, check_block


class MajorityVote(ChunkExchange):
    """The exchange in which the owner of a chunk counts signs. codec: a `Quantizer` by signs."""

    def add(self, own: np.ndarray) -> None:
        """Replace this rank's own part of its chunk by values with the sign of the majority, and the magnitude M."""
        codec: Any = self.feedback.codec
        mine = codec.message(own.size)
        codec.encode(own, mine, self.key)
        votes, total, each = (np.zeros_like(own) for _ in range(3))
        magnitude = np.zeros(codec.blocks(own.size), own.dtype)
        for message in (mine, *self.inbox):
            codec.decode(message, each)
            total += each
            votes += np.sign(each)
            magnitude += codec.parts(message, own.size)[0]
        block = np.repeat(magnitude, codec.block)[: own.size]
        ahead = 2 * votes * block + total  # |total| <= block, and votes are whole numbers: total decides ties only
        own[:] = np.where(ahead >= 0, block, -block)
        own[~np.isfinite(total)] = np.nan


METHODS = [
    CompressionMethod(
        "sign",
        state=lambda size, dtype, key, layout, feedback, vote, block: (MajorityVote if vote else ChunkExchange)(
            size, Quantizer(dtype, 1, block, "sign"), feedback, key
        ),
        codec=lambda dtype, feedback, vote, block: Quantizer(dtype, 1, block, "sign"),
        settings={"vote": "no", "block": BLOCK},
        first="vote",
        check=lambda vote, block: check_block(block),
    )
]
