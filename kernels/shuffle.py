"""Long permutations, to the bit those of numpy's Generator, in a third of its time.

    for i from n - 1 down to 1:    j <- a number from 0 to i, each as likely;    swap the elements i and j

j is the first word of 32 random bits that, cut to as many bits as i has, is at most i. The words are drawn all at once,
not each by a call. On the CPU only.

(Durstenfeld, "Algorithm 235: random permutation", CACM 1964)
"""

from functools import cache
from typing import Any

import numpy as np

from hpcdl.kernels.bind import on_cpu, prepare

LONG = 1 << 14  # elements from which on it is worth a loop of its own
MOST = 1 << 31
SPARE = 1 << 10  # words of 64 bits beside the three for four elements that are needed as a rule


@on_cpu
def swaps(order, words, last):
    """The swaps of the elements `last`, last - 1, ... by these words; the element whose swap is still to come, or 0."""
    i, mask = last, 0xFFFFFFFF
    for word in words:
        if i == 0:
            break
        while i <= mask >> 1:
            mask >>= 1
        j = word & mask
        fits = j <= i
        j = np.uintp(j if fits else i)  # else it stays; no jump depends on it
        order[np.uintp(i)], order[j] = order[j], order[np.uintp(i)]
        i -= int(fits)
    return i


@cache
def loop() -> Any:
    return prepare(swaps, np.empty(0, np.int32), np.empty(0, np.uint32), 0)


def ready(n: int) -> None:
    """Compile what permutations of n need, before any clock runs."""
    if LONG <= n < MOST:
        loop()


def permutation(random: np.random.Generator, n: int) -> np.ndarray:
    """The numbers 0 to n - 1 in random order, int64 (n,): what random.permutation(n) returns."""
    if not LONG <= n < MOST:
        return random.permutation(n)
    order, last, go = np.arange(n, dtype=np.int32), n - 1, loop()
    while last > 0:  # once more where too many words did not fit
        words = random.bit_generator.random_raw(last * 3 // 4 + SPARE).astype("<u8", copy=False).view("<u4")
        last = go(order, words, last)
    return order.astype(np.int64)
