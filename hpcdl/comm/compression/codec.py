"""Codecs: one vector to one message and back.

    sender      codec.encode(values, message, key)       message: uint8, codec.message_bytes(n) bytes for n values
    receiver    codec.decode(message, out)               out: as long as `values`
                codec.add(message, into, factor)         into += factor * decode(message)

The length of a message depends on n only, so that a receiver knows it. Random numbers depend on a `RandomKey`
and on the index of a value, never on the rank: equal values are rounded equally on every rank.

Error feedback adds to a vector what the messages before have left out (Seide et al., "1-bit stochastic gradient
descent", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019):

    v = x + residual        message = encode(v)        residual = v - decode(message)

The sum of the decoded messages is then the sum of the vectors minus one residual: to the bit for a codec that sends
values as they are (topk, randomk), to the rounding of the subtraction for one that rounds."""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError
from hpcdl.kernels import reduce as kernels
from hpcdl.kernels.device import CPU, Array
from hpcdl.random import Random


class RandomKey(NamedTuple):
    """Key of a vector's random numbers: value i gets the number of (seed, step, use, first + i). use: a word for each
    draw of one step. first: index of the vector's first value in the whole vector, of which it is a part."""

    seed: int = 0
    step: int = 0
    use: str = ""
    first: int = 0

    def at(self, first: int) -> "RandomKey":
        """Return the key of a part that begins at value `first` of this vector."""
        return self._replace(first=self.first + first)

    @property
    def number(self) -> int:
        """The number of (seed, step, use), below 2^63, for a kernel."""
        return _number(self.seed, self.step, self.use)


@functools.lru_cache(64)
def _number(seed: int, step: int, use: str) -> int:
    return int(Random(seed)("compression", use, step).integers(2**63))


class VectorCodec:
    """Base of the codecs. dtype: float32 or float64, of the vectors; UsageError for others."""

    def __init__(self, dtype: DTypeLike):
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise UsageError(f"compressed messages are made of float32 or float64 values, not {self.dtype}")

    def message_bytes(self, n: int) -> int:
        """Return the length of the message of n values."""
        raise NotImplementedError

    def encode(self, values: Array, message: Array, key: RandomKey) -> None:
        """Write the message of `values`, which stay as they are."""
        raise NotImplementedError

    def decode(self, message: Array, out: Array) -> None:
        """Replace `out` by the values of the message."""
        out[:] = 0
        self.add(message, out)

    def add(self, message: Array, into: Array, factor: float = 1.0) -> None:
        """Add the values of the message, times `factor`."""
        raise NotImplementedError

    def encode_with_feedback(self, values: Array, residual: Array, message: Array, key: RandomKey) -> None:
        """Encode v = values + residual; residual = v - decode(message). A codec may do it in fewer passes."""
        kernels.add_into(residual, values)
        self.encode(residual, message, key)
        self.add(message, residual, -1.0)

    def message(self, n: int) -> np.ndarray:
        """Return memory for the message of n values, aligned to a cache line."""
        return CPU.empty(self.message_bytes(n), np.uint8)


class ErrorFeedback:
    """A codec with the residual of a vector of `size` values. keep: False for a codec without feedback; the residual
    is then empty. residual: what the messages so far have left out."""

    def __init__(self, codec: VectorCodec, size: int, keep: bool = True):
        self.codec, self.size, self.keep = codec, size, keep
        self.residual = CPU.zeros(size if keep else 0, codec.dtype)

    def part(self, cut: slice) -> "ErrorFeedback":
        """Return the feedback of slice `cut` of the vector; its residual is a view of the whole one."""
        part = ErrorFeedback(self.codec, 0, self.keep)
        start, stop, _ = cut.indices(self.size)
        part.size, part.residual = stop - start, self.residual[cut]
        return part

    def encode(self, values: Array, message: Array, key: RandomKey) -> None:
        """Encode values + residual, and keep what the message leaves out; without feedback encode the values."""
        if self.keep:
            self.codec.encode_with_feedback(values, self.residual, message, key)
        else:
            self.codec.encode(values, message, key)
