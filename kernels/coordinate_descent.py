"""Stochastic dual coordinate ascent (SDCA) for linear models: each step updates the dual variable of one example.

With examples x_i (their last feature is 1), targets y_i (labels: s_i = -1 or 1), and a dual variable a_i for each,

    v = 1/(lambda n) sum of a_i x_i        w_j = sign(v_j) max(|v_j| - t, 0)        t = l1 / lambda, the threshold

a step sets a_i to the a that maximizes, for z = w x_i and q = |x_i|^2 / (lambda n),

    -conjugate(a) - (a - a_i) z - q/2 (a - a_i)^2

              loss of z                 conjugate(a) = phi*(-a)                          the step's a
    SQUARED   (z - y)^2 / 2             a^2 / 2 - a y                                    a_i + (y - z - a_i) / (1 + q)
    HINGE     max(0, 1 - s z)           -b, for b = s a in [0, 1]                        s clip(s a_i + (1 - s z) / q)
    LOGISTIC  log(1 + exp(-s z))        b log b + (1 - b) log(1 - b), b = s a in (0, 1)  s / (1 + exp(u)), below

and adds its change to v. (Shalev-Shwartz and Zhang, JMLR 2013; with the threshold: the same authors, 2014)

For LOGISTIC u = s z + q (b - b_i) is the margin after the step, where b = b(u) = 1 / (1 + exp(u)): the root of
u - s z + q (b_i - b(u)), which has slopes from 1 to 1 + q/4 and its root between s z - q b_i and s z + q (1 - b_i).
Newton's method from s z finds it; a step that would leave these bounds, or is more than half as long as the step
before, is replaced by a bisection. Convergence is quadratic, and b is exact to all its digits, however near to 0.

Several threads may update one v, each with its own examples. Without `atomic`, one of two simultaneous additions to a
v_j may be lost. (Hsieh, Yu, Dhillon, "PASSCoDe", ICML 2015) The kernels run on the CPU, in float64 for all rows.

    a row                sparse (CSR): scale * data[e] in column indices[e]         dense: factor[j] x[i, j] + shift[j]
    v, w                 (outputs, features + 1), the bias last
    dual, target         (examples, outputs), of this caller's examples; source[i]: the row of example i
    norms                (examples,): |x_i|^2"""

import math

import numpy as np

from hpcdl.kernels.atomics import atomic_add
from hpcdl.kernels.bind import exact, function, on_cpu
from hpcdl.kernels.linear import HINGE, SQUARED
from hpcdl.kernels.sparse import row_dot

NEAR = 1e-9  # relative length of the last Newton step: the error after it is about its square
MOST = 200  # Newton steps; bisection alone needs fewer


@exact
def thresholded(value, threshold):
    """Return sign(value) max(|value| - threshold, 0)."""
    if value > threshold:
        return value - threshold
    if value < -threshold:
        return value + threshold
    return 0.0 if value == value else value


@exact
def logistic_and_rest(u):
    """Return b = 1 / (1 + exp(u)) and 1 - b, each to all its digits."""
    small = math.exp(-abs(u))
    large = 1.0 / (1.0 + small)
    small *= large
    return (small, large) if u > 0.0 else (large, small)


@exact
def logistic_dual(b, margin, q):
    """Return the new b of a step of LOGISTIC from `b`; margin: s z; q: see `dual_step`."""
    low, high = margin - q * b, margin + q * (1.0 - b)
    u, apart = margin, np.inf
    for _ in range(MOST):
        new, rest = logistic_and_rest(u)
        error = u - margin + q * (b - new if u > 0.0 else rest - (1.0 - b))
        if error > 0.0:
            high = u
        else:
            low = u
        move = error / (1.0 + q * new * rest)
        if abs(move) <= NEAR * (1.0 + abs(u)):
            u -= move
            break
        next_u = u - move
        if not (next_u > low and next_u < high and abs(move) <= 0.5 * apart):
            next_u = 0.5 * (low + high)
        apart = abs(next_u - u)
        u = next_u
    new, rest = logistic_and_rest(u)
    return new


