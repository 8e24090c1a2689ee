"""The inner loop of SVRG on single examples, for threads that share the parameters without locks. CPU only.

    for each row x with its target y:
        z <- x W + b,  z' <- x W' + b'               W, b of the parameters, W', b' of the snapshot
        e <- slope of the loss at z - slope at z'     a number for each output
        w_j <- w_j - rate * (e x_j + mu_j + decay w_j)              for every coordinate j; x is 1 at the bias

mu is the mean gradient at the snapshot. For a sparse row, z, z' and e x need only its nonzero coordinates. The terms
mu_j + decay w_j change every coordinate in every step. They are applied lazily: when a row needs coordinate j, its k
missed steps are done at once,

    w_j <- q^k w_j - mu_j (1 - q^k) / decay,   q = 1 - rate * decay          (decay 0: w_j - k * rate * mu_j)

`when[j]` is the number of steps that coordinate j has had. The time is the number of steps of all threads; each thread
counts its own, and reads the counts of the others every LOOK steps. One thread gives the result of dense steps. Two
threads may apply the same missed steps; this error is proportional to mu + decay w, which converges to 0.

    rows                   dense (rows, features), or a sparse row's data, indices and indptr
    y (rows, columns)      values to predict, or labels, in the type of the parameters; one column for softmax
    w, snapshot, mean      flat vectors: the weight of feature j for output k is at j * outputs + k, then the biases
    z, e (outputs,)        scratch of the thread"""

import math

import numpy as np

from hpcdl.kernels.bind import function, on_cpu, prepare
from hpcdl.kernels.linear import SOFTMAX, loss_and_slope
from hpcdl.kernels.shared import load, store
from hpcdl.kernels.sparse import row_dot

LOOK = 16  # steps of a thread between two reads of the others' counts


@function
def slopes(kind, z, y, i, one):
    """Return the loss of row i with the outputs z; z <- its derivatives by the outputs."""
    if kind != SOFTMAX:
        total = one - one
        for k in range(len(z)):
            loss, z[k] = loss_and_slope(kind, z[k], y[i, k], one)
            total += loss
        return total
    label, top, total = int(y[i, 0]), z[0], one - one
    for k in range(1, len(z)):
        top = max(top, z[k])
    right = z[label] - top
    for k in range(len(z)):
        z[k] = math.exp(z[k] - top)
        total += z[k]
    for k in range(len(z)):
        z[k] /= total
    z[label] -= one
    return math.log(total) - right


@function
def slope_difference(kind, z, e, y, i, one):
    """Return the loss of row i with the outputs z; e <- slopes at z - slopes at e, the snapshot's outputs."""
    loss = slopes(kind, z, y, i, one)
    slopes(kind, e, y, i, one)
    for k in range(len(z)):
        e[k] = z[k] - e[k]
    return loss


@function
def update_bias(w, mean, at, e, rate, decay):
    """w_j <- w_j - rate (e_k + mu_j + decay w_j) for the coordinates j = at + k, at which x_j is 1."""
    for k in range(len(e)):
        w[at + k] -= rate * (e[k] + mean[at + k] + decay * w[at + k])


@function
def after_missed_steps(w, mean, missed, rate, decay, shrink):
    """Return a coordinate after `missed` steps w <- w - rate (mean + decay w); shrink: log(1 - rate * decay)."""
    if decay == 0:
        return w - missed * (rate * mean)
    rest = math.expm1(missed * shrink)  # q^k - 1
    return w + w * rest + mean * (rest / decay)


