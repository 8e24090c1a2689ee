"""Selection of the k values of largest magnitude, and vectors of a few values.

    1  a sample of the magnitudes gives a threshold that, almost surely, at least k values reach
    2  one pass collects the indices of these candidates; if they are fewer than k, all values become candidates
    3  a histogram of the candidates has the bin of the k-th largest magnitude, which is then found among that bin's;
       selected are those above it, and the first of those equal to it

The result is exact and does not depend on the sample: a tie goes to the lower index. NaN counts as infinite, so that it
is always among the selected values. (Sampled threshold: Lin et al., "Deep gradient compression", ICLR 2018)

Bytes moved per value of b bytes: b, if k is small."""

import numpy as np
from numba import types
from numba.core.cgutils import ir
from numba.extending import intrinsic

from hpcdl.kernels.bind import block, elementwise, function

SAMPLES = 4096
GROUP = 64  # values that the pass looks at together
BINS = 2048


@intrinsic
def lowest_bit(context, word):
    """Return the number of the lowest bit that is set in a word of 64 bits, which is not 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.int64), generate


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
    found = np.empty(n, np.uint32)
    hits = np.zeros(GROUP, np.uint8)
    words = hits.view(np.int64)
    whole = n // GROUP * GROUP
    count = 0
    for start in range(0, whole, GROUP):
        for i in range(GROUP):
            hits[i] = np.uint8(0) if abs(x[start + i]) < lower else np.uint8(1)  # NaN is a hit
        for w in range(GROUP // 8):
            word = words[w]
            while word:
                found[count] = start + 8 * w + (lowest_bit(word) >> 3)
                count += 1
                word &= word - 1
    for i in range(whole, n):
        found[count] = i
        count += 0 if abs(x[i]) < lower else 1
    if count < k:
        lower = x.dtype.type(0)
        for i in range(n):
            found[i] = i
        count = n
    base = np.float64(lower) if lower < np.inf else 0.0
    size, top = np.empty(count, x.dtype), base
    for j in range(count):
        v = abs(x[found[j]])
        size[j] = v if v == v else x.dtype.type(np.inf)
        top = size[j] if size[j] > top and size[j] < np.inf else top
    width = (BINS - 1) / (top - base) if top > base else 0.0
    width = width if width < np.inf else 0.0
    bins = np.zeros(BINS, np.int64)
    for j in range(count):
        bins[np.int64((min(np.float64(size[j]), top) - base) * width)] += 1
    at, above = BINS - 1, 0
    while above + bins[at] < k:
        above += bins[at]
        at -= 1
    inside, many = np.empty(bins[at], x.dtype), 0
    for j in range(count):
        if np.int64((min(np.float64(size[j]), top) - base) * width) == at:
            inside[many] = size[j]
            many += 1
    kth = np.partition(inside, many - (k - above))[many - (k - above)]
    for j in range(many):
        above += 1 if inside[j] > kth else 0
    equal, filled, chosen = k - above, 0, np.empty(count + 1, np.uint32)
    for j in range(count):
        same = size[j] == kth
        chosen[filled] = found[j]
        filled += 1 if size[j] > kth or (same and equal > 0) else 0
        equal -= 1 if same else 0
    for j in range(k):
        indices[j] = chosen[j]


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
