"""Losses with gradient and score, in one pass over the rows.

                             loss of a row                      gradient dz             score (summed over rows)
    softmax_cross_entropy    log(sum_j exp z_j) - z_y           softmax(z) - onehot(y)  1 if argmax z is y
    logistic (s = 2y - 1)    log(1 + exp(-s z))                 1/(1 + exp(-z)) - y     1 if z > 0 is y = 1
    squared                  (z - y)^2 / 2                      z - y                   (z - y)^2
    huber (d, e = z - y)     e^2 / 2 where |e| <= d,            e within -d .. d        (z - y)^2
      (Huber, 1964)          else d (|e| - d / 2)
    hinge (s = 2y - 1)       max(0, 1 - s z)                    -s where s z < 1        1 if z > 0 is y = 1
      (Cortes and Vapnik, "Support-vector networks", 1995)

Each kernel writes dz and returns (sum of losses, in float64; sum of scores). No exponential overflows: the largest z of
a row is subtracted first, and the logistic loss is max(-s z, 0) + log(1 + exp(-|z|)). A row with NaN has a NaN loss and
is never correct. If a label is not a class, the score is -1, which the caller reports.

If ranks share the classes (Shoeybi et al., "Megatron-LM", 2019), z (rows, own) holds the `own` classes from `first` on;
own may be 0. softmax_cross_entropy then has three parts, with all-reduces between them:

    row_max            top = max_j z_j                                        then all-reduce the tops by max
    partial_softmax    dz = exp(z - top)      sums = (sum_j dz_j, z_y - top)  then all-reduce the sums
    finish_softmax     dz <- dz / sums_0 - onehot(y)      loss = log(sums_0) - sums_1      score: 1 if sums_1 is 0

A rank that does not hold the class y contributes 0 for z_y - top. Bytes moved per element of b bytes: 2b (row_max b);
per row, if z has one column: 2b + 8 with labels, 3b with values. Exponentials bound the softmaxes and logistic,
arithmetic bounds row_max in the caches, and memory bandwidth bounds the others."""

import math

import numpy as np

from hpcdl.kernels.bind import block, function
from hpcdl.kernels.elementary import exp, log1p
from hpcdl.kernels.largest import largest


@block("T[:, ::1], int64[::1], T[:, ::1]")
def softmax_cross_entropy(z, labels, dz):
    """dz <- softmax(z) - onehot(labels), z (rows, classes); return (sum of losses, number correct; -1: a bad label)."""
    one, loss, correct = z.dtype.type(1), 0.0, 0
    classes = z.shape[1]
    for i in range(z.shape[0]):
        label = labels[i]
        if label < 0 or label >= classes:
            return loss, -1
        top = 0
        for j in range(1, classes):
            if z[i, j] > z[i, top]:
                top = j
        shift, total = z[i, top], z.dtype.type(0)
        for j in range(classes):
            dz[i, j] = exp(z[i, j] - shift)
            total += dz[i, j]
        inverse = one / total
        for j in range(classes):
            dz[i, j] *= inverse
        dz[i, label] -= one
        row = math.log(np.float64(total)) + np.float64(shift - z[i, label])
        loss += row
        if top == label and row == row:
            correct += 1
    return loss, correct


@block("T[:, ::1], T[::1]")
def row_max(z, tops):
    """tops[i] = the largest z[i, j]; NaN is ignored, and the maximum of nothing is -infinity."""
    for i in range(z.shape[0]):
        tops[i] = largest(z, i, z.shape[1])


@block("T[:, ::1], int64[::1], int64, T[::1], T[:, ::1], T[:, ::1]")
def partial_softmax(z, labels, first, tops, dz, sums):
    """dz = exp(z - top); sums (rows, 2) = the sum of dz over these classes, and z_y - top or, without class y, 0."""
    zero, own = z.dtype.type(0), z.shape[1]
    for i in range(z.shape[0]):
        top, total, label = tops[i], zero, labels[i] - first
        for j in range(own):
            power = exp(z[i, j] - top)
            dz[i, j] = power
            total += power
        sums[i, 0], sums[i, 1] = total, zero
        if label >= 0 and label < own:
            sums[i, 1] = z[i, label] - top


