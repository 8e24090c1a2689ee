"""HOGWILD!: the loop of one thread over its examples; its updates change a vector that all threads share.

    for each update, of B examples:                        w: the weights of features (features, outputs), the bias
        g <- 1/B sum of the gradients at w                 at the coordinates that its examples touch
        w_u <- w_u - rate (g_u + decay_u w_u)              for these coordinates u; or adagrad's rule

An example of sparse rows touches its nonzero features and the bias; one of dense rows touches all.

    locking        what other threads may do while a thread reads, computes and writes an update
    NONE           anything; an update of w_u by another thread between this thread's read and write of w_u is lost
    ATOMIC         anything; compare-and-swap of each coordinate, so that no update of a coordinate is lost
    STRIPED        write to coordinates of other stripes; an update locks the stripes it touches, in ascending order
    GLOBAL         nothing; one lock
    ROUND_ROBIN    compute, but not write; the threads write their updates in turn

The threads may belong to several processes; they share w, adagrad's state and `words`. One update in SAMPLE is sampled:
it reads its coordinates again just before it writes. Coordinates that have changed are its collisions; the updates that
other threads have done in between are its staleness.

    words          shared, each on a cache line: global lock, turn, updates done by each thread, lock of each stripe
    how, numbers   settings of a thread: integers in `how`, numbers of w's type in `numbers`
    counts         counts of a thread: its updates, and the collisions and staleness of the sampled ones

Replicas: with how[EXCHANGE] > 0 each thread updates its own w, to whose cache lines no other core writes. After every
how[EXCHANGE] updates, and at the end of a round, it exchanges changes with the common vector v; b: its last copy of v

    for each coordinate j:    d <- w_j - b_j;    if d is not 0: v_j <- v_j + d;    w_j, b_j <- v_j

Then there are no collisions, and an update's staleness is the number of updates by other threads since that exchange.
v, and adagrad's state likewise, is exchanged in blocks, each under a lock, so that no d, which stands for many updates,
is lost. An exchange of n values reads 3 n values and writes up to 3 n.

One thread is sequential SGD to the bit: the same operations, in the same order, as row_dot (sparse.py), the losses
(loss.py) and the rules (updates.py). The loops run without the interpreter's lock. CPU only. (Recht, Re, Wright and
Niu, NeurIPS 2011; round-robin: Langford, Smola and Zinkevich, NeurIPS 2009; replicas: Zhang, Hsieh and Akella,
"HogWild++", ICDM 2016, where they form a ring; Dean et al., NIPS 2012)"""

import numpy as np

from hpcdl.kernels.atomics import compare_and_swap, lock, place, read, unlock
from hpcdl.kernels.bind import exact, function, on_cpu
from hpcdl.kernels.gather import prefetch
from hpcdl.kernels.linear import SOFTMAX, SQUARED, loss_and_slope
from hpcdl.kernels.loss import softmax_cross_entropy
from hpcdl.kernels.shared import copy, load, sched_yield, store
from hpcdl.kernels.sparse import row_dot
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

SAMPLE = 64  # one update in so many is sampled
LOOK = 1024  # updates between two polls of the stop flag
AHEAD = 4  # rows between a prefetch and its use
BYTES = 64  # bytes of a cache line
BLOCK = 2048  # values that are exchanged while one lock is held


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
    """Wait for this thread's turn to write update `number` of the round; return False if all threads have to stop."""
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
def record_sample(counts, stale, touched, collisions):
    """Count a sampled update: its staleness, its compared coordinates, and how many of them had changed."""
    counts[SAMPLES] += 1
    counts[TOUCHED] += touched
    counts[COLLISIONS] += collisions
    counts[STALE] += stale
    counts[STALEST] = max(counts[STALEST], stale)
    counts[HISTOGRAM + min(stale, BINS - 1)] += 1


@exact
def turn(address, spins, release):
    """Acquire the lock at this address; release: release the lock instead."""
    if release:
        unlock(address)
    else:
        lock(address, spins)


