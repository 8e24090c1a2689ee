"""The interface of tensor parallelism: Megatron's operators f and g, which connect the parts of a layer.

A product with a weight cut by columns computes a part of the outputs from all inputs; one with a weight cut by rows
computes a summand of all outputs from a part of the inputs. f precedes the first, g follows the second:

    operator    forward                backward                with sequence parallelism
    f           x as it is             sum of all parts' dx    all rows of x; backward: own rows of the sum
    g           sum of all parts' y    dy as it is             own rows of the sum; backward: all rows of dy

Arrays are (rows, width). With sequence parallelism each rank holds rows / size of the rows outside of f ... g, so f and
g change the number of rows and return another array, from the pool.

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
    """The ranks that share a layer; sequence: True with sequence parallelism."""

    rank: int
    size: int
    sequence: bool

    def f(self, x: Array, pool: Pool) -> Array: ...

    def f_backward(self, dx: Array, pool: Pool) -> Array: ...

    def g(self, y: Array, pool: Pool) -> Array: ...

    def g_backward(self, dy: Array, pool: Pool) -> Array: ...

    def all_reduce(self, array: Array, op: str = "sum") -> None: ...


class IdentityGroup:
    """The group of a layer that is not cut: all operators are identities."""

    rank, size = 0, 1
    sequence = False

    def f(self, x: Array, pool: Pool) -> Array:
        """Return x unchanged."""
        return x

    def f_backward(self, dx: Array, pool: Pool) -> Array:
        """Return dx unchanged."""
        return dx

    def g(self, y: Array, pool: Pool) -> Array:
        """Return y unchanged."""
        return y

    def g_backward(self, dy: Array, pool: Pool) -> Array:
        """Return dy unchanged."""
        return dy

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Leave the array unchanged."""
