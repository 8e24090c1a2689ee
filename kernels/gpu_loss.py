"""CUDA twins of loss.py: each block writes its sums (loss, score, invalid labels) to a row; one block adds the rows."""

import math

import numba

from hpcdl.kernels import gpu, loss
from hpcdl.kernels.elementary import exp
from hpcdl.kernels.gpu import THREADS, block_sum, cuda, cuda_kernel, cuda_rowwise, group_max, group_sum, rows_twin
from hpcdl.kernels.loss import hinge_row, huber_row, logistic_row


def write_sums(partial, loss, score, invalid):
    """Write the sums of a block's three numbers to `partial`; all threads of the block must call this function."""
    loss, score, invalid = block_sum(loss), block_sum(score), block_sum(invalid)
    if cuda.threadIdx.x == 0:
        partial[cuda.blockIdx.x, 0] = loss
        partial[cuda.blockIdx.x, 1] = score
        partial[cuda.blockIdx.x, 2] = invalid


@cuda_kernel("T[:, ::1], int64[::1], T[:, ::1], int64, float64[:, ::1]")
def softmax_rows(z, labels, dz, lanes, partial):
    """Compute softmax, loss and gradient of each row by `lanes` neighbouring threads: a power of two, <= classes.
    The largest element and the sum of exponentials are reduced as trees over a row's lanes, in shared memory."""
    tops = cuda.shared.array(THREADS, numba.int64)  # one array on a line: the simulator tells them apart by their lines
    totals = cuda.shared.array(THREADS, T)  # noqa: F821 - see cuda_kernel
    thread, (rows, classes) = cuda.threadIdx.x, z.shape
    lane, leader, groups = thread % lanes, thread - thread % lanes, THREADS // lanes
    losses, correct, invalid = 0.0, 0.0, 0.0
    for first in range(cuda.blockIdx.x * groups, rows, cuda.gridDim.x * groups):
        i = first + thread // lanes
        inside = i < rows
        top = lane
        if inside:
            for j in range(lane + lanes, classes, lanes):
                if z[i, j] > z[i, top]:
                    top = j
        tops[thread] = top
        half = lanes // 2
        while half > 0:
            cuda.syncthreads()
            if inside and lane < half:
                mine, other = tops[thread], tops[thread + half]
                if z[i, other] > z[i, mine] or (z[i, other] == z[i, mine] and other < mine):
                    tops[thread] = other
            half //= 2
        cuda.syncthreads()
        top = tops[leader]
        total = T(0)  # noqa: F821
        if inside:
            for j in range(lane, classes, lanes):
                power = exp(z[i, j] - z[i, top])
                dz[i, j] = power
                total += power
        totals[thread] = total
        half = lanes // 2
        while half > 0:
            cuda.syncthreads()
            if lane < half:
                totals[thread] += totals[thread + half]
            half //= 2
        cuda.syncthreads()
        if inside:
            total, label = totals[leader], labels[i]
            inverse = T(1) / total  # noqa: F821
            for j in range(lane, classes, lanes):
                dz[i, j] = dz[i, j] * inverse - (T(1) if j == label else T(0))  # noqa: F821
            if lane == 0:
                if label < 0 or label >= classes:
                    invalid += 1.0
                else:
                    row = math.log(float(total)) + float(z[i, top] - z[i, label])
                    losses += row
                    if top == label and row == row:
                        correct += 1.0
        cuda.syncthreads()  # before the shared arrays are written again
    write_sums(partial, losses, correct, invalid)


@cuda_kernel("T[:, ::1], int64[::1], T[:, ::1], int64, float64[:, ::1]")
def binary_rows(z, labels, dz, hinge, partial):
    """Compute the logistic loss, or with `hinge` the hinge loss, by one thread for each row."""
    losses, correct, invalid = 0.0, 0.0, 0.0
    for i in range(cuda.grid(1), z.shape[0], cuda.gridsize(1)):
        label = labels[i]
        if label < 0 or label > 1:
            invalid += 1.0
        else:
            if hinge != 0:
                row, gradient, hit = hinge_row(z[i, 0], label, T(1))  # noqa: F821
            else:
                row, gradient, hit = logistic_row(z[i, 0], label, T(1))  # noqa: F821
            dz[i, 0] = gradient
            losses += row
            correct += 1.0 if hit else 0.0
    write_sums(partial, losses, correct, invalid)


@cuda_kernel("T[:, ::1], T[::1], T[:, ::1], float64[:, ::1]")
def squared_rows(z, y, dz, partial):
    """Compute the squared loss by one thread for each row."""
    score = 0.0
    for i in range(cuda.grid(1), z.shape[0], cuda.gridsize(1)):
        error = z[i, 0] - y[i]
        dz[i, 0] = error
        score += float(error) * float(error)
    write_sums(partial, 0.5 * score, score, 0.0)