@on_cpu
def dense(x, y, w, snapshot, mean, rate, decay, kind, z, e):
    """Take a step for each dense row; return the sum of losses."""
    one = w.dtype.type(1)
    rate, decay = w.dtype.type(rate), w.dtype.type(decay)
    outputs, bias, losses = len(z), x.shape[1] * len(z), 0.0
    for i in range(x.shape[0]):
        for k in range(outputs):
            z[k], e[k] = w[bias + k], snapshot[bias + k]
        for j in range(x.shape[1]):
            for k in range(outputs):
                z[k] += x[i, j] * w[j * outputs + k]
                e[k] += x[i, j] * snapshot[j * outputs + k]
        losses += slope_difference(kind, z, e, y, i, one)
        for j in range(x.shape[1]):
            for k in range(outputs):
                p = j * outputs + k
                w[p] -= rate * (e[k] * x[i, j] + mean[p] + decay * w[p])
        update_bias(w, mean, bias, e, rate, decay)
    return losses


@on_cpu
def sparse(data, indices, indptr, y, w, snapshot, mean, when, counts, thread, rate, decay, kind, z, e):
    """Take a step for each sparse row; return the sum of losses. counts (threads, 8): column 0, each thread's steps."""
    mine, others, line = counts[thread, 0], 0, np.int64(counts.ctypes.data)
    one = w.dtype.type(1)
    zero, shrink = one - one, w.dtype.type(math.log1p(-rate * decay))
    rate, decay = w.dtype.type(rate), w.dtype.type(decay)
    outputs, bias, losses = len(z), len(when) * len(z), 0.0
    for i in range(len(indptr) - 1):
        if i % LOOK == 0:
            others = -mine
            for r in range(counts.shape[0]):
                others += load(line + 64 * r)
        now = mine + others
        for p in range(indptr[i], indptr[i + 1]):
            j = indices[p]
            missed = now - when[j]
            if missed > 0:
                when[j] = now
                for at in range(j * outputs, (j + 1) * outputs):
                    w[at] = after_missed_steps(w[at], mean[at], w.dtype.type(missed), rate, decay, shrink)
        if outputs == 1:
            z[0] = w[bias] + row_dot(data, indices, indptr[i], indptr[i + 1], w, zero)
            e[0] = snapshot[bias] + row_dot(data, indices, indptr[i], indptr[i + 1], snapshot, zero)
        else:
            for k in range(outputs):
                z[k], e[k] = w[bias + k], snapshot[bias + k]
            for p in range(indptr[i], indptr[i + 1]):
                for k in range(outputs):
                    z[k] += data[p] * w[indices[p] * outputs + k]
                    e[k] += data[p] * snapshot[indices[p] * outputs + k]
        losses += slope_difference(kind, z, e, y, i, one)
        for p in range(indptr[i], indptr[i + 1]):
            j = indices[p]
            when[j] = max(when[j], now + 1)
            for k in range(outputs):
                at = j * outputs + k
                w[at] -= rate * (e[k] * data[p] + mean[at] + decay * w[at])
        update_bias(w, mean, bias, e, rate, decay)
        mine += 1
        store(line + 64 * thread, mine)
    return losses


@on_cpu
def settle(w, mean, when, steps, rate, decay, outputs):
    """Apply to every coordinate the steps that it has missed in a round of `steps` steps; when <- 0."""
    shrink = w.dtype.type(math.log1p(-rate * decay))
    rate, decay = w.dtype.type(rate), w.dtype.type(decay)
    for j in range(len(when)):
        missed = w.dtype.type(max(0, steps - when[j]))
        if missed > 0:
            for at in range(j * outputs, (j + 1) * outputs):
                w[at] = after_missed_steps(w[at], mean[at], missed, rate, decay, shrink)
        when[j] = 0


def compile_for(dtype):
    """Compile the three loops for this element type, or load them from the cache, before a run's clock starts."""
    vector, matrix, when = np.empty(0, dtype), np.empty((0, 0), dtype), np.empty(0, np.int64)
    settings = 0.0, 0.0, 0  # rate, decay, kind
    prepare(dense, matrix, matrix, *[vector] * 3, *settings, vector, vector)
    row = vector, np.empty(0, np.int32), when
    prepare(sparse, *row, matrix, *[vector] * 3, when, np.empty((0, 8), np.int64), 0, *settings, vector, vector)
    prepare(settle, vector, vector, when, 0, 0.0, 0.0, 0)
