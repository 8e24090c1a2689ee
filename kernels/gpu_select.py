"""CUDA twin of select.py: the k-th largest magnitude by its bits, 8 at a time from the highest, then an ordered pass.

The bits of magnitudes, read as integers, have their order. A pass takes the values whose upper bits are those found so
far, and counts each value of their next 8 bits; the bin that holds the k-th largest gives these bits. Then each thread
counts what it takes of its part of the vector, and writes it behind what the threads before have taken."""

import numpy as np

from hpcdl.kernels import select
from hpcdl.kernels.gpu import BLOCKS, THREADS, cuda, cuda_kernel
from hpcdl.kernels.select import magnitude

BINS = 256


@cuda_kernel("T[::1], int64, int64, int64[::1]")
def count_bits(x, prefix, shift, counts):
    """counts[b] += the number of values with the bits `prefix` from bit shift + 8 on, and b in the 8 bits below."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        bits = bits_of(x[i])
        if (bits >> shift) >> 8 == prefix:
            cuda.atomic.add(counts, (bits >> shift) & 255, 1)


def bits_of(v):
    """Return the bits of |v| as float64, infinity for NaN, as an integer that has the order of the magnitudes."""
    return np.int64(magnitude(v).view(np.int64))


@cuda_kernel("T[::1], int64, int64, int64[:, ::1]")
def count_taken(x, kth, part, counts):
    """counts[t] = (values above the k-th magnitude, values equal to it) in part t of the vector, `part` values long."""
    for t in range(cuda.grid(1), counts.shape[0], cuda.gridsize(1)):
        above, equal = 0, 0
        stop = t * part + part if t * part + part < x.size else x.size
        for i in range(t * part, stop):
            bits = bits_of(x[i])
            above += 1 if bits > kth else 0
            equal += 1 if bits == kth else 0
        counts[t, 0], counts[t, 1] = above, equal


@cuda_kernel("T[::1], int64, int64, int64, int64[:, ::1], uint32[::1]")
def write_taken(x, kth, part, ties, before, indices):
    """Write the indices of part t from its place on. before[t]: what all parts before t have of both kinds. ties: how
    many values equal to the k-th magnitude are taken."""
    for t in range(cuda.grid(1), before.shape[0], cuda.gridsize(1)):
        equal = before[t, 1]
        place = before[t, 0] + (equal if equal < ties else ties)
        stop = t * part + part if t * part + part < x.size else x.size
        for i in range(t * part, stop):
            bits = bits_of(x[i])
            if bits > kth or (bits == kth and equal < ties):
                indices[place] = i
                place += 1
            equal += 1 if bits == kth else 0


@select.select_largest.device(count_bits, count_taken, write_taken)
def select_largest(x, indices):
    k, kth = indices.size, 0
    if k == 0:
        return
    left = k  # rank of the wanted value among those with the bits found so far
    for shift in range(56, -1, -8):
        counts = cuda.to_device(np.zeros(BINS, np.int64))
        count_bits(x.dtype, -(-x.size // THREADS), x, kth, shift, counts)
        found = counts.copy_to_host()
        at_least = np.cumsum(found[::-1])[::-1]
        digit = int(np.flatnonzero(at_least >= left)[-1])
        left -= int(at_least[digit] - found[digit])
        kth = kth << 8 | digit
    parts = min(BLOCKS * THREADS, max(1, x.size // 32))
    part = -(-x.size // parts)
    counts = cuda.device_array((parts, 2), np.int64)
    count_taken(x.dtype, -(-parts // THREADS), x, kth, part, counts)
    taken = counts.copy_to_host()
    before = cuda.to_device(np.cumsum(taken, axis=0) - taken)
    write_taken(x.dtype, -(-parts // THREADS), x, kth, part, left, before, indices)
