"""Buffer pool: reuse of buffers, so that training allocates nothing large after its first step; on CPU or GPU.

    forward    y = pool.take(rows, width)      several micro-batches in flight: each takes its own
    backward   pool.give(y)                    the last user of a buffer gives it back

Free buffers are kept in classes of 2^k elements: batches of other sizes reuse them, too, and a class never holds more
buffers than were in use at once.
"""

import math
from collections import defaultdict

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.memory import Memory


class Pool:
    """Buffers of one element type on one device.

    `take(*shape)` lends one with unspecified contents, `give(buffer)` returns it. memory: counts the lent bytes as
    activations (`hpcdl.memory.Memory`), or None.
    """

    def __init__(self, dtype: DTypeLike, device: Device = CPU):
        self.dtype, self.device = np.dtype(dtype), device
        self.memory: Memory | None = None
        self.free: defaultdict[int, list[Array]] = defaultdict(list)
        self.bases: dict[int, Array] = {}  # each buffer by the id of the memory that its views refer to

    def take(self, *shape: int) -> Array:
        """Lend a C-contiguous array of this shape, with unspecified contents."""
        size = math.prod(shape)
        k = (size - 1).bit_length()
        try:
            whole = self.free[k].pop()
        except IndexError:
            whole = self.device.empty(1 << k, self.dtype)
            self.bases[id(whole[:1].base)] = whole
        if self.memory is not None:
            self.memory.add("activations", whole.nbytes)
        return whole[:size].reshape(shape)

    def give(self, buffer: Array) -> None:
        """Take back an array that `take` lent; it must not be used any more."""
        whole = self.bases[id(buffer.base)]
        if self.memory is not None:
            self.memory.add("activations", -whole.nbytes)
        self.free[(buffer.size - 1).bit_length()].append(whole)