@exact
def lock_features(words, how, features, first, last, marks, ordered, release):
    """Lock, or release, the stripes of features[first:last] and of the bias, in ascending order; GLOBAL: the one lock.
    ordered: True if the features ascend; if not, marks (stripes,) is 1 for the stripes that the thread has locked."""
    spins = how[SPINS]
    if how[LOCKING] == GLOBAL:
        turn(place(words, LOCK), spins, release)
    elif how[LOCKING] == STRIPED:
        shift, before, bias = how[SHIFT], -1, how[FEATURES] >> how[SHIFT]
        if ordered:
            for t in range(first, last):
                number = features[np.uintp(t)] >> shift
                if number != before:
                    turn(stripe(words, how, number), spins, release)
                    before = number
            if bias != before:
                turn(stripe(words, how, bias), spins, release)
            return
        if not release:
            marks[bias] = 1
            for t in range(first, last):
                marks[features[t] >> shift] = 1
        for number in range(marks.size):
            if marks[number] != 0:
                marks[number] = not release
                turn(stripe(words, how, number), spins, release)


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


@exact
def add_changes(common, w, base):
    """Add w - base to `common`, then set w and base to `common`."""
    for j in range(w.size):
        change, total = w[j] - base[j], common[j]
        if change != 0:  # a cache line that is not written stays in other cores' caches
            total += change
            common[j] = total
        w[j] = base[j] = total


@exact
def exchange(apart, w, s, words, how):
    """Exchange a thread's w with the common vector; return how many updates other threads had done before.
    apart: the common vector, this thread's copy of it from its last exchange, and the same two of adagrad's state."""
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
    """Copy the common vector to w at the beginning of a round, with replicas; arguments and result: see `exchange`."""
    common, base, common_s, base_s = apart
    if how[EXCHANGE] <= 0:
        return 0
    seen = others_done(words, how)
    copy(w, common)
    copy(base, w)
    if how[ADAGRAD] != 0:
        copy(s, common_s)
        copy(base_s, s)
    return seen


@exact
def end_round(apart, w, s, words, stop, how, counts, left, done):
    """Count `done` updates of a thread, exchange new changes, pass unused turns. left: updates to the next exchange."""
    counts[UPDATES] += done
    if 0 < left < how[EXCHANGE]:
        exchange(apart, w, s, words, how)
    if how[LOCKING] == ROUND_ROBIN:
        for number in range(done, how[TURNS]):
            if not await_turn(words, stop, how, number):
                return
            pass_turn(words)


@function
def add_product(total, a, b):
    return total + a * b


@function
def dot(x, w):
    """Return the sum of x_j w_j."""
    total = x[0] * w[0]
    for j in range(1, x.size):
        total += x[j] * w[j]
    return total


@function
def add_outputs(x, w, z):
    """z_k <- z_k + the sum of x_j w_jk."""
    outputs = z.shape[1]
    for j in range(x.size):
        for k in range(outputs):
            z[0, k] += x[j] * w[np.uintp(j * outputs + k)]


softmax = function(softmax_cross_entropy.body)


@exact
def loss_at(kind, row, labels, targets, z, dz):
    """Return the loss of an example with the outputs z (1, outputs); dz <- its gradient by z."""
    one = z.dtype.type(1)
    if kind == SOFTMAX:
        total, _ = softmax(z, labels[row : row + 1], dz)
        return total
    if kind != SQUARED:
        loss, slope = loss_and_slope(kind, z[0, 0], labels[row], one)
        dz[0, 0] = slope
        return np.float64(loss)
    total = 0.0
    for k in range(z.shape[1]):
        dz[0, k] = z[0, k] - targets[row, k]
        total += np.float64(dz[0, k]) ** 2
    return 0.5 * total


@exact
def touched_features(indices, indptr, index, how, slots, features, times, g):
    """Write to `features` the features that the examples `index` touch, then the bias; return how many, with the bias.
    slots[feature]: 1 + its position in `features`; times[position]: how many of the examples touch it; g <- 0."""
    count, outputs = 0, how[OUTPUTS]
    for i in range(len(index)):
        for e in range(indptr[index[i]], indptr[index[i] + 1]):
            j = np.uintp(indices[np.uintp(e)])
            if slots[j] == 0:
                features[count] = j
                times[count] = 0
                count += 1
                slots[j] = count
            times[slots[j] - 1] += 1
    features[count], times[count] = how[FEATURES], len(index)
    for t in range((count + 1) * outputs):
        g[t] = 0
    return count + 1


