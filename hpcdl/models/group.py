"""Megatron's operators f and g, by which a layer works together with the ranks that hold its other parts.

A layer whose weight is cut by columns needs the sum of all parts' gradients by its input; one whose weight is cut by
rows needs the sum of all parts' products. A layer calls both operators at their places, its group makes them real:

    operator    place                                     column cut     row cut       not cut (Alone)
    g(z)        forward, after the matrix product         identity       all-reduce    identity
    f(dx)       backward, on the gradient by the input    all-reduce     identity      identity

Both work in place and return their argument, an array (rows, width). (Shoeybi et al., "Megatron-LM", 2019.)
"""


class Alone:
    """The group of a layer that is not cut: nothing to sum."""

    def f(self, dx):
        """Backward: dx as it is."""
        return dx

    def g(self, z):
        """Forward: z as it is."""
        return z
