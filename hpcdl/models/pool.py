"""Buffer pool: reuse of buffers, so that training allocates nothing large after its first step; on CPU or GPU.

The last user of a buffer gives it back; each of several micro-batches in flight takes its own. A buffer has 2^k
elements, so that batches of other sizes reuse it, too. At most as many of a size exist as were in use at once.

A backward pass may leave products for later (zero-bubble pipelines): what they read is pinned, so that a layer that
gives it back loses it only when the last product has run, and a layer that writes over it writes into a copy."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

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
        self.later: list[Any] | None = None  # takes the products of weight gradients; None: they are computed at once
        self.pins: dict[int, int] = {}  # by the id of a buffer's memory: products that are left and read it
        self.given: dict[int, Array] = {}  # pinned buffers that have been given back

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
        if id(buffer.base) in self.pins:
            self.given[id(buffer.base)] = buffer
            return
        whole = self.bases[id(buffer.base)]
        if self.memory is not None:
            self.memory.add("activations", -whole.nbytes)
        self.free[(buffer.size - 1).bit_length()].append(whole)

    @contextlib.contextmanager
    def leaving(self, products: list[Any] | None) -> Iterator[None]:
        """Context in which layers append their products of weight gradients to `products`; None: compute them."""
        self.later = products
        try:
            yield
        finally:
            self.later = None

    def pin(self, array: Array) -> None:
        """Keep the contents of an array until `unpin`, also when it is given back."""
        self.pins[id(array.base)] = self.pins.get(id(array.base), 0) + 1

    def unpin(self, array: Array) -> None:
        """Undo a `pin`; the last one takes the array back if it has been given back meanwhile."""
        key = id(array.base)
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]
            if key in self.given:
                self.give(self.given.pop(key))

    def writable(self, array: Array) -> Array:
        """Return the array, or, if it is pinned, a copy from the pool, which the caller gives back."""
        if id(array.base) not in self.pins:
            return array
        copy = self.take(*array.shape)
        copy[...] = array
        return copy