@exact
def sparse_update(
    data, indices, indptr, labels, targets, index, w, s, decays, words, stop, how, numbers, number, sampled, seen, z,
    dz, slots, features, times, g, saved, marks, counts,
):  # fmt: skip
    """Update w by the examples `index`, as update `number` of this round; return the sum of their losses.
    seen: with replicas, the updates that other threads had done at the last exchange."""
    outputs, locking, loss, stale = how[OUTPUTS], how[LOCKING], 0.0, seen
    replicas = how[EXCHANGE] > 0
    zero = w.dtype.type(0)
    count = touched_features(indices, indptr, index, how, slots, features, times, g)
    ordered = len(index) == 1
    lock_features(words, how, features, 0, count - 1, marks, ordered, release=False)
    if sampled and not replicas:
        stale = others_done(words, how)
        for t in range(count):
            for k in range(outputs):
                saved[t * outputs + k] = read(place(w, features[t] * outputs + k), zero)
    for i in range(len(index)):
        row = index[i]
        if outputs == 1:
            z[0, 0] = row_dot(data, indices, indptr[row], indptr[row + 1], w, zero)
        else:
            for k in range(outputs):
                z[0, k] = zero
            for e in range(indptr[row], indptr[row + 1]):
                start = np.uintp(indices[np.uintp(e)]) * np.uintp(outputs)
                for k in range(outputs):
                    z[0, k] = add_product(z[0, k], data[np.uintp(e)], w[start + np.uintp(k)])
        for k in range(outputs):
            z[0, k] += w[how[FEATURES] * outputs + k]
        loss += loss_at(how[KIND], row, labels, targets, z, dz)
        for e in range(indptr[row], indptr[row + 1]):
            start = (slots[np.uintp(indices[np.uintp(e)])] - 1) * outputs
            for k in range(outputs):
                g[start + k] = add_product(g[start + k], data[np.uintp(e)], dz[0, k])
        for k in range(outputs):
            g[(count - 1) * outputs + k] += dz[0, k]
    if locking != ROUND_ROBIN or await_turn(words, stop, how, number):
        if sampled:
            stale, compared, changed = others_done(words, how) - stale, 0 if replicas else count, 0
            for t in range(compared):
                for k in range(outputs):
                    changed += read(place(w, features[t] * outputs + k), zero) != saved[t * outputs + k]
            record_sample(counts, stale, compared * outputs, changed)
        scale = w.dtype.type(1 / len(index))
        for t in range(count):
            j = features[t]
            decay = w.dtype.type(decays[j] * times[t] * scale) if decays.size else zero
            for k in range(outputs):
                u, gradient = np.uintp(j * outputs + k), g[t * outputs + k]
                update_coordinate(w, s, u, gradient, scale, decay, numbers, how[ADAGRAD] != 0, locking == ATOMIC)
        done = place(words, DONE + LINE * how[THREAD])
        store(done, load(done) + 1)  # before other threads can write
        if locking == ROUND_ROBIN:
            pass_turn(words)
    lock_features(words, how, features, 0, count - 1, marks, ordered, release=True)
    for t in range(count - 1):
        slots[features[t]] = 0
    return loss


