"""Random-k: k values at indices that all ranks draw alike, so that no index travels.

    k = fraction n, at least 1        indices drawn without replacement by (seed, step), equal on all ranks
    all-reduce                        of the k values alone, by the communicator's own algorithm
    message of n values, one vector   8 bytes of the draw's number, and k b bytes, b bytes a value

With error feedback (the default) the other values are kept for later steps. With feedback=no the values are multiplied
by n / k, which makes the mean over the draws the vector itself. (Stich et al., "Sparsified SGD with memory", NeurIPS
2018; Konecny et al., "Federated learning: strategies for improving communication efficiency", 2016: random mask)"""

import math
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.compression.codec import ErrorFeedback, RandomKey, VectorCodec
from hpcdl.comm.compression.method import CompressionMethod, check_fraction
from hpcdl.comm.compression.sparse import count_of
from hpcdl.comm.compression.state import Compressed, Steps
from hpcdl.kernels.device import Array, device_of
from hpcdl.kernels.select import add_at, take
from hpcdl.random import Random

NUMBER = 8  # bytes of the number of a draw


class RandomK(VectorCodec):
    """Values at random indices. fraction: of the values, above 0 and at most 1. scaled: multiply them by n / k."""

    def __init__(self, dtype: DTypeLike, fraction: float, scaled: bool):
        super().__init__(dtype)
        self.fraction, self.scaled = fraction, scaled

    def message_bytes(self, n: int) -> int:
        return NUMBER + count_of(self.fraction, n) * self.dtype.itemsize

    def draw(self, number: int, n: int) -> np.ndarray:
        """Return the indices of draw `number` among n values, in ascending order."""
        k = count_of(self.fraction, n)
        drawn = Random(number)("indices").choice(n, k, replace=False, shuffle=False) if k < n else np.arange(n)
        return np.sort(drawn).astype(np.uint32)

    def factor(self, n: int) -> float:
        """Return by what the values are multiplied when they are decoded."""
        return n / count_of(self.fraction, n) if self.scaled and n else 1.0

    def number(self, key: RandomKey) -> int:
        """Return the number of the draw for the part of a vector that begins at key.first."""
        return (key.number + key.first) % 2**63

    def encode(self, values: Array, message: Array, key: RandomKey) -> None:
        device = device_of(values)
        number = self.number(key)
        device.copy_in(message[:NUMBER].view(np.int64), np.array([number]))
        take(message[NUMBER:].view(self.dtype), values, device.array(self.draw(number, values.size)))

    def add(self, message: Array, into: Array, factor: float = 1.0) -> None:
        device = device_of(into)
        number = int(device.host(message[:NUMBER].view(np.int64))[0])
        indices = device.array(self.draw(number, into.size))
        add_at(message[NUMBER:].view(self.dtype), into, indices, factor * self.factor(into.size))


def traffic(codec: RandomK, n: int, ranks: int) -> tuple[float, int]:
    """Return the bytes that a rank sends of n values, and the steps, by an all-reduce with the fewest of both."""
    sent = count_of(codec.fraction, n) * codec.dtype.itemsize
    return 2 * (ranks - 1) / ranks * sent, 2 * math.ceil(math.log2(ranks))


class SharedIndices(Compressed):
    """State of all-reduces of values at random indices, equal on all ranks."""

    feedback: ErrorFeedback

    def __init__(self, size: int, codec: RandomK, feedback: bool = True, key: RandomKey | None = None):
        super().__init__(size, codec.dtype, key)
        self.feedback, self.codec = ErrorFeedback(codec, size, feedback), codec
        self.message = codec.message(size)
        one = np.zeros(1, codec.dtype)  # compile before any timed call
        ErrorFeedback(codec, 1).encode(one, codec.message(1), self.key)

    def cut_vectors(self, cut: slice) -> None:
        self.feedback = self.feedback.part(cut)
        self.message = self.codec.message(cut.stop - cut.start)

    def reduce(self, comm: MPI.Intracomm, vector: np.ndarray, all_reduce: Steps) -> Iterator[Step]:
        self.feedback.encode(vector, self.message, self.key)
        yield from all_reduce(comm, self.message[NUMBER:].view(self.dtype))
        self.codec.decode(self.message, vector)


METHODS = [
    CompressionMethod(
        "randomk",
        state=lambda size, dtype, key, layout, feedback, fraction: SharedIndices(
            size, RandomK(dtype, fraction, not feedback), feedback, key
        ),
        codec=lambda dtype, feedback, fraction: RandomK(dtype, fraction, not feedback),
        traffic=traffic,
        settings={"fraction": 0.01},
        first="fraction",
        check=check_fraction,
    )
]
