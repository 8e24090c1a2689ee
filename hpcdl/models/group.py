"""Megatron's operators f and g, by which a layer works together with the ranks that hold its other parts.

A matrix product whose weight is cut by columns makes a part of the outputs from all inputs; one whose weight is cut by
rows makes, from a part of the inputs, a summand of all outputs. f stands before the first, g after the second:

    operator    forward                backward                with sequence parallelism
    f           x as it is             sum of all parts' dx    all rows of x; backward: own rows of the sum
    g           sum of all parts' y    dy as it is             own rows of the sum; backward: all rows of dy

Arrays are (rows, width). With sequence parallelism each rank holds rows / size of the rows outside of f ... g, so that
f and g change the number of rows; the array that they return is then another one, from the pool.

    method               takes                        returns
    f, g_backward        an array of the caller's     it, or another one that the caller gives back to the pool
    g, f_backward        an array from the pool       it, or another one from the pool in exchange

(Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation", 2022.) The counterpart
with messages is hpcdl/comm/tensor_group.py.
"""

from typing import Protocol

from hpcdl.kernels.device import Array
from hpcdl.models.pool import Pool


class LayerGroup(Protocol):
    """What a layer asks of the ranks that share it; sequence: whether they share the rows, too."""

    rank: int
    size: int
    sequence: bool

    def f(self, x: Array, pool: Pool) -> Array: ...

    def f_backward(self, dx: Array, pool: Pool) -> Array: ...

    def g(self, y: Array, pool: Pool) -> Array: ...

    def g_backward(self, dy: Array, pool: Pool) -> Array: ...

    def all_reduce(self, array: Array, op: str = "sum") -> None: ...


class IdentityGroup:
    """The group of a layer that is not cut: nothing to sum."""

    rank, size = 0, 1
    sequence = False

    def f(self, x: Array, pool: Pool) -> Array:
        """x as it is."""
        return x

    def f_backward(self, dx: Array, pool: Pool) -> Array:
        """dx as it is."""
        return dx

    def g(self, y: Array, pool: Pool) -> Array:
        """y as it is."""
        return y

    def g_backward(self, dy: Array, pool: Pool) -> Array:
        """dy as it is."""
        return dy

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """The array as it is."""