@on_cpu
def sparse_round(
    data, indices, indptr, labels, targets, index, w, s, decays, apart, words, stop, how, numbers, z, dz, slots,
    features, times, g, saved, marks, counts,
):  # fmt: skip
    """Run a thread's part of a round on sparse rows: those of `index`, B at a time; return the sum of losses.
    data (of w's type), indices, indptr: all rows, scaled. labels (rows,) or targets (rows, outputs). decays: weight
    decay of each feature and the bias, or empty. apart: see `exchange`. z to marks: scratch of this thread."""
    batch, me = how[BATCH], place(words, DONE + LINE * how[THREAD])
    one, zero, rate = w.dtype.type(1), w.dtype.type(0), numbers[RATE]
    locking, atomic = how[LOCKING], how[LOCKING] == ATOMIC
    quick = batch == 1 and how[OUTPUTS] == 1 and how[ADAGRAD] == 0 and how[KIND] != SOFTMAX
    bias = np.uintp(how[FEATURES])
    data_at, indices_at = np.uintp(data.ctypes.data), np.uintp(indices.ctypes.data)
    loss, done, updates = 0.0, 0, load(me)
    left, seen = how[EXCHANGE], take_over(apart, w, s, words, how)  # left: updates until the next exchange
    for start in range(0, len(index), batch):
        if done % LOOK == 0 and load(place(stop, 0)) != 0:
            break
        if start + 2 * AHEAD < len(index):
            prefetch(np.uintp(indptr.ctypes.data) + np.uintp(8) * np.uintp(index[start + 2 * AHEAD]))
            row = np.uintp(index[start + AHEAD])
            first, last = np.uintp(indptr[row]), np.uintp(indptr[row + np.uintp(1)])
            for e in range(first, last, np.uintp(16)):
                prefetch(data_at + e * np.uintp(data.itemsize))
                prefetch(indices_at + e * np.uintp(4))
            if first < last:  # a row seldom ends where a step of the loop does, and has one more cache line then
                prefetch(data_at + (last - np.uintp(1)) * np.uintp(data.itemsize))
                prefetch(indices_at + (last - np.uintp(1)) * np.uintp(4))
        sampled = updates % SAMPLE == 0
        if quick and not sampled:
            row = index[start]
            begin, end = np.uintp(indptr[np.uintp(row)]), np.uintp(indptr[np.uintp(row + 1)])
            lock_features(words, how, indices, begin, end, marks, True, release=False)
            z[0, 0] = row_dot(data, indices, begin, end, w, zero) + w[bias]
            loss += loss_at(how[KIND], row, labels, targets, z, dz)
            if locking == ROUND_ROBIN and not await_turn(words, stop, how, done):
                break
            slope = dz[0, 0]
            if atomic or decays.size:
                for e in range(begin, end):
                    u = np.uintp(indices[e])
                    decay = decays[u] if decays.size else zero
                    update_coordinate(w, s, u, data[e] * slope, one, decay, numbers, False, atomic)
                decay = decays[bias] if decays.size else zero
                update_coordinate(w, s, bias, slope, one, decay, numbers, False, atomic)
            else:  # the same, a tenth faster without the choices
                for e in range(begin, end):
                    u = np.uintp(indices[e])
                    w[u] = sgd_step(w[u], mean_gradient(w[u], data[e] * slope, one, zero), rate)
                w[bias] = sgd_step(w[bias], mean_gradient(w[bias], slope, one, zero), rate)
            store(me, updates + 1)  # before other threads can write
            if locking == ROUND_ROBIN:
                pass_turn(words)
            lock_features(words, how, indices, begin, end, marks, True, release=True)
        else:
            loss += sparse_update(
                data, indices, indptr, labels, targets, index[start : start + batch], w, s, decays, words, stop, how,
                numbers, done, sampled, seen, z, dz, slots, features, times, g, saved, marks, counts,
            )  # fmt: skip
        done += 1
        updates += 1
        left -= 1
        if left == 0:
            left, seen = how[EXCHANGE], exchange(apart, w, s, words, how)
    end_round(apart, w, s, words, stop, how, counts, left, done)
    return loss


@exact
def dense_row(x, row, mean, factor, numbers, into):
    """into[:-1] <- the row, scaled and standardized; into[-1] is 1, the input of the bias."""
    scale = numbers[SCALE]
    for j in range(x.shape[1]):
        into[j] = into.dtype.type(x[np.uintp(row), np.uintp(j)]) * scale
    if mean.size:
        for j in range(x.shape[1]):
            into[j] = (into[j] - mean[j]) * factor[j]


