"""The ranks that share the tokens of sequences, C of them: what is the same for all ways of attention (context.py).

Choices of experts (models/mixture.py) are limited and balanced by sequence. So that its tokens follow those of other
ranks, each rank gets the choices of each expert in all chunks, by one all-gather for each mixture and pass forward:

    2 C S E integers in all, for S sequences and E experts: rank r's, in chunks r and 2C-1-r

The sum of those in earlier chunks is what an expert has taken before a chunk; the sum of all is its share. Backward
sends nothing."""

import numpy as np

from hpcdl.comm.communicator import Communicator
from hpcdl.models.group import ContextGroup


class TokenGroup(ContextGroup):
    """The ranks of `comm`. exposed: seconds in communicator calls of `exchanges` passes of attention, forward and
    backward, if messages can be hidden. alone, trial: see context.py."""

    def __init__(self, comm: Communicator):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.chunks = 2 if self.size > 1 else 1
        self.exposed, self.exchanges, self.alone = 0.0, 0.0, 0.0
        self.trial: dict[str, float] = {}

    def choices(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.size == 1:
            return super().choices(counts)
        every = np.empty((self.size, *counts.shape), np.int64)
        every[self.rank] = counts
        self.comm.all_gather(every)
        by_chunk = np.concatenate([every[:, :, 0], every[::-1, :, 1]])  # zigzag
        ends = by_chunk.cumsum(axis=0)
        before = (ends - by_chunk)[[self.rank, -1 - self.rank]]
        return before.transpose(1, 0, 2), ends[-1]