@exact
def loss_of(kind, z, y):
    """Return the loss of an output z; y: the value to predict, or a label -1 or 1."""
    if kind == SQUARED:
        return 0.5 * (z - y) * (z - y)
    margin = y * z
    if kind == HINGE:
        return 1.0 - margin if not margin >= 1.0 else 0.0
    return math.log1p(math.exp(-abs(margin))) + (0.0 if margin > 0.0 else -margin)


@exact
def conjugate(kind, a, y):
    """Return the conjugate of the loss, phi*(-a)."""
    if kind == SQUARED:
        return a * (0.5 * a - y)
    b = y * a
    if kind == HINGE:
        return -b
    return (b * math.log(b) if b > 0.0 else 0.0) + ((1.0 - b) * math.log1p(-b) if b < 1.0 else 0.0)


@exact
def dual_step(kind, a, z, y, q):
    """Return the dual variable after its step from a, for output z, target y and q = step |x|^2 (`sparse_pass`)."""
    if kind == SQUARED:
        return a + (y - z - a) / (1.0 + q)
    if kind == HINGE:
        b = y * a + (1.0 - y * z) / q
        return y * (1.0 if b > 1.0 else 0.0 if b < 0.0 else b)
    return y * logistic_dual(y * a, y * z, q)


@exact
def sparse_output(data, indices, first, last, scale, v, threshold):
    """Return w x for a sparse row x; w: v with the threshold applied."""
    bias = v[v.size - 1]
    if threshold == 0.0:
        return scale * row_dot(data, indices, first, last, v, 0.0) + bias
    total = 0.0
    for e in range(first, last):
        total += data[e] * thresholded(v[indices[e]], threshold)
    return scale * total + thresholded(bias, threshold)


@function
def dense_dot(row, v):
    """Return the sum of row[j] v[j]; the processor's vectors determine the order of additions."""
    total = 0.0
    for j in range(row.size):
        total += row[j] * v[j]
    return total


@exact
def dense_output(row, v, threshold):
    """Return w x for a dense row x; w: v with the threshold applied."""
    bias = v[v.size - 1]
    if threshold == 0.0:
        return dense_dot(row, v) + bias
    total = 0.0
    for j in range(row.size):
        total += row[j] * thresholded(v[j], threshold)
    return total + thresholded(bias, threshold)


@exact
def read_row(row, x, i, factor, shift):
    """row <- factor x[i] + shift."""
    for j in range(row.size):
        row[j] = factor[j] * x[i, j] + shift[j]


@exact
def at(v, k, j):
    """Return the address of v[k, j]."""
    return np.int64(v.ctypes.data) + 8 * (k * np.int64(v.shape[1]) + np.int64(j))


@on_cpu
def sparse_norms(data, indices, indptr, scale, source, norms):
    """norms[i] = |x_i|^2 for each example i: the row source[i] times `scale`, and the 1 of the bias."""
    for i in range(source.size):
        total = 0.0
        for e in range(indptr[source[i]], indptr[source[i] + 1]):
            value = scale * data[e]
            total += value * value
        norms[i] = total + 1.0


@on_cpu
def dense_norms(x, factor, shift, source, norms):
    """norms[i] = |x_i|^2 for each example i: factor x[source[i]] + shift, and the 1 of the bias."""
    row = np.empty(x.shape[1])
    for i in range(source.size):
        read_row(row, x, source[i], factor, shift)
        norms[i] = dense_dot(row, row) + 1.0