@on_cpu
def dense_round(
    x, mean, factor, labels, targets, index, w, s, apart, words, stop, how, numbers, z, dz, row, features, g, saved,
    marks, counts,
):  # fmt: skip
    """Run a thread's part of a round on dense rows x of any type; the other arguments as for `sparse_round`.
    mean, factor: standardization, or empty. row (features + 1,): scratch, ends with 1. features: 0, 1, ..., bias."""
    batch, outputs, locking = how[BATCH], how[OUTPUTS], how[LOCKING]
    me, zero, count = place(words, DONE + LINE * how[THREAD]), w.dtype.type(0), row.size
    base, width = np.uintp(x.ctypes.data), np.uintp(x.shape[1] * x.itemsize)
    rate, decay, adagrad, atomic = numbers[RATE], numbers[DECAY], how[ADAGRAD] != 0, locking == ATOMIC
    loss, done, updates, stale, changed = 0.0, 0, load(me), 0, 0
    left, seen = how[EXCHANGE], take_over(apart, w, s, words, how)  # left: updates until the next exchange
    compared = 0 if left > 0 else w.size  # coordinates that a sampled update reads twice
    for start in range(0, len(index), batch):
        if done % LOOK == 0 and load(place(stop, 0)) != 0:
            break
        stop_at = min(start + batch, len(index))
        sampled = updates % SAMPLE == 0
        lock_features(words, how, features, 0, count - 1, marks, True, release=False)
        if sampled:
            stale = seen if how[EXCHANGE] > 0 else others_done(words, how)
            for u in range(compared):
                saved[u] = read(place(w, u), zero)
        if batch > 1:
            for u in range(w.size):
                g[u] = zero
        for i in range(start, stop_at):
            if i + 2 < len(index):
                there = base + np.uintp(index[i + 2]) * width
                for offset in range(np.uintp(0), width, np.uintp(BYTES)):
                    prefetch(there + offset)
            dense_row(x, index[i], mean, factor, numbers, row)
            if outputs == 1:
                z[0, 0] = dot(row, w)
            else:
                for k in range(outputs):
                    z[0, k] = zero
                add_outputs(row, w, z)
            loss += loss_at(how[KIND], index[i], labels, targets, z, dz)
            if batch > 1:
                for j in range(count):
                    for k in range(outputs):
                        u = np.uintp(j * outputs + k)
                        g[u] = add_product(g[u], row[j], dz[0, k])
        if locking == ROUND_ROBIN and not await_turn(words, stop, how, done):
            break
        if sampled:
            stale, changed = others_done(words, how) - stale, 0
            for u in range(compared):
                changed += read(place(w, u), zero) != saved[u]
            record_sample(counts, stale, compared, changed)
        scale = w.dtype.type(1 / (stop_at - start))
        if batch > 1:
            if adagrad or atomic:
                for u in range(w.size):
                    update_coordinate(w, s, np.uintp(u), g[u], scale, decay, numbers, adagrad, atomic)
            else:
                for u in range(w.size):
                    w[u] = sgd_step(w[u], mean_gradient(w[u], g[u], scale, decay), rate)
        elif adagrad or atomic:
            for j in range(count):
                for k in range(outputs):
                    u = np.uintp(j * outputs + k)
                    update_coordinate(w, s, u, row[j] * dz[0, k], scale, decay, numbers, adagrad, atomic)
        elif outputs == 1:
            slope = dz[0, 0]
            for j in range(count):
                w[j] = sgd_step(w[j], mean_gradient(w[j], row[j] * slope, scale, decay), rate)
        else:
            for j in range(count):
                for k in range(outputs):
                    u = np.uintp(j * outputs + k)
                    w[u] = sgd_step(w[u], mean_gradient(w[u], row[j] * dz[0, k], scale, decay), rate)
        done += 1
        updates += 1
        store(me, updates)  # before other threads can write
        if locking == ROUND_ROBIN:
            pass_turn(words)
        lock_features(words, how, features, 0, count - 1, marks, True, release=True)
        left -= 1
        if left == 0:
            left, seen = how[EXCHANGE], exchange(apart, w, s, words, how)
    end_round(apart, w, s, words, stop, how, counts, left, done)
    return loss


ROUNDS = {"sparse": sparse_round, "dense": dense_round}
