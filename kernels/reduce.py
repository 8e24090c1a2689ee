"""Reductions of two vectors into the first: what an all-reduce does with each message that arrives.

Bytes moved per element of b bytes: 3b (two reads, one write), so each runs against memory bandwidth.
"""

from hpcdl.kernels.bind import cpu


@cpu("T[::1], T[::1]")
def add_into(into, values):
    """into[i] += values[i]"""
    for i in range(into.size):
        into[i] += values[i]


@cpu("T[::1], T[::1]")
def max_into(into, values):
    """into[i] = max(into[i], values[i]); a NaN on either side stays a NaN."""
    for i in range(into.size):
        if not values[i] <= into[i] and into[i] == into[i]:
            into[i] = values[i]


@cpu("T[::1], T[::1]")
def min_into(into, values):
    """into[i] = min(into[i], values[i]); a NaN on either side stays a NaN."""
    for i in range(into.size):
        if not values[i] >= into[i] and into[i] == into[i]:
            into[i] = values[i]


@cpu("T[::1], float64")
def scale(vector, factor):
    """vector[i] *= factor"""
    factor = vector.dtype.type(factor)
    for i in range(vector.size):
        vector[i] *= factor