@on_cpu
def sparse_pass(data, indices, indptr, scale, source, target, norms, dual, v, order, kind, step, threshold, atomic):
    """Take a step for each example of `order`, on sparse rows; return the sum of their losses, each before its step.
    step: 1/(lambda n), times CoCoA's sigma' if other ranks take steps at the same time. Bytes moved per element of k
    bytes: 2 (k + 4), and 24 of v; memory latency bounds the speed if v is in no cache."""
    total, last_column = 0.0, v.shape[1] - 1
    for at_example in range(order.size):
        i = order[at_example]
        first, last = indptr[source[i]], indptr[source[i] + 1]
        for k in range(v.shape[0]):
            z = sparse_output(data, indices, first, last, scale, v[k], threshold)
            total += loss_of(kind, z, target[i, k])
            new = dual_step(kind, dual[i, k], z, target[i, k], step * norms[i])
            change = step * (new - dual[i, k])
            dual[i, k] = new
            if change == 0.0:
                continue
            scaled = change * scale
            if atomic:
                for e in range(first, last):
                    atomic_add(at(v, k, indices[e]), scaled * data[e])
                atomic_add(at(v, k, last_column), change)
            else:
                for e in range(first, last):
                    v[k, indices[e]] += scaled * data[e]
                v[k, last_column] += change
    return total


@on_cpu
def dense_pass(x, factor, shift, source, target, norms, dual, v, order, kind, step, threshold, atomic):
    """Take a step for each example of `order`, on dense rows; see `sparse_pass`. Arithmetic bounds the speed."""
    total, features = 0.0, x.shape[1]
    row = np.empty(features)
    for at_example in range(order.size):
        i = order[at_example]
        read_row(row, x, source[i], factor, shift)
        for k in range(v.shape[0]):
            z = dense_output(row, v[k], threshold)
            total += loss_of(kind, z, target[i, k])
            new = dual_step(kind, dual[i, k], z, target[i, k], step * norms[i])
            change = step * (new - dual[i, k])
            dual[i, k] = new
            if change == 0.0:
                continue
            if atomic:
                for j in range(features):
                    if row[j] != 0.0:
                        atomic_add(at(v, k, j), change * row[j])
                atomic_add(at(v, k, features), change)
            else:
                for j in range(features):
                    v[k, j] += change * row[j]
                v[k, features] += change
    return total


@on_cpu
def sparse_certificate(data, indices, indptr, scale, source, target, dual, w, first, last, kind, step, back):
    """Return (sum of losses at w, sum of conjugates) of the examples first to last - 1; back += step * sum of a_i x_i.
    step: 1/(lambda n). Bytes moved per element of k bytes: 2 (k + 4), and 24 of w and back."""
    losses, conjugates, bias = 0.0, 0.0, w.shape[1] - 1
    for i in range(first, last):
        begin, end = indptr[source[i]], indptr[source[i] + 1]
        for k in range(w.shape[0]):
            z = sparse_output(data, indices, begin, end, scale, w[k], 0.0)
            losses += loss_of(kind, z, target[i, k])
            conjugates += conjugate(kind, dual[i, k], target[i, k])
            weight = step * dual[i, k]
            scaled = weight * scale
            for e in range(begin, end):
                back[k, indices[e]] += scaled * data[e]
            back[k, bias] += weight
    return losses, conjugates


@on_cpu
def dense_certificate(x, factor, shift, source, target, dual, w, first, last, kind, step, back):
    """Do as `sparse_certificate`, with the same results, for dense rows. Bytes moved per element of k bytes: k + 48."""
    losses, conjugates, features = 0.0, 0.0, x.shape[1]
    row = np.empty(features)
    for i in range(first, last):
        read_row(row, x, source[i], factor, shift)
        for k in range(w.shape[0]):
            z = dense_output(row, w[k], 0.0)
            losses += loss_of(kind, z, target[i, k])
            conjugates += conjugate(kind, dual[i, k], target[i, k])
            weight = step * dual[i, k]
            for j in range(features):
                back[k, j] += weight * row[j]
            back[k, features] += weight
    return losses, conjugates


SPARSE = sparse_norms, sparse_pass, sparse_certificate
DENSE = dense_norms, dense_pass, dense_certificate
