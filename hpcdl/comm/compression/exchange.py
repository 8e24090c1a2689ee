"""All-reduce of encoded chunks with error feedback at both ends: a reduce-scatter and an all-gather, each in one step.

On 3 ranks, with vectors a, b, c of 3 chunks, and ' for encoded:

                     rank 0                rank 1                rank 2
    holds            a0 a1 a2              b0 b1 b2              c0 c1 c2
    sends            a1' -> 1, a2' -> 2    b2' -> 2, b0' -> 0    c0' -> 0, c1' -> 1
    adds, decoded    S0 = a0 + b0' + c0'   S1 = b1 + a1' + c1'   S2 = c2 + a2' + b2'
    sends to all     S0'                   S1'                   S2'                    all then hold S0' S1' S2'

    cost, N ranks    messages      bytes sent, m(n) bytes for a message of n values             steps
    rank r           2 (N - 1)     sum over j != r of m(k(j)) + (N - 1) m(k(r))                 2

k(c) is the length of chunk c. The rank that encodes a chunk keeps what the message leaves out in its residual, and adds
it to that chunk in the next call. Rank r encodes the other ranks' chunks when it sends them, and the sum of chunk r, so
one residual of K values serves both. The invariant is

    sum over ranks of (vector + residual before) = result + sum over ranks of residual after

up to the rounding of the additions: the results of T calls add up to the T exact sums, within the residuals. Each chunk
is added on one rank, in one order, and all ranks decode the same messages, so all get the same bits. Random numbers of
the sum are other ones than those of its parts: an unbiased codec makes an unbiased all-reduce. (Tang et al.,
"DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated compression", ICML 2019; the
exchange: Tang et al., "1-bit Adam", ICML 2021)"""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.compression.codec import ErrorFeedback, RandomKey, VectorCodec
from hpcdl.comm.compression.state import Compressed, Steps


class ChunkExchange(Compressed):
    """State of all-reduces by an exchange of encoded chunks. feedback: False for a codec without a residual."""

    feedback: ErrorFeedback

    def __init__(self, size: int, codec: VectorCodec, feedback: bool = True, key: RandomKey | None = None):
        super().__init__(size, codec.dtype, key)
        self.feedback = ErrorFeedback(codec, size, feedback)
        self.messages: list[np.ndarray] = []  # of each chunk; and a row from each other rank
        self.inbox: list[np.ndarray] = []
        nothing = np.empty(0, codec.dtype)  # compile before any timed call
        self.feedback.part(slice(0, 0)).encode(nothing, codec.message(0), self.key)
        codec.decode(codec.message(0), nothing)
        codec.add(codec.message(0), nothing)

    @property
    def residual(self) -> np.ndarray:
        """What this rank's messages have left out; empty without feedback."""
        return self.feedback.residual

    def cut_vectors(self, cut: slice) -> None:
        self.feedback, self.messages, self.inbox = self.feedback.part(cut), [], []

    def encode(self, vector: np.ndarray, cut: slice, message: np.ndarray, use: str) -> None:
        """Write the message of slice `cut` of the vector; use: of the random numbers."""
        key = self.key._replace(use=use).at(cut.start)
        self.feedback.part(cut).encode(vector[cut], message, key)

    def reduce(self, comm: MPI.Intracomm, vector: np.ndarray, all_reduce: Steps) -> Iterator[Step]:
        rank, size, codec = comm.Get_rank(), comm.Get_size(), self.feedback.codec
        cut, others = chunks(vector.size, size), [other for other in range(size) if other != rank]
        own = cut[rank]
        if len(self.messages) != size:  # reused, as new memory costs more
            self.messages = [codec.message(part.stop - part.start) for part in cut]
            self.inbox = [codec.message(own.stop - own.start) for _ in others]
        requests = [comm.Irecv(row, other) for row, other in zip(self.inbox, others, strict=True)]
        for to in others[rank:] + others[:rank]:  # the right neighbour first, so that all links are busy
            self.encode(vector, cut[to], self.messages[to], "part")
            requests.append(comm.Isend(self.messages[to], to))
        yield requests
        self.add(vector[own])
        self.encode(vector, own, self.messages[rank], "sum")
        yield [comm.Irecv(self.messages[other], other) for other in others] + [
            comm.Isend(self.messages[rank], to) for to in others
        ]
        for part, message in zip(cut, self.messages, strict=True):
            codec.decode(message, vector[part])

    def add(self, own: np.ndarray) -> None:
        """Add the messages of the other ranks to this rank's own part of its chunk."""
        for row in self.inbox:
            self.feedback.codec.add(row, own)
