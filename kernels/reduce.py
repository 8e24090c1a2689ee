"""Reductions of one vector into another, as an all-reduce does them, and scaled sums; memory bandwidth bounds all."""

from hpcdl.kernels.bind import elementwise


@elementwise("T[::1], T[::1]")
def add_into(i, into, values):
    """into[i] += values[i]; bytes moved per element of b bytes: 3b (two reads, one write)."""
    into[i] += values[i]


@elementwise("T[::1], T[::1]")
def max_into(i, into, values):
    """into[i] = max(into[i], values[i]), NaN if either is NaN; bytes moved per element of b bytes: 3b."""
    a, b = into[i], values[i]
    into[i] = b if b > a or b != b else a  # an unconditional write, so that the loop vectorizes


@elementwise("T[::1], T[::1]")
def min_into(i, into, values):
    """into[i] = min(into[i], values[i]), NaN if either is NaN; bytes moved per element of b bytes: 3b."""
    a, b = into[i], values[i]
    into[i] = b if b < a or b != b else a


@elementwise("T[::1], T[::1], T")
def add_scaled(i, into, values, factor):
    """into[i] += factor * values[i]; bytes moved per element of b bytes: 3b."""
    into[i] += factor * values[i]


@elementwise("T[::1], T")
def scale(i, vector, factor):
    """vector[i] *= factor; bytes moved per element of b bytes: 2b."""
    vector[i] *= factor
