"""Threads of HOGWILD! that are kept apart: each updates w of its own, and exchanges what has changed with the others.

    for each coordinate j:    d <- w_j - b_j;    if d is not 0: v_j <- v_j + d;    w_j, b_j <- v_j

v is the vector that all have in common, b what this thread took over from it last. In between no cache line that a
thread reads is written by another core, which would have to hand it over. v is gone through by blocks, each under a
lock, so that no d is lost: it stands for many updates. The state of adagrad is exchanged alike: sums of squares gain
what each thread has added to its own. An exchange of n values reads 3 n and writes up to 3 n. CPU only.

(Zhang, Hsieh and Akella, "HogWild++: a new mechanism for decentralized asynchronous stochastic gradient descent", ICDM
2016, where replicas stand in a ring; Dean et al., "Large scale distributed deep networks", NIPS 2012)
"""

from hpcdl.kernels.atomics import lock, unlock
from hpcdl.kernels.bind import exact
from hpcdl.kernels.hogwild_locks import ADAGRAD, SPINS, STRIPES, THREAD, THREADS, others_done, stripe
from hpcdl.kernels.shared import copy

BLOCK = 2048  # values that are exchanged under one lock


@exact
def add_changes(common, w, base):
    """Exchange w with the vector that all have in common."""
    for j in range(w.size):
        change, total = w[j] - base[j], common[j]
        if change != 0:  # a cache line that is not written stays with those who read it
            total += change
            common[j] = total
        w[j] = base[j] = total


@exact
def exchange(apart, w, s, words, how):
    """A thread adds what it has changed and takes over what others have; how many updates others had done by then.

    apart: the vector that all have in common, what this thread took over from it last, and the same of adagrad's state.
    """
    common, base, common_s, base_s = apart
    seen, blocks = others_done(words, how), -(-w.size // BLOCK)
    begin = blocks * how[THREAD] // how[THREADS]  # at places of their own, so that threads do not wait for each other
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
    """At the beginning of a round: w is what all have in common, whatever it was; as `exchange`."""
    common, base, common_s, base_s = apart
    seen = others_done(words, how)
    copy(w, common)
    copy(base, w)
    if how[ADAGRAD] != 0:
        copy(s, common_s)
        copy(base_s, s)
    return seen
