"""Partitions: n items into equal chunks (rings, shards, servers, batches), and items of unequal lengths into parts."""

import heapq
from collections.abc import Sequence


def chunks(n: int, parts: int) -> list[slice]:
    """Cut range(n) into `parts` consecutive slices; the first n mod parts slices are one longer.

    >>> chunks(7, 3)
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]"""
    return [chunk(n, parts, part) for part in range(parts)]


def chunk(n: int, parts: int, part: int) -> slice:
    """Return slice number `part` of `chunks(n, parts)`, without computing the other slices."""
    length, longer = divmod(n, parts)
    start = part * length + min(part, longer)
    return slice(start, start + length + (part < longer))


def longest_first(lengths: Sequence[float], parts: int) -> list[int]:
    """Return for each item the number of its part. By falling length, each item joins the part with the smallest sum.

    At equal sums the first part wins. The largest sum is at most 4/3 - 1/(3 parts) times that of the best division
    (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 1969).

    >>> longest_first([3, 9, 5, 5], 2)
    [0, 0, 1, 1]"""
    found = [0] * len(lengths)
    loads: list[tuple[float, int]] = [(0, part) for part in range(parts)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, found[i] = loads[0]
        heapq.heapreplace(loads, (load + lengths[i], found[i]))
    return found


def zigzag(n: int, parts: int, part: int) -> list[slice]:
    """Return the two chunks, `part` and 2 parts - 1 - part, of 2 parts equal chunks of n elements; one part: all of it.
    Work that grows with the position, as a token's causal attention does, is then the same for all parts."""
    if parts == 1:
        return [slice(0, n)]
    each = n // (2 * parts)
    return [slice(k * each, (k + 1) * each) for k in (part, 2 * parts - 1 - part)]
