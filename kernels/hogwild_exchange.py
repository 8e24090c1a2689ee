"""Replicas of HOGWILD!'s threads: each thread updates a w of its own, and exchanges its changes with the others.

    for each coordinate j:    d <- w_j - b_j;    if d is not 0: v_j <- v_j + d;    w_j, b_j <- v_j

v is the common vector, b this thread's copy of it from its last exchange. Between exchanges no other core writes to the
cache lines that a thread reads. v is exchanged in blocks, each under a lock, so that no d is lost: a d stands for
many updates. The state of adagrad is exchanged in the same way. An exchange of n values reads 3 n values and writes up
to 3 n. CPU only.

(Zhang, Hsieh and Akella, "HogWild++: a new mechanism for decentralized asynchronous stochastic gradient descent", ICDM
2016, where replicas stand in a ring; Dean et al., "Large scale distributed deep networks", NIPS 2012)
"""

from hpcdl.kernels.atomics import lock, unlock
from hpcdl.kernels.bind import exact
from hpcdl.kernels.hogwild_locks import ADAGRAD, SPINS, STRIPES, THREAD, THREADS, others_done, stripe
from hpcdl.kernels.shared import copy

BLOCK = 2048  # values that are exchanged while one lock is held


@exact
def add_changes(common, w, base):
    """Add w - base to `common`; then w and base are `common`."""
    for j in range(w.size):
        change, total = w[j] - base[j], common[j]
        if change != 0:  # a cache line that is not written stays in other cores' caches
            total += change
            common[j] = total
        w[j] = base[j] = total


@exact
def exchange(apart, w, s, words, how):
    """Exchange a thread's w with the common vector; return how many updates other threads had done before.

    apart: the common vector, this thread's copy of it from its last exchange, and the same two of adagrad's state.
    """
    common, base, common_s, base_s = apart
    seen, blocks = others_done(words, how), -(-w.size // BLOCK)
    begin = blocks * how[THREAD] // how[THREADS]  # threads begin at different blocks, so that they do not wait
    for turn in range(blocks):
        number = (begin + turn) % blocks
        first, last, guard = number * BLOCK, min((number + 1) * BLOCK, w.size), stripe(words, how, number % STRIPES)
        lock(guard, how[SPINS])
        add_changes(common[first:last], w[first:last], base[first:last])
        if how[ADAGRAD] != 0:
            add_changes(common_s[first:last], s[first:last], base_s[first:last])
        unlock(guard)
    return seen


@exact
def take_over(apart, w, s, words, how):
    """Copy the common vector to w, at the beginning of a round; arguments and result as for `exchange`."""
    common, base, common_s, base_s = apart
    seen = others_done(words, how)
    copy(w, common)
    copy(base, w)
    if how[ADAGRAD] != 0:
        copy(s, common_s)
        copy(base_s, s)
    return seen