@cuda_kernel("T[:, ::1], T[::1], T[:, ::1], float64, float64[:, ::1]")
def huber_rows(z, y, dz, delta, partial):
    """Compute Huber's loss by one thread for each row."""
    losses, score = 0.0, 0.0
    for i in range(cuda.grid(1), z.shape[0], cuda.gridsize(1)):
        error = float(z[i, 0] - y[i])
        row, gradient = huber_row(error, delta)
        dz[i, 0] = gradient
        losses += row
        score += error * error
    write_sums(partial, losses, score, 0.0)


@rows_twin(loss.row_max)
def tops_of_rows(z, tops, lanes):
    """tops[i] = the largest element of row i, by `lanes` neighbouring threads."""
    thread, (rows, classes) = cuda.threadIdx.x, z.shape
    lane, groups = thread % lanes, THREADS // lanes
    for start in range(cuda.blockIdx.x * groups, rows, cuda.gridDim.x * groups):
        i, top = start + thread // lanes, -math.inf
        if i < rows:
            for j in range(lane, classes, lanes):
                value = float(z[i, j])
                if value > top:
                    top = value
        top = group_max(top, lanes)
        if i < rows and lane == 0:
            tops[i] = top


@rows_twin(loss.partial_softmax)
def partial_rows(z, labels, first, tops, dz, sums, lanes):
    """Write dz and sums (rows, 2), as loss.partial_softmax does, by `lanes` neighbouring threads for a row."""
    thread, (rows, own) = cuda.threadIdx.x, z.shape
    lane, groups = thread % lanes, THREADS // lanes
    for start in range(cuda.blockIdx.x * groups, rows, cuda.gridDim.x * groups):
        i, total = start + thread // lanes, T(0)  # noqa: F821
        if i < rows:
            for j in range(lane, own, lanes):
                power = exp(z[i, j] - tops[i])
                dz[i, j] = power
                total += power
        total = group_sum(float(total), lanes)
        if i < rows and lane == 0:
            label = labels[i] - first
            sums[i, 0] = total
            sums[i, 1] = z[i, label] - tops[i] if label >= 0 and label < own else T(0)  # noqa: F821


@cuda_rowwise("T[:, ::1], int64[::1], int64, T[:, ::1]", over="dz")
def finish_elements(i, j, dz, labels, first, sums):
    """dz <- dz / total - onehot(y)."""
    one, zero = dz.dtype.type(1), dz.dtype.type(0)
    dz[i, j] = dz[i, j] / sums[i, 0] - (one if j == labels[i] - first else zero)


@cuda_kernel("T[:, ::1], int64[::1], int64, float64[:, ::1]")
def finish_rows(sums, labels, classes, partial):
    """Compute finish_softmax's loss by one thread for each row; how the ranks share the classes does not change it."""
    losses, correct, invalid = 0.0, 0.0, 0.0
    for i in range(cuda.grid(1), sums.shape[0], cuda.gridsize(1)):
        if labels[i] < 0 or labels[i] >= classes:
            invalid += 1.0
        row = math.log(float(sums[i, 0])) - float(sums[i, 1])
        losses += row
        if sums[i, 1] == 0 and row == row:
            correct += 1.0
    write_sums(partial, losses, correct, invalid)


def loss_and_correct(kernel, threads: int, *args) -> tuple[float, int]:
    """Launch a loss kernel; return (sum of losses, number correct: -1 if a label is not a class)."""
    total, correct, invalid = gpu.sums_of(kernel, threads, 3, *args)
    return total, -1 if invalid else int(correct)


@loss.softmax_cross_entropy.device(softmax_rows, gpu.add_up)
def softmax_cross_entropy(z, labels, dz):
    lanes = gpu.lanes_of(z.shape[1])
    return loss_and_correct(softmax_rows, z.shape[0] * lanes, z, labels, dz, lanes)


@loss.logistic.device(binary_rows, gpu.add_up)
def logistic(z, labels, dz):
    return loss_and_correct(binary_rows, z.size, z, labels, dz, False)


@loss.hinge.device(binary_rows, gpu.add_up)
def hinge(z, labels, dz):
    return loss_and_correct(binary_rows, z.size, z, labels, dz, True)


@loss.squared.device(squared_rows, gpu.add_up)
def squared(z, y, dz):
    return tuple(gpu.sums_of(squared_rows, z.size, 3, z, y, dz)[:2])


@loss.huber.device(huber_rows, gpu.add_up)
def huber(z, y, delta, dz):
    return tuple(gpu.sums_of(huber_rows, z.size, 3, z, y, dz, delta)[:2])


@loss.finish_softmax.device(finish_elements, finish_rows, gpu.add_up)
def finish_softmax(dz, labels, first, classes, sums):
    gpu.launch_over(finish_elements, dz, dz, labels, first, sums)
    return loss_and_correct(finish_rows, sums.shape[0], sums, labels, classes)
