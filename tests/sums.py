"""Vectors whose sum over the ranks is exact, and a check of all-reduce with vectors in windows and elsewhere."""

import numpy as np


def values(rank, length, dtype="float32"):
    """Return whole numbers, different on each rank, whose sums are exact in every type."""
    return ((np.arange(length) * 7 + rank * 13) % 1000).astype(dtype)


def total(size, length, dtype="float32"):
    return sum(values(rank, length, dtype) for rank in range(size))


def check_sum(comm, vector):
    """Sum `values` over the ranks in this vector, and compare."""
    vector[...] = values(comm.rank, vector.size, vector.dtype)
    comm.all_reduce(vector)
    assert np.array_equal(vector, total(comm.size, vector.size, vector.dtype))


def check_sums(comm, where, lengths, times):
    """Sum vectors of these lengths several times. where they lie: windows (comm.empty), elsewhere, or mixed."""
    for length in lengths:
        vector = comm.empty(length)
        if where == "elsewhere" or (where == "mixed" and comm.rank % 2):
            vector = np.empty(length, "float32")
        for _ in range(times):
            check_sum(comm, vector)
