"""Top-k: the k values of largest magnitude, with their indices; what is not sent is kept for the next step.

    k = fraction n, at least 1        a tie goes to the lower index
    message of n values               k (b + 4) bytes, b bytes a value

(Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Stich et al., "Sparsified SGD
with memory", NeurIPS 2018)"""

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.comm.compression.codec import RandomKey, VectorCodec
from hpcdl.comm.compression.method import CompressionMethod, check_fraction
from hpcdl.comm.compression.sparse import SparseAllReduce, count_of, traffic
from hpcdl.kernels.device import Array
from hpcdl.kernels.select import add_at, select_largest, take


class TopK(VectorCodec):
    """The values of largest magnitude. fraction: of the values, above 0 and at most 1."""

    def __init__(self, dtype: DTypeLike, fraction: float):
        super().__init__(dtype)
        self.fraction = fraction

    def message_bytes(self, n: int) -> int:
        return count_of(self.fraction, n) * (self.dtype.itemsize + 4)

    def parts(self, message: Array) -> tuple[Array, Array]:
        """Return the values and the indices of a message, as views."""
        k = message.size // (self.dtype.itemsize + 4)
        start = k * self.dtype.itemsize
        return message[:start].view(self.dtype), message[start:].view(np.uint32)

    def encode(self, values: Array, message: Array, key: RandomKey) -> None:
        sent, indices = self.parts(message)
        select_largest(values, indices)
        take(sent, values, indices)

    def add(self, message: Array, into: Array, factor: float = 1.0) -> None:
        sent, indices = self.parts(message)
        add_at(sent, into, indices, factor)


METHODS = [
    CompressionMethod(
        "topk",
        state=lambda size, dtype, key, layout, feedback, fraction: SparseAllReduce(
            size, TopK(dtype, fraction), feedback, key
        ),
        codec=lambda dtype, feedback, fraction: TopK(dtype, fraction),
        settings={"fraction": 0.01},
        traffic=traffic,
        first="fraction",
        check=check_fraction,
    )
]
