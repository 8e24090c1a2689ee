"""Sparse all-reduce: each rank adds a chunk of sparse vectors and sends the sum to all; dense where that is shorter.

    1  each rank selects k of its values, and sends every rank the selected ones of that rank's chunk
    2  rank r adds the values of chunk r, in the order of the ranks, and sends the sum to all

    m values of a chunk of k(c)     pairs: m (b + 4) bytes, b bytes a value; or dense: k(c) b bytes, whichever is less
    cost, N ranks                   4 (N - 1) messages: before each exchange the ranks send m, in 8 bytes
    rank r sends                    at most k (b + 4) + (N - 1) min(N k (b + 4) / N, k(r) b) bytes beside that

The sum is exact: nothing is selected anew. Each chunk is added on one rank, so all get the same bits. (Renggli et al.,
"SparCML: high-performance sparse communication for machine learning", SC 2019: split, then all-gather)"""

import itertools
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.compression.codec import ErrorFeedback, RandomKey, VectorCodec
from hpcdl.comm.compression.state import Compressed, Steps
from hpcdl.kernels.device import CPU
from hpcdl.kernels.select import add_at, take

INDEX = 4  # bytes of an index


def count_of(fraction: float, n: int) -> int:
    """Return how many of n values are sent: the fraction, rounded, and at least 1 if there are values."""
    return min(n, max(1, round(fraction * n)))


def packed_bytes(count: int, length: int, item: int) -> int:
    """Return the bytes of a chunk of `length` values, `count` of them not zero, in the shorter form."""
    return min(count * (item + INDEX), length * item)


def pack_chunk(values: np.ndarray, indices: np.ndarray, length: int) -> np.ndarray:
    """Return the message of these values of a chunk of `length`: values and indices, or all values if shorter."""
    message = CPU.empty(packed_bytes(values.size, length, values.itemsize), np.uint8)
    if message.size == length * values.itemsize:
        dense = message.view(values.dtype)
        dense[:] = 0
        add_at(values, dense, indices, 1.0)
    else:
        message[: values.nbytes].view(values.dtype)[:] = values
        message[values.nbytes :].view(np.uint32)[:] = indices
    return message


def add_chunk(message: np.ndarray, count: int, into: np.ndarray) -> None:
    """Add what `pack_chunk` has packed. count: of the values that are not zero."""
    if message.size == into.nbytes:
        into += message.view(into.dtype)
    else:
        end = count * into.itemsize
        add_at(message[:end].view(into.dtype), into, message[end:].view(np.uint32), 1.0)


def exchange(
    comm: MPI.Intracomm, messages: list[np.ndarray], counts: np.ndarray, lengths: list[int], item: int
) -> Generator[Step, None, tuple[list[np.ndarray], np.ndarray]]:
    """Send messages[r], of counts[r] values, to each other rank r; return the messages and counts of all ranks, by
    rank, with its own. lengths[r]: values of the chunk that rank r's message is of. item: bytes of a value."""
    rank, size = comm.Get_rank(), comm.Get_size()
    others, sent = [other for other in range(size) if other != rank], counts.astype(np.int64)
    received = sent.copy()
    yield [comm.Irecv(received[other : other + 1], other) for other in others] + [
        comm.Isend(sent[to : to + 1], to) for to in others
    ]
    inbox = [CPU.empty(packed_bytes(int(received[r]), lengths[r], item), np.uint8) for r in range(size)]
    inbox[rank] = messages[rank]
    yield [comm.Irecv(inbox[other], other) for other in others] + [comm.Isend(messages[to], to) for to in others]
    return inbox, received


def traffic(codec: Any, n: int, ranks: int) -> tuple[float, int]:
    """Return the bytes that a rank sends at most, and the steps: its sum has the values of all ranks, if all differ."""
    selected, others = codec.message_bytes(n), ranks - 1
    sums = min(selected, n / ranks * codec.dtype.itemsize)
    return others * (selected / ranks + sums + 16), 4


class SparseAllReduce(Compressed):
    """State of sparse all-reduces. codec: with a message of values and indices, in ascending order, its `parts`."""

    feedback: ErrorFeedback

    def __init__(self, size: int, codec: VectorCodec, feedback: bool = True, key: RandomKey | None = None):
        super().__init__(size, codec.dtype, key)
        self.feedback = ErrorFeedback(codec, size, feedback)
        self.message = codec.message(size)
        one, none = np.zeros(1, codec.dtype), np.zeros(0, np.uint32)  # compile before any timed call
        ErrorFeedback(codec, 1).encode(one, codec.message(1), self.key)
        add_at(one[:0], one, none, 1.0)
        take(one[:0], one, none)

    def cut_vectors(self, cut: slice) -> None:
        self.feedback = self.feedback.part(cut)
        self.message = self.feedback.codec.message(cut.stop - cut.start)

    def reduce(self, comm: MPI.Intracomm, vector: np.ndarray, all_reduce: Steps) -> Iterator[Step]:
        rank, size = comm.Get_rank(), comm.Get_size()
        codec: Any = self.feedback.codec
        cut = chunks(vector.size, size)
        lengths, own = [part.stop - part.start for part in cut], cut[rank]
        self.feedback.encode(vector, self.message, self.key)
        values, indices = codec.parts(self.message)
        bounds = np.searchsorted(indices, [part.start for part in cut] + [vector.size])
        places = [slice(int(start), int(stop)) for start, stop in itertools.pairwise(bounds)]

        packed = [
            pack_chunk(values[place], indices[place] - np.uint32(part.start), length)
            for place, part, length in zip(places, cut, lengths, strict=True)
        ]
        inbox, counts = yield from exchange(comm, packed, np.diff(bounds), [lengths[rank]] * size, vector.itemsize)
        vector[:] = 0
        for message, count in zip(inbox, counts, strict=True):
            add_chunk(message, int(count), vector[own])

        left = np.flatnonzero(vector[own]).astype(np.uint32)  # NaN is not zero
        total = pack_chunk(vector[own][left], left, lengths[rank])
        sums, counts = yield from exchange(comm, [total] * size, np.full(size, left.size), lengths, vector.itemsize)
        for other in range(size):
            if other != rank:
                add_chunk(sums[other], int(counts[other]), vector[cut[other]])
