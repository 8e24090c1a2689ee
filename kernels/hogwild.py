"""HOGWILD!: the loop of one thread over its examples; its updates change a vector that all threads share.

    for each update, of B examples:                        w: the weights of features (features, outputs), the bias
        g <- 1/B sum of the gradients at w                 at the coordinates that its examples touch
        w_u <- w_u - rate (g_u + decay_u w_u)              for these coordinates u; or adagrad's rule

An example of sparse rows touches the features that are not zero in it, and the bias; one of dense rows touches all.

    locking        what other threads may do while a thread reads, computes and writes an update
    NONE           anything; an update of w_u by another thread between this thread's read and write of w_u is lost
    ATOMIC         anything; compare-and-swap of each coordinate, so that no update of a coordinate is lost
    STRIPED        write to coordinates of other stripes; an update locks the stripes it touches, in ascending order
    GLOBAL         nothing; one lock
    ROUND_ROBIN    compute, but not write; the threads write their updates in turn

The threads may belong to several processes; they share w, the state of adagrad and `words`, and nothing else. One
update in SAMPLE is sampled: it reads its coordinates a second time, just before it writes. Coordinates that have
changed are its collisions; the updates that other threads have done in between are its staleness.

Replicas: with how[EXCHANGE] > 0 each thread has a w of its own, and exchanges it with the others' after so many
updates and at the end of its part of a round (hogwild_exchange.py). Then there are no collisions, and the staleness of
an update is the number of updates by other threads since its thread's last exchange.

One thread is sequential SGD to the bit: the same operations, in the same order, as row_dot (sparse.py), the losses
(loss.py) and the rules (updates.py). The loops run without the interpreter's lock. CPU only.

(Recht, Re, Wright and Niu, NeurIPS 2011; round-robin: Langford, Smola and Zinkevich, "Slow learners are fast", NeurIPS
2009)
"""

import numpy as np

from hpcdl.kernels.atomics import place, read
from hpcdl.kernels.bind import exact, function, on_cpu
from hpcdl.kernels.gather import prefetch
from hpcdl.kernels.hogwild_exchange import exchange, take_over
from hpcdl.kernels.hogwild_locks import (
    ADAGRAD,
    ATOMIC,
    BATCH,
    DECAY,
    DONE,
    EXCHANGE,
    FEATURES,
    KIND,
    LINE,
    LOCKING,
    OUTPUTS,
    RATE,
    ROUND_ROBIN,
    SCALE,
    THREAD,
    UPDATES,
    await_turn,
    lock_features,
    others_done,
    pass_turn,
    pass_turns,
    record_sample,
    unlock_features,
    update_coordinate,
)
from hpcdl.kernels.linear import HINGE, LOGISTIC, SOFTMAX
from hpcdl.kernels.loss import hinge_row, logistic_row, softmax_cross_entropy
from hpcdl.kernels.shared import load, store
from hpcdl.kernels.sparse import row_dot
from hpcdl.kernels.updates import mean_gradient, sgd_step

SAMPLE = 64  # one update in so many is sampled
LOOK = 1024  # updates between two polls of the stop flag
AHEAD = 4  # rows between a prefetch and its use
BYTES = 64  # bytes of a cache line


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
    if kind == LOGISTIC:
        loss, slope, _ = logistic_row(z[0, 0], labels[row], one)
        dz[0, 0] = slope
        return np.float64(loss)
    if kind == HINGE:
        loss, slope, _ = hinge_row(z[0, 0], labels[row], one)
        dz[0, 0] = slope
        return np.float64(loss)
    total = 0.0
    for k in range(z.shape[1]):
        dz[0, k] = z[0, k] - targets[row, k]
        total += np.float64(dz[0, k]) ** 2
    return 0.5 * total


@exact
def touched_features(indices, indptr, index, how, slots, features, times, g):
    """Write to `features` the features that the examples `index` touch, then the bias; return their count.

    slots[feature]: 1 + its position in `features`; times[position]: how many of the examples touch it; g <- 0.
    """
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
    """Update w by the examples `index`; return the sum of their losses.

    number: of the update in this round. seen: with replicas, the updates of other threads at the last exchange.
    """
    outputs, locking, loss, stale = how[OUTPUTS], how[LOCKING], 0.0, seen
    replicas = how[EXCHANGE] > 0
    zero = w.dtype.type(0)
    count = touched_features(indices, indptr, index, how, slots, features, times, g)
    ordered = len(index) == 1
    lock_features(words, how, features, 0, count - 1, marks, ordered)
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
    unlock_features(words, how, features, 0, count - 1, marks, ordered)
    for t in range(count - 1):
        slots[features[t]] = 0
    return loss


