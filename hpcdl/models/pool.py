"""Buffer pool: reuse of buffers, so that training allocates nothing large after its first step; on CPU or GPU.

The last user of a buffer gives it back; each of several micro-batches in flight takes its own. A buffer has 2^k
elements, so that batches of other sizes reuse it, too. At most as many of a size exist as were in use at once."""

import math
from collections import defaultdict

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.memory import Memory


class Pool:
    """Buffers of one element type on one device. memory: counts lent bytes, as activations; None: no count."""

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
        """Take back an array that `take` lent; its user must not use the array any more."""
        whole = self.bases[id(buffer.base)]
        if self.memory is not None:
            self.memory.add("activations", -whole.nbytes)
        self.free[(buffer.size - 1).bit_length()].append(whole)
