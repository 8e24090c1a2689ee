"""Selection of the k values of largest magnitude, and vectors of a few values.

    1  a sample of the magnitudes gives a threshold that, almost surely, at least k values reach
    2  one pass collects the indices of these candidates; if they are fewer than k, all values become candidates
    3  the k-th largest magnitude among the candidates; those above it, and the first of those equal to it

The result is exact and does not depend on the sample: a tie goes to the lower index. NaN counts as infinite, so that it
is always among the selected values. (Sampled threshold: Lin et al., "Deep gradient compression", ICLR 2018)

Bytes moved per value of b bytes: b, if k is small."""

import numpy as np

from hpcdl.kernels.bind import block, elementwise, function

SAMPLES = 4096
GROUP = 8  # values that the pass looks at together


@function
def magnitude(v):
    """Return |v|, and infinity for NaN."""
    return np.float64(abs(v)) if v == v else np.float64(np.inf)


@block("T[::1], uint32[::1]")
def select_largest(x, indices):
    """indices = the indices, in ascending order, of the k = indices.size values of largest |x[i]|; k <= x.size."""
    n, k = x.size, indices.size
    if k == n:
        for i in range(n):
            indices[i] = i
        return
    if k == 0:
        return
    lower = x.dtype.type(0)
    if n >= 8 * SAMPLES and 8 * k < n:
        sample = np.empty(SAMPLES)
        for s in range(SAMPLES):
            sample[s] = magnitude(x[s * n // SAMPLES])
        expected = SAMPLES * k / n
        rank = min(SAMPLES - 1, int(expected + 4 * np.sqrt(expected)) + 4)
        lower = x.dtype.type(np.partition(sample, SAMPLES - 1 - rank)[SAMPLES - 1 - rank])
    found, groups = np.empty(n, np.uint32), np.empty(n // GROUP + 1, np.uint32)
    whole, many = n // GROUP * GROUP, 0
    for start in range(0, whole, GROUP):  # no branch that a processor would have to guess
        hits = np.int32(0)
        for i in range(GROUP):
            hits |= np.int32(0) if abs(x[start + i]) < lower else np.int32(1)  # NaN is a hit
        groups[many] = start
        many += hits
    count = 0
    for g in range(many):
        start = np.int64(groups[g])
        for i in range(start, start + GROUP):
            found[count] = i
            count += 0 if abs(x[i]) < lower else 1
    for i in range(whole, n):
        found[count] = i
        count += 0 if abs(x[i]) < lower else 1
    if count < k:
        for i in range(n):
            found[i] = i
        count = n
    size = np.empty(count)
    for j in range(count):
        size[j] = magnitude(x[found[j]])
    kth = np.partition(size, count - k)[count - k]
    above = 0
    for j in range(count):
        above += 1 if size[j] > kth else 0
    equal, filled = k - above, 0
    for j in range(count):
        take = size[j] > kth
        if size[j] == kth and equal > 0:
            take = True
            equal -= 1
        if take:
            indices[filled] = found[j]
            filled += 1


@elementwise("T[::1], T[::1], uint32[::1]")
def take(i, into, x, indices):
    """into[i] = x[indices[i]]"""
    into[i] = x[indices[i]]


@elementwise("T[::1], T[::1], uint32[::1], T")
def add_at(i, values, into, indices, factor):
    """into[indices[i]] += factor * values[i]; no index stands twice. An index beyond `into`, as of a message that was
    corrupted on its way, is skipped."""
    if indices[i] < into.size:
        into[indices[i]] += factor * values[i]