@on_cpu
def sparse_round(
    data, indices, indptr, labels, targets, index, w, s, decays, apart, words, stop, how, numbers, z, dz, slots,
    features, times, g, saved, marks, counts,
):  # fmt: skip
    """Run a thread's part of a round on sparse rows: those of `index`, B at a time; return the sum of losses.

    data (of the type of w), indices, indptr: all rows, already scaled. labels (rows,): classes, or targets (rows,
    outputs). decays: weight decay of each feature and the bias, or empty. apart: see `exchange`. z, dz, slots,
    features, times, g, saved, marks: scratch of this thread.
    """
    batch, me = how[BATCH], place(words, DONE + LINE * how[THREAD])
    one, zero, rate = w.dtype.type(1), w.dtype.type(0), numbers[RATE]
    locking, atomic = how[LOCKING], how[LOCKING] == ATOMIC
    quick = batch == 1 and how[OUTPUTS] == 1 and how[ADAGRAD] == 0 and how[KIND] != SOFTMAX
    bias = np.uintp(how[FEATURES])
    data_at, indices_at = np.uintp(data.ctypes.data), np.uintp(indices.ctypes.data)
    loss, done, updates = 0.0, 0, load(me)
    left, seen = how[EXCHANGE], 0  # updates until the next exchange
    if left > 0:
        seen = take_over(apart, w, s, words, how)
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
        sampled = updates % SAMPLE == 0
        if quick and not sampled:
            row = index[start]
            begin, end = np.uintp(indptr[np.uintp(row)]), np.uintp(indptr[np.uintp(row + 1)])
            lock_features(words, how, indices, begin, end, marks, True)
            z[0, 0] = row_dot(data, indices, begin, end, w, zero) + w[bias]
            loss += loss_at(how[KIND], row, labels, targets, z, dz)
            if locking == ROUND_ROBIN and not await_turn(words, stop, how, done):
                break
            slope = dz[0, 0]
            if atomic:
                for e in range(begin, end):
                    u = np.uintp(indices[e])
                    update_coordinate(
                        w, s, u, data[e] * slope, one, decays[u] if decays.size else zero, numbers, False, True
                    )
                update_coordinate(w, s, bias, slope, one, decays[bias] if decays.size else zero, numbers, False, True)
            elif decays.size:
                for e in range(begin, end):
                    u = np.uintp(indices[e])
                    w[u] = sgd_step(w[u], mean_gradient(w[u], data[e] * slope, one, decays[u]), rate)
                w[bias] = sgd_step(w[bias], mean_gradient(w[bias], slope, one, decays[bias]), rate)
            else:
                for e in range(begin, end):
                    u = np.uintp(indices[e])
                    w[u] = sgd_step(w[u], mean_gradient(w[u], data[e] * slope, one, zero), rate)
                w[bias] = sgd_step(w[bias], mean_gradient(w[bias], slope, one, zero), rate)
            store(me, updates + 1)  # before other threads can write
            if locking == ROUND_ROBIN:
                pass_turn(words)
            unlock_features(words, how, indices, begin, end, marks, True)
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
    if 0 < left < how[EXCHANGE]:
        exchange(apart, w, s, words, how)
    pass_turns(words, stop, how, done)
    counts[UPDATES] += done
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

    mean, factor: standardization, or empty. row (features + 1,): scratch for a converted row; its last element is 1.
    features: the numbers 0 to the number of features.
    """
    batch, outputs, locking = how[BATCH], how[OUTPUTS], how[LOCKING]
    me, zero, count = place(words, DONE + LINE * how[THREAD]), w.dtype.type(0), row.size
    base, width = np.uintp(x.ctypes.data), np.uintp(x.shape[1] * x.itemsize)
    rate, decay, adagrad, atomic = numbers[RATE], numbers[DECAY], how[ADAGRAD] != 0, locking == ATOMIC
    loss, done, updates, stale, changed = 0.0, 0, load(me), 0, 0
    left, seen = how[EXCHANGE], 0  # updates until the next exchange
    compared = 0 if left > 0 else w.size  # coordinates that a sampled update reads twice
    if left > 0:
        seen = take_over(apart, w, s, words, how)
    for start in range(0, len(index), batch):
        if done % LOOK == 0 and load(place(stop, 0)) != 0:
            break
        stop_at = min(start + batch, len(index))
        sampled = updates % SAMPLE == 0
        lock_features(words, how, features, 0, count - 1, marks, True)
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
        unlock_features(words, how, features, 0, count - 1, marks, True)
        left -= 1
        if left == 0:
            left, seen = how[EXCHANGE], exchange(apart, w, s, words, how)
    if 0 < left < how[EXCHANGE]:
        exchange(apart, w, s, words, how)
    pass_turns(words, stop, how, done)
    counts[UPDATES] += done
    return loss


ROUNDS = {"sparse": sparse_round, "dense": dense_round}
