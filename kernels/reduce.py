"""Reductions of two vectors into the first: what an all-reduce does with each message that arrives.

Bytes moved per element of b bytes: 3b (two reads, one write), so each runs against memory bandwidth.
"""

from hpcdl.kernels.bind import elementwise


@elementwise("T[::1], T[::1]")
def add_into(i, into, values):
    """into[i] += values[i]"""
    into[i] += values[i]


@elementwise("T[::1], T[::1]")
def max_into(i, into, values):
    """into[i] = max(into[i], values[i]); a NaN on either side stays a NaN."""
    a, b = into[i], values[i]
    into[i] = b if (b > a) | (b != b) else a  # no `or`: a branch would keep the loop from vectorizing


@elementwise("T[::1], T[::1]")
def min_into(i, into, values):
    """into[i] = min(into[i], values[i]); a NaN on either side stays a NaN."""
    a, b = into[i], values[i]
    into[i] = b if (b < a) | (b != b) else a


@elementwise("T[::1], T")
def scale(i, vector, factor):
    """vector[i] *= factor; bytes moved per element of b bytes: 2b."""
    vector[i] *= factor
