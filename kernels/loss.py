"""Losses with gradient and score, in one pass over the rows.

                             loss of a row                      gradient dz             score (summed over rows)
    softmax_cross_entropy    log(sum_j exp z_j) - z_y           softmax(z) - onehot(y)  1 if argmax z is y
    logistic (s = 2y - 1)    log(1 + exp(-s z))                 1/(1 + exp(-z)) - y     1 if z > 0 is y = 1
    squared                  (z - y)^2 / 2                      z - y                   (z - y)^2
    huber (d, e = z - y)     e^2 / 2 where |e| <= d,            e within -d .. d        (z - y)^2
                             else d (|e| - d / 2)
    hinge (s = 2y - 1)       max(0, 1 - s z)                    -s where s z < 1        1 if z > 0 is y = 1

Each kernel writes dz and returns (sum of losses, sum of scores); the losses are summed in float64. No exponential
overflows: the largest z of a row is subtracted first, and the logistic loss is max(-s z, 0) + log(1 + exp(-|z|)). A row
with NaN has a NaN loss and never counts as correct. If a label is not a class, the kernel returns the score -1, which
the caller reports; nothing is read out of bounds.

Where ranks share the classes (Shoeybi et al., "Megatron-LM", 2019), z (rows, own) holds the classes first .. first +
own - 1, where own may be 0. softmax_cross_entropy then has three parts, with all-reduces between them:

    row_max            top = max_j z_j                                        then all-reduce the tops by max
    partial_softmax    dz = exp(z - top)      sums = (sum_j dz_j, z_y - top)  then all-reduce the sums
    finish_softmax     dz <- dz / sums_0 - onehot(y)      loss = log(sums_0) - sums_1      score: 1 if sums_1 is 0

A rank that does not hold the class y contributes 0 for z_y - top.
"""

import math

import numpy as np

from hpcdl.kernels.bind import block, function
from hpcdl.kernels.elementary import exp, log1p
from hpcdl.kernels.largest import largest


@block("T[:, ::1], int64[::1], T[:, ::1]")
def softmax_cross_entropy(z, labels, dz):
    """Softmax and cross-entropy of z (rows, classes) against labels (rows,).

    Bytes moved per element of b bytes: 2b, and 8 for each row; arithmetic bounds it, an exponential for each element.
    """
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
    """tops[i] = the largest z[i, j]; NaN is ignored, and the maximum of nothing is -infinity.

    Bytes moved per element of b bytes: b; arithmetic bounds it in the caches, memory bandwidth beyond.
    """
    for i in range(z.shape[0]):
        tops[i] = largest(z, i, z.shape[1])


@block("T[:, ::1], int64[::1], int64, T[::1], T[:, ::1], T[:, ::1]")
def partial_softmax(z, labels, first, tops, dz, sums):
    """dz = exp(z - top); sums (rows, 2) = the sum of dz over these classes, and z_y - top or, without class y, 0.

    Bytes moved per element of b bytes: 2b; arithmetic bounds it, an exponential for each element.
    """
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
    """dz <- dz / total - onehot(y); return (sum of losses, number correct), as softmax_cross_entropy of all classes.

    All ranks return the same two numbers. A label is correct if no class has a larger z; among equal ones,
    softmax_cross_entropy accepts only the first.

    Bytes moved per element of b bytes: 2b; memory bandwidth bounds it.
    """
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
    """Logistic loss of z (rows, 1) against labels 0 or 1 (rows,).

    Bytes moved per row, b bytes an element: 2b + 8; arithmetic bounds it, an exponential and a logarithm for each row.
    """
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
    """Hinge loss of z (rows, 1) against labels 0 or 1 (rows,).

    (Cortes and Vapnik, "Support-vector networks", 1995.) Bytes moved per row, b bytes an element: 2b + 8; memory
    bandwidth bounds it.
    """
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
    """Half of the squared error of z (rows, 1) against y (rows,).

    Bytes moved per row, b bytes an element: 3b; memory bandwidth bounds it.
    """
    score = 0.0
    for i in range(z.shape[0]):
        dz[i, 0] = z[i, 0] - y[i]
        score += np.float64(dz[i, 0]) ** 2
    return 0.5 * score, score


@function
def huber_row(error, delta):
    """Return (loss, gradient) of one error e: with the gradient g, both branches are g (e - g / 2). NaN stays NaN."""
    gradient = delta if error > delta else error
    gradient = -delta if error < -delta else gradient
    return gradient * (error - gradient / 2), gradient


@block("T[:, ::1], T[::1], T, T[:, ::1]")
def huber(z, y, delta, dz):
    """Huber's loss of z (rows, 1) against y (rows,): squared up to an error of delta, linear beyond.

    (Huber, "Robust estimation of a location parameter", 1964.) Bytes moved per row, b bytes an element: 3b; memory
    bandwidth bounds it.
    """
    loss, score = 0.0, 0.0
    for i in range(z.shape[0]):
        error = z[i, 0] - y[i]
        row, dz[i, 0] = huber_row(np.float64(error), np.float64(delta))
        loss += row
        score += np.float64(error) ** 2
    return loss, score
