"""What the threads of HOGWILD! share beside the vector, and how they keep out of each other's way: words, locks, turns.

    words      on a cache line each: the lock of all, whose turn it is, the updates that each thread has done, a lock
               for each stripe of coordinates
    how        how a thread works, and numbers of the type of w
    counts     what a thread counts: updates, and of those that are looked at, what has happened meanwhile

And how a coordinate is changed, so that no update of it is lost or without that care. See hogwild.py. CPU only.
"""

import numpy as np

from hpcdl.kernels.atomics import compare_and_swap, lock, place, read, unlock
from hpcdl.kernels.bind import exact
from hpcdl.kernels.shared import load, sched_yield, store
from hpcdl.kernels.updates import adapted, descended, gained, mean_gradient

NONE, ATOMIC, STRIPED, GLOBAL, ROUND_ROBIN = range(5)
LOCKINGS = {"none": NONE, "atomic": ATOMIC, "striped": STRIPED, "global": GLOBAL, "round-robin": ROUND_ROBIN}

# The words that all threads share, each on a cache line of its own: the lock, whose turn it is, how many updates each
# thread has done, and the locks of the stripes.
LINE = 8  # words of a cache line
LOCK, TURN, DONE = 0, LINE, 2 * LINE
STRIPES = 1024  # at most

# How a thread works; `numbers` are those of the type of w.
KIND, FEATURES, OUTPUTS, BATCH, LOCKING, ADAGRAD, THREAD, THREADS, SPINS, FIRST_TURN, TURNS, SHIFT = range(12)
EXCHANGE, HOW = range(12, 14)  # updates between two exchanges, or 0
RATE, EPS, DECAY, SCALE, NUMBERS = range(5)

# What a thread counts.
UPDATES, SAMPLES, TOUCHED, COLLISIONS, STALE, STALEST, HISTOGRAM = range(7)
BINS = 65  # of the histogram of staleness; the last one is of what is more
COUNTS = HISTOGRAM + BINS


def words_for(threads: int) -> int:
    """How many words so many threads share."""
    return DONE + LINE * (threads + STRIPES)


def shift_for(features: int) -> int:
    """Feature j and its outputs lie in stripe j >> shift, the bias as feature number `features`; STRIPES at most."""
    return max(0, int(features // STRIPES).bit_length())


@exact
def others_done(words, how):
    """How many updates all other threads have done."""
    total = 0
    for thread in range(how[THREADS]):
        if thread != how[THREAD]:
            total += load(place(words, DONE + LINE * thread))
    return total


@exact
def stripe(words, how, number):
    """The address of a stripe's lock."""
    return place(words, DONE + LINE * (how[THREADS] + number))


@exact
def await_turn(words, stop, how, number):
    """Wait until it is this thread's turn to write its update of that number of the round; False: all are to stop."""
    mine = how[FIRST_TURN] + number * how[THREADS] + how[THREAD]
    looks = 0
    while load(place(words, TURN)) != mine:
        looks += 1
        if looks % how[SPINS] == 0:
            if load(place(stop, 0)) != 0:
                return False
            sched_yield()
    return True


@exact
def pass_turn(words):
    store(place(words, TURN), load(place(words, TURN)) + 1)


@exact
def pass_turns(words, stop, how, done):
    """A thread that has no more examples in this round passes its turns."""
    if how[LOCKING] == ROUND_ROBIN:
        for number in range(done, how[TURNS]):
            if not await_turn(words, stop, how, number):
                return
            pass_turn(words)


@exact
def note(counts, stale, touched, collisions):
    """An update that was looked at."""
    counts[SAMPLES] += 1
    counts[TOUCHED] += touched
    counts[COLLISIONS] += collisions
    counts[STALE] += stale
    counts[STALEST] = max(counts[STALEST], stale)
    counts[HISTOGRAM + min(stale, BINS - 1)] += 1


@exact
def lock_features(words, how, features, first, last, marks, ordered):
    """Lock the stripes of features[first:last] and of the bias, in ascending order; ordered: so are the features."""
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
    """Unlock them again."""
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
def move(w, s, u, g, scale, decay, numbers, adagrad, atomic):
    """An update of coordinate u, by scale g + decay w_u."""
    rate, eps = numbers[RATE], numbers[EPS]
    if not atomic:
        d = mean_gradient(w[u], g, scale, decay)
        if adagrad:
            total = gained(s[u], d)
            s[u] = total
            w[u] = adapted(w[u], d, total, rate, eps)
        else:
            w[u] = descended(w[u], d, rate)
        return
    there = place(w, u)
    if adagrad:
        state = place(s, u)
        d = mean_gradient(read(there, g), g, scale, decay)
        old = read(state, g)
        total = gained(old, d)
        while not compare_and_swap(state, old, total):
            old = read(state, g)
            total = gained(old, d)
        old = read(there, g)
        while not compare_and_swap(there, old, adapted(old, d, total, rate, eps)):
            old = read(there, g)
    else:
        old = read(there, g)
        while not compare_and_swap(there, old, descended(old, mean_gradient(old, g, scale, decay), rate)):
            old = read(there, g)
