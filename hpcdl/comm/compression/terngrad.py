"""TernGrad: each value becomes -s, 0 or s, unbiased; all ranks share the scale s, so that sums of codes are exact.

    s = the largest |v|, of all ranks        v -> s sign(v) with probability |v| / s, else 0

On 3 ranks, with vectors of 3 chunks, and ' for codes of 2 bits:

    1  each rank sends the largest magnitude of its vector to all
    2  rank r gets the chunks r' of the others, and adds the codes: a number from -3 to 3
    3  it sends the sum to all, in w bits a value

    N ranks            up to 7        up to 127        more
    w                  4              8                16
    rank r sends       4 (N - 1) + sum over j != r of k(j) / 4 + (N - 1) k(r) w / 8 bytes, in 3 steps

With clip=C no |v| is above C standard deviations of its rank's vector: the mean is then no longer exact, and the
variance is much smaller (the paper takes C = 2.5). A message of one vector has a scale of its own, and n / 4 + 4 bytes.
(Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NeurIPS 2017; its
section 3.3 has the shared scale)"""

import math
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.compression.codec import ErrorFeedback, RandomKey
from hpcdl.comm.compression.method import CompressionMethod
from hpcdl.comm.compression.quantizer import Quantizer
from hpcdl.comm.compression.state import Compressed, Steps
from hpcdl.errors import UsageError
from hpcdl.kernels import quantize
from hpcdl.kernels.device import CPU
from hpcdl.kernels.reduce import add_into

BITS = 2


def check(clip: float) -> None:
    """Raise UsageError if `clip` is no number of standard deviations."""
    if not 0 <= clip < math.inf:
        raise UsageError(f"clip is 0 (none) or a number of standard deviations above it, not {clip:g}")


def bits_of_sum(ranks: int) -> int:
    """Return the bits in which a sum of `ranks` codes, 0 to 2 ranks, travels."""
    return 4 if ranks <= 7 else 8 if ranks <= 127 else 16


def traffic(codec: Quantizer, n: int, ranks: int) -> tuple[float, int]:
    """Return the bytes that a rank sends for n values, and the steps."""
    others = ranks - 1
    return others * (4 + n / ranks / 8 * (BITS + bits_of_sum(ranks))), 3


class SharedScale(Compressed):
    """State of all-reduces of ternary codes."""

    feedback: ErrorFeedback
    codec: Quantizer

    def __init__(self, size: int, codec: Quantizer, feedback: bool = False, key: RandomKey | None = None):
        super().__init__(size, codec.dtype, key)
        self.codec, self.feedback = codec, ErrorFeedback(codec, size, feedback)
        one = np.ones(1, codec.dtype)  # compile before any timed call
        self.packed(self.codes(one, np.ones(1, np.float32)), BITS)
        self.add(CPU.zeros(1, np.uint8), np.ones(1, np.float32), 1, one)
        add_into(one, one)

    def cut_vectors(self, cut: slice) -> None:
        self.feedback = self.feedback.part(cut)

    def codes(self, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Return the codes of the values, 0, 1 or 2."""
        codes = CPU.empty(values.size, np.uint8)
        levels, stochastic, number = self.codec.levels, 1, self.key.number
        quantize.quantize(values, scale, codes, quantize.WHOLE, levels, stochastic, number, self.key.first)
        return codes

    def packed(self, codes: np.ndarray, bits: int) -> np.ndarray:
        """Return the message of codes of so many bits; those of 16 are uint16."""
        if bits >= 8:
            return codes.view(np.uint8)
        message = CPU.empty(-(-codes.size * bits // 8), np.uint8)
        quantize.pack(message, codes, bits)
        return message

    def add(self, message: np.ndarray, scale: np.ndarray, ranks: int, into: np.ndarray) -> None:
        """Add the values of a message of sums of so many ranks' codes."""
        bits = BITS if ranks == 1 else bits_of_sum(ranks)
        if bits == 16:
            into += (message.view(np.uint16).astype(self.dtype) - ranks) * scale[0].astype(self.dtype)
        else:
            quantize.add_codes(into, message, scale, bits, quantize.WHOLE, 2 * ranks, 0.5)

    def reduce(self, comm: MPI.Intracomm, vector: np.ndarray, all_reduce: Steps) -> Iterator[Step]:
        rank, size, residual = comm.Get_rank(), comm.Get_size(), self.feedback.residual
        cut, others = chunks(vector.size, size), [other for other in range(size) if other != rank]
        values = vector
        if self.feedback.keep:
            add_into(residual, vector)
            values = residual
        scales = np.zeros(size, np.float32)
        self.codec.measure(values, scales[rank : rank + 1])
        rows = scales.view(np.uint8).reshape(size, 4)
        yield [comm.Irecv(rows[other], other) for other in others] + [comm.Isend(rows[rank], to) for to in others]
        scale, exactly_one = scales.max(keepdims=True), np.ones(1, np.float32)
        codes = self.codes(values, scale)
        sent = [self.packed(codes[part], BITS) for part in cut]
        if self.feedback.keep:
            for part, message in zip(cut, sent, strict=True):
                quantize.add_codes(residual[part], message, scale, BITS, quantize.WHOLE, self.codec.levels, -0.5)
        inbox = [CPU.empty(sent[rank].size, np.uint8) for _ in others]
        yield [comm.Irecv(row, other) for row, other in zip(inbox, others, strict=True)] + [
            comm.Isend(sent[to], to) for to in others
        ]
        bits = bits_of_sum(size)
        total = CPU.zeros(cut[rank].stop - cut[rank].start, self.dtype)  # of -1, 0 and 1: exact
        for message in (sent[rank], *inbox):
            self.add(message, exactly_one, 1, total)
        total += size
        own = self.packed(total.astype(np.uint16 if bits == 16 else np.uint8), bits)
        sums = [CPU.empty(-(-(part.stop - part.start) * bits // 8), np.uint8) for part in cut]
        sums[rank] = own
        yield [comm.Irecv(sums[other], other) for other in others] + [comm.Isend(own, to) for to in others]
        vector[:] = 0
        for part, message in zip(cut, sums, strict=True):
            self.add(message, scale, size, vector[part])


METHODS = [
    CompressionMethod(
        "terngrad",
        codec=lambda dtype, feedback, clip: Quantizer(dtype, BITS, 0, "stochastic", clip),
        state=lambda size, dtype, key, layout, feedback, clip: SharedScale(
            size, Quantizer(dtype, BITS, 0, "stochastic", clip), feedback, key
        ),
        traffic=traffic,
        settings={"clip": 0.0},
        feedback=False,
        check=check,
    )
]
