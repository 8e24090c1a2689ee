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


class IdentityGroup:
    """The group of a layer that is not cut: nothing to sum."""

    rank, size, sequence = 0, 1, False

    def f(self, x, pool):
        """x as it is."""
        return x

    def f_backward(self, dx, pool):
        """dx as it is."""
        return dx

    def g(self, y, pool):
        """y as it is."""
        return y

    def g_backward(self, dy, pool):
        """dy as it is."""
        return dy

    def all_reduce(self, array, op="sum"):
        """The array as it is."""