@block("T[:, ::1], int64[::1], int64, int64, T[:, ::1]")
def finish_softmax(dz, labels, first, classes, sums):
    """dz <- dz / total - onehot(y); return (sum of losses, number correct, or -1), the same on all ranks.
    A label is correct if no class has a larger z; among equal ones, softmax_cross_entropy accepts only the first."""
    one, own, loss, correct, invalid = dz.dtype.type(1), dz.shape[1], 0.0, 0, 0
    for i in range(dz.shape[0]):  # without dz: so all ranks add in the same order
        invalid += (labels[i] < 0) | (labels[i] >= classes)
        row = math.log(np.float64(sums[i, 0])) - np.float64(sums[i, 1])
        loss += row
        correct += (sums[i, 1] == 0) & (row == row)
    for i in range(dz.shape[0]):
        label, inverse = labels[i] - first, one / sums[i, 0]
        for j in range(own):
            dz[i, j] *= inverse
        if label >= 0 and label < own:
            dz[i, label] -= one
    return loss, -1 if invalid else correct


@function
def logistic_row(z, label, one):
    """Return (loss, gradient, True if correct) of one output z and its label 0 or 1; one: 1 in z's type."""
    small = exp(-abs(z))
    probability = (one if z > 0 else small) / (one + small)
    wrong = z if label == 0 else -z  # -s z
    loss = (one - one if wrong < 0 else wrong) + log1p(small)
    return loss, probability - one * label, (wrong < 0) | ((wrong == 0) & (label == 0))


@block("T[:, ::1], int64[::1], T[:, ::1]")
def logistic(z, labels, dz):
    """dz <- gradient by z (rows, 1), labels (rows,) 0 or 1; return (sum of losses, number correct; -1: a bad label)."""
    one, loss, correct, invalid = z.dtype.type(1), 0.0, 0, 0
    for i in range(z.shape[0]):  # without a branch, so that it vectorizes
        label = labels[i]
        invalid += (label < 0) | (label > 1)
        row, dz[i, 0], hit = logistic_row(z[i, 0], label, one)
        loss += np.float64(row)
        correct += hit
    return loss, -1 if invalid else correct


@function
def hinge_row(z, label, one):
    """Return (loss, gradient, True if correct) of one output z and its label 0 or 1; one: 1 in z's type."""
    sign = one if label == 1 else -one
    short = one - sign * z
    zero = one - one
    inside = short <= zero  # not where z is NaN
    loss, gradient = (zero if inside else short), (zero if inside else -sign)
    return loss, gradient, (z > 0) == (label == 1) and z == z


@block("T[:, ::1], int64[::1], T[:, ::1]")
def hinge(z, labels, dz):
    """dz <- gradient by z (rows, 1), labels (rows,) 0 or 1; return (sum of losses, number correct; -1: a bad label)."""
    one, loss, correct, invalid = z.dtype.type(1), 0.0, 0, 0
    for i in range(z.shape[0]):
        label = labels[i]
        invalid += (label < 0) | (label > 1)
        row, dz[i, 0], hit = hinge_row(z[i, 0], label, one)
        loss += np.float64(row)
        correct += hit
    return loss, -1 if invalid else correct


@block("T[:, ::1], T[::1], T[:, ::1]")
def squared(z, y, dz):
    """dz <- z - y, for z (rows, 1), y (rows,); return (half the sum of squared errors, the sum of squared errors)."""
    score = 0.0
    for i in range(z.shape[0]):
        dz[i, 0] = z[i, 0] - y[i]
        score += np.float64(dz[i, 0]) ** 2
    return 0.5 * score, score


@function
def huber_row(error, delta):
    """Return (loss, gradient g) of one error e. In both branches the loss is g (e - g / 2). NaN stays NaN."""
    gradient = delta if error > delta else error
    gradient = -delta if error < -delta else gradient
    return gradient * (error - gradient / 2), gradient


@block("T[:, ::1], T[::1], T, T[:, ::1]")
def huber(z, y, delta, dz):
    """dz <- z - y within -delta .. delta, z (rows, 1), y (rows,); return (sum of losses, sum of squared errors)."""
    loss, score = 0.0, 0.0
    for i in range(z.shape[0]):
        error = z[i, 0] - y[i]
        row, dz[i, 0] = huber_row(np.float64(error), np.float64(delta))
        loss += row
        score += np.float64(error) ** 2
    return loss, score
