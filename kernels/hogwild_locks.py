"""Synchronization of HOGWILD!'s threads: locks, turns, counts, and the update of a coordinate. CPU only.

    words      shared, each on a cache line: the global lock, whose turn it is, the updates that each thread has done,
               a lock for each stripe of coordinates
    how        settings of a thread, integers; `numbers`: settings of the type of w
    counts     of a thread: its updates; of its sampled updates, collisions and staleness

See hogwild.py.
"""

import numpy as np

from hpcdl.kernels.atomics import compare_and_swap, lock, place, read, unlock
from hpcdl.kernels.bind import exact
from hpcdl.kernels.shared import load, sched_yield, store
from hpcdl.kernels.updates import adagrad_step, add_square, mean_gradient, sgd_step

NONE, ATOMIC, STRIPED, GLOBAL, ROUND_ROBIN = range(5)
LOCKINGS = {"none": NONE, "atomic": ATOMIC, "striped": STRIPED, "global": GLOBAL, "round-robin": ROUND_ROBIN}

# Positions in `words`.
LINE = 8  # words of a cache line
LOCK, TURN, DONE = 0, LINE, 2 * LINE
STRIPES = 1024  # at most

# Positions in `how`, then in `numbers`.
KIND, FEATURES, OUTPUTS, BATCH, LOCKING, ADAGRAD, THREAD, THREADS, SPINS, FIRST_TURN, TURNS, SHIFT = range(12)
EXCHANGE, HOW = range(12, 14)  # updates between two exchanges, or 0
RATE, EPS, DECAY, SCALE, NUMBERS = range(5)

# Positions in `counts`.
UPDATES, SAMPLES, TOUCHED, COLLISIONS, STALE, STALEST, HISTOGRAM = range(7)
BINS = 65  # of the histogram of staleness; the last bin is for 64 and more
COUNTS = HISTOGRAM + BINS


def words_for(threads: int) -> int:
    """Return the number of words that `threads` threads share."""
    return DONE + LINE * (threads + STRIPES)


def shift_for(features: int) -> int:
    """Return the shift for at most STRIPES stripes: feature j, or the bias j = features, is in stripe j >> shift."""
    return max(0, int(features // STRIPES).bit_length())


@exact
def others_done(words, how):
    """Return how many updates all other threads have done."""
    total = 0
    for thread in range(how[THREADS]):
        if thread != how[THREAD]:
            total += load(place(words, DONE + LINE * thread))
    return total


@exact
def stripe(words, how, number):
    """Return the address of a stripe's lock."""
    return place(words, DONE + LINE * (how[THREADS] + number))


@exact
def await_turn(words, stop, how, number):
    """Wait for this thread's turn to write update `number` of the round; return False if all are to stop."""
    mine = how[FIRST_TURN] + number * how[THREADS] + how[THREAD]
    polls = 0
    while load(place(words, TURN)) != mine:
        polls += 1
        if polls % how[SPINS] == 0:
            if load(place(stop, 0)) != 0:
                return False
            sched_yield()
    return True


@exact
def pass_turn(words):
    store(place(words, TURN), load(place(words, TURN)) + 1)


@exact
def pass_turns(words, stop, how, done):
    """Pass the remaining turns of a thread that has no more examples in this round."""
    if how[LOCKING] == ROUND_ROBIN:
        for number in range(done, how[TURNS]):
            if not await_turn(words, stop, how, number):
                return
            pass_turn(words)


@exact
def record_sample(counts, stale, touched, collisions):
    """Count a sampled update: its staleness, the coordinates it compared, those that had changed."""
    counts[SAMPLES] += 1
    counts[TOUCHED] += touched
    counts[COLLISIONS] += collisions
    counts[STALE] += stale
    counts[STALEST] = max(counts[STALEST], stale)
    counts[HISTOGRAM + min(stale, BINS - 1)] += 1


@exact
def lock_features(words, how, features, first, last, marks, ordered):
    """Lock the stripes of features[first:last] and of the bias, in ascending order; ordered: True if they ascend."""
    if how[LOCKING] == GLOBAL:
        lock(place(words, LOCK), how[SPINS])
    elif how[LOCKING] == STRIPED:
        shift, locked, bias = how[SHIFT], -1, how[FEATURES] >> how[SHIFT]
        if ordered:
            for t in range(first, last):
                number = features[np.uintp(t)] >> shift
                if number != locked:
                    lock(stripe(words, how, number), how[SPINS])
                    locked = number
            if bias != locked:
                lock(stripe(words, how, bias), how[SPINS])
            return
        marks[bias] = 1
        for t in range(first, last):
            marks[features[t] >> shift] = 1
        for number in range(marks.size):
            if marks[number] != 0:
                lock(stripe(words, how, number), how[SPINS])


@exact
def unlock_features(words, how, features, first, last, marks, ordered):
    """Release the locks of `lock_features`."""
    if how[LOCKING] == GLOBAL:
        unlock(place(words, LOCK))
    elif how[LOCKING] == STRIPED:
        shift, unlocked, bias = how[SHIFT], -1, how[FEATURES] >> how[SHIFT]
        if ordered:
            for t in range(first, last):
                number = features[np.uintp(t)] >> shift
                if number != unlocked:
                    unlock(stripe(words, how, number))
                    unlocked = number
            if bias != unlocked:
                unlock(stripe(words, how, bias))
            return
        for number in range(marks.size):
            if marks[number] != 0:
                marks[number] = 0
                unlock(stripe(words, how, number))


@exact
def update_coordinate(w, s, u, g, scale, decay, numbers, adagrad, atomic):
    """Update coordinate u by the gradient scale g + decay w_u; atomic: by compare-and-swap."""
    rate, eps = numbers[RATE], numbers[EPS]
    if not atomic:
        d = mean_gradient(w[u], g, scale, decay)
        if adagrad:
            total = add_square(s[u], d)
            s[u] = total
            w[u] = adagrad_step(w[u], d, total, rate, eps)
        else:
            w[u] = sgd_step(w[u], d, rate)
        return
    there = place(w, u)
    if adagrad:
        state = place(s, u)
        d = mean_gradient(read(there, g), g, scale, decay)
        old = read(state, g)
        total = add_square(old, d)
        while not compare_and_swap(state, old, total):
            old = read(state, g)
            total = add_square(old, d)
        old = read(there, g)
        while not compare_and_swap(there, old, adagrad_step(old, d, total, rate, eps)):
            old = read(there, g)
    else:
        old = read(there, g)
        while not compare_and_swap(there, old, sgd_step(old, mean_gradient(old, g, scale, decay), rate)):
            old = read(there, g)
